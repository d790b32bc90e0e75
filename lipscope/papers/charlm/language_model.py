"""A character language model with a choice of attention, and optionally invertible blocks.

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

import torch
from torch import Tensor, nn

from lipscope._checks import check_whole
from lipscope._types import UserError
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
            check_whole(name, getattr(self, name), 1)
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
