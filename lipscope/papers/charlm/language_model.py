"""Character language models: Transformers with a choice of attention or blocks, and an LSTM.

An ordinary block is pre-norm, x + attention(norm(x)), then x + mlp(norm(x)); or post-norm,
norm(x + attention(x)), then norm(x + mlp(x)); or it has no norm. LayerNorm has no useful Lipschitz
constant (1/sqrt(eps), attained at constant tokens), so an invertible block does without: both its
branches g are contractions, |g(x) - g(y)| <= c |x - y| with c < 1, for any weights. Then

    (1 - c) |x - y| <= |x + g(x) - y - g(y)| <= (1 + c) |x - y|,

and a stack of `depth` such blocks is invertible with Lipschitz constant at most (1 + c)^(2 depth).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor, nn

from lipscope import UserError
from lipscope.attention.scores import L2, augment
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.contractive import (
    ATTENTIONS,
    CONSTANT,
    CONTRACTIVE,
    ContractiveMLP,
    make_contractive,
)
from lipscope.nn.invertible import InvertibleResidual

INITIAL = 0.1
"""Initial standard deviation of embeddings; they train faster than with torch's default of 1."""

EXPANSION = 4
"""Hidden units of a feed-forward layer per input."""

NORMS = ("pre", "post", "none")
"""Where a block has its LayerNorms: before its branches, after its sums, or nowhere."""


def check_count(name: str, value: object, least: int) -> None:
    """Raise UserError unless a value is a whole number, at least `least`, of 64 bits."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= int(value) < 2**63:  # type: ignore[call-overload]  # it is whole
        # Python refuses to print the longest numbers.
        got = "an integer of more than 64 bits" if whole and value > 10**30 else f"{value!r:.80}"  # type: ignore[operator]
        raise UserError(f"{name} must be a whole number from {least} to {2**63 - 1}, got {got}")


@dataclass(frozen=True)
class Architecture:
    """The shape of a model, as plain numbers and strings: the content of a configuration file.

    constant: Lipschitz constant of contractive attention; if invertible, of feed-forward layers too
    norm:     one of NORMS; "pre" has one more norm before the readout, an invertible model's only
    """

    vocabulary: int
    attention: str = "l2"
    depth: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    invertible: bool = False
    constant: float = CONSTANT
    norm: str = "pre"

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise UserError(
                f"there is no attention {self.attention!r}; choose one of {', '.join(ATTENTIONS)}"
            )
        if self.norm not in NORMS:
            raise UserError(f"there is no norm {self.norm!r}; choose one of {', '.join(NORMS)}")
        for name in ("vocabulary", "depth", "width", "heads", "context"):
            check_count(name, getattr(self, name), 1)
        if self.width % self.heads:
            raise UserError(
                f"width {self.width} must be a multiple of the number of heads, {self.heads}"
            )
        if not 0 < self.constant < math.inf:
            raise UserError(f"constant must be a positive number, got {self.constant!r}")
        if self.invertible and self.attention not in CONTRACTIVE:
            raise UserError(
                f"invertible blocks need attention that is a contraction, which {self.attention} "
                f"attention is not; choose attention {' or '.join(CONTRACTIVE)}"
            )
        if self.invertible and self.constant >= 1:
            raise UserError(f"invertible blocks need a constant below 1, got {self.constant:g}")
        if self.invertible and self.norm == "post":
            raise UserError(
                "a norm after the sum cannot be undone, so invertible blocks have none; "
                "choose norm pre (one before the readout alone) or none"
            )


def norm_in_words(norm: str | bool) -> str:
    """The norm by name; older files store a boolean, whether the model is pre-norm."""
    return {True: "pre", False: "none"}[norm] if isinstance(norm, bool) else norm


MakeAttention = Callable[[Architecture], AttentionLayer]


def make_attention(architecture: Architecture) -> AttentionLayer:
    """One causal attention layer of this architecture."""
    a = architecture
    if a.attention in CONTRACTIVE:
        return make_contractive(a.attention, a.width, a.heads, True, a.constant)
    return ATTENTIONS[a.attention](a.width, a.heads, True)


class CharacterTransformer(nn.Module):
    """Character indices [..., n] to logits of the next character, [..., n, vocabulary]."""

    def __init__(
        self, architecture: Architecture, attention: MakeAttention = make_attention
    ) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.embedding = nn.Embedding(a.vocabulary, a.width)
        self.position = nn.Embedding(a.context, a.width)
        block = InvertibleBlock if a.invertible else PostNormBlock if a.norm == "post" else Block
        self.blocks = nn.ModuleList(block(a, attention(a)) for _ in range(a.depth))
        # Pre-norm blocks leave their sum unnormalised, so it needs a norm before the readout.
        self.norm = nn.LayerNorm(a.width) if a.norm == "pre" else nn.Identity()
        self.readout = nn.Linear(a.width, a.vocabulary)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=INITIAL)

    def forward(self, ids: Tensor) -> Tensor:
        return self.readout(self.norm(self.trunk(self.embed(ids))))

    def embed(self, ids: Tensor) -> Tensor:
        n = ids.shape[-1]
        context = self.architecture.context
        if n > context:
            raise UserError(f"{n} characters are more than the {context} positions of this model")
        return self.embedding(ids) + self.position.weight[:n]

    def trunk(self, X: Tensor) -> Tensor:
        """Embedded characters [..., n, width] through all blocks."""
        for block in self.blocks:
            X = block(X)
        return X

    def attention_layers(self) -> list[AttentionLayer]:
        """The attention of each block, first to last."""
        return [layer for layer in self.modules() if isinstance(layer, AttentionLayer)]

    def trunk_bound(self) -> float:
        """A Lipschitz constant of the trunk for any length; infinite unless it is invertible."""
        a = self.architecture
        return (1 + a.constant) ** (2 * a.depth) if a.invertible else math.inf

    def trunk_inverse(self, Y: Tensor) -> Tensor:
        """The embedded characters that the trunk maps to Y, for an invertible trunk."""
        if not self.architecture.invertible:
            raise UserError(
                "the blocks of this model are not invertible; make it with invertible=True"
            )
        with torch.no_grad():
            for block in reversed(self.blocks):
                assert isinstance(block, InvertibleBlock)
                Y = block.inverse(Y)
        return Y


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or the same without norms."""

    def __init__(self, a: Architecture, attention: AttentionLayer) -> None:
        super().__init__()
        norm = nn.Identity if a.norm == "none" else nn.LayerNorm
        self.attention_norm = norm(a.width)
        self.mlp_norm = norm(a.width)
        self.attention = attention
        self.mlp = nn.Sequential(
            nn.Linear(a.width, EXPANSION * a.width),
            nn.GELU(),
            nn.Linear(EXPANSION * a.width, a.width),
        )

    def forward(self, X: Tensor) -> Tensor:
        X = X + self.attention(self.attention_norm(X))
        return X + self.mlp(self.mlp_norm(X))


class PostNormBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x)); the readout follows without another norm."""

    def forward(self, X: Tensor) -> Tensor:
        X = self.attention_norm(X + self.attention(X))
        return self.mlp_norm(X + self.mlp(X))


class InvertibleBlock(nn.Module):
    """x + attention(x), then x + mlp(x), both branches contractions."""

    def __init__(self, a: Architecture, attention: AttentionLayer) -> None:
        super().__init__()
        self.attention = InvertibleResidual(attention)
        self.mlp = InvertibleResidual(ContractiveMLP(a.width, EXPANSION * a.width, a.constant))

    def forward(self, X: Tensor) -> Tensor:
        return self.mlp(self.attention(X))

    def inverse(self, Y: Tensor) -> Tensor:
        return self.attention.inverse(self.mlp.inverse(Y).value).value


class UntiedL2Attention(AttentionLayer):
    """softmax(-|q - k|^2 / sqrt(k)) with free queries, keys and values: it has no constant.

    The paper trains it beside the tied layer; `lipschitz_bound` is infinite.
    """

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__(dim, heads, causal)
        self.query, self.key, self.value, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def project(self, X: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.split(part(X)) for part in (self.query, self.key, self.value))
        return *augment(L2(), q, k), v


class CharacterLSTM(nn.Module):
    """Character indices [..., n] to logits of the next character, [..., n, vocabulary].

    `depth` layers of `width` units. The recurrence is written out: torch's own LSTM cannot be
    mapped over stacked weights.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.embedding = nn.Embedding(a.vocabulary, a.width)
        self.cells = nn.ModuleList(nn.LSTMCell(a.width, a.width) for _ in range(a.depth))
        self.readout = nn.Linear(a.width, a.vocabulary)
        nn.init.normal_(self.embedding.weight, std=INITIAL)

    def forward(self, ids: Tensor) -> Tensor:
        X = self.embedding(ids)
        for cell in self.cells:
            assert isinstance(cell, nn.LSTMCell)
            X = unrolled(cell, X)
        logits: Tensor = self.readout(X)
        return logits


def unrolled(cell: nn.LSTMCell, X: Tensor) -> Tensor:
    """The hidden states [..., n, width] of a cell that reads X [..., n, width] from state 0."""
    # What does not depend on the state is one product for all positions.
    inner = X @ cell.weight_ih.mT + cell.bias_ih + cell.bias_hh
    h = c = torch.zeros_like(X[..., 0, :])
    states = []
    for given in inner.unbind(dim=-2):
        i, f, g, o = (given + h @ cell.weight_hh.mT).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states, dim=-2)


@dataclass(frozen=True)
class Variant:
    """A kind of model: its attention and blocks, or a model of its own.

    make:      makes an attention layer, if `nn` has no such layer
    build:     makes the whole model, if it is not a Transformer
    lipschitz: whether its attention has a Lipschitz constant
    """

    attention: str
    invertible: bool = False
    make: MakeAttention = make_attention
    build: Callable[[Architecture], nn.Module] | None = None
    lipschitz: bool = False

    def model(self, architecture: Architecture) -> nn.Module:
        """A model of this kind with fresh weights."""
        if self.build is not None:
            return self.build(architecture)
        return CharacterTransformer(architecture, self.make)


VARIANTS = {
    "LSTM": Variant("dot", build=CharacterLSTM),
    "dot": Variant("dot"),
    "L2 untied": Variant("dot", make=lambda a: UntiedL2Attention(a.width, a.heads, True)),
    "L2 tied": Variant("l2", lipschitz=True),
    "contractive": Variant("contractive", lipschitz=True),
    "ball": Variant("ball", lipschitz=True),
    "contractive ball": Variant("contractive-ball", lipschitz=True),
}
"""The models of the paper, and two more: queries in a ball."""


def described(name: str) -> str:
    """The name of a variant, with a word on those of L2 attention that have no constant."""
    bare = name.startswith("L2") and not VARIANTS[name].lipschitz
    return f"{name} (not Lipschitz)" if bare else name
