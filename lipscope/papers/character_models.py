"""The character models that the second paper compares: Transformers by attention, and an LSTM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipscope.attention.scores import L2, augment
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.papers.charlm.language_model import (
    INITIAL,
    Architecture,
    CharacterTransformer,
    MakeAttention,
    make_attention,
)


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
