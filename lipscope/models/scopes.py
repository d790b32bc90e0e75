"""The maps that can be measured in a model, each with its formula; needs no torch.

X holds one token per row; P_h(X) is the attention matrix of head h, with its mask, rotary positions, soft cap
and sinks. Whatever else the model does on the way (gates, more norms) is part of the map.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scope:
    """A map of tokens inside a model: its formula, and in words."""

    formula: str
    description: str


SCOPES = {
    "heads": Scope(
        "f_h(X) = P_h(X) (X V_h' + 1 b_h')",
        "each head alone, before the output projection, at the attention module's own input",
    ),
    "attention": Scope(
        "f(X) = [f_1(X) ... f_H(X)] O' + 1 b'",
        "all heads with the output projection, at the attention module's own input, no residual",
    ),
    "normed": Scope(
        "f(X) = Attention(Norm(X))",
        "attention after its normalisation, at the block's input, no residual (pre-norm models)",
    ),
    "residual": Scope(
        "f(X) = X + Attention(Norm(X)) or Norm(X + Attention(X))",
        "the attention sub-layer as the model runs it, residual and normalisation in, at the block's input",
    ),
    "block": Scope(
        "f(X) = Block(X)",
        "one block as the model runs it: attention, feed-forward, residuals and normalisations",
    ),
    "model": Scope(
        "f(X) = Norm(Block_L( ... Block_1(X)))",
        "from the embeddings, as they enter the first block, to the last hidden state",
    ),
}
