"""The attention layers by name: the table behind training, conversion and comparison."""

from __future__ import annotations

from collections.abc import Callable

from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.contractive import ContractiveL2Attention
from lipscope.nn.cosine_attention import CosineSelfAttention
from lipscope.nn.dot_attention import DotSelfAttention
from lipscope.nn.l2_attention import BallL2Attention, L2SelfAttention
from lipscope.nn.query_ball import BALL

Factory = Callable[[int, int, bool], AttentionLayer]

CONSTANT = 0.9
"""The constant of a contractive layer if only its name is given."""

CONTRACTIVE: dict[str, float | None] = {"contractive": None, "contractive-ball": BALL}
"""The layers that take a constant: name -> the ball that their queries are projected onto."""


def make_contractive(
    name: str, dim: int, heads: int, causal: bool, constant: float = CONSTANT
) -> ContractiveL2Attention:
    """The layer of this name in CONTRACTIVE."""
    return ContractiveL2Attention(dim, heads, constant, causal=causal, ball=CONTRACTIVE[name])


ATTENTIONS: dict[str, Factory] = {
    "dot": DotSelfAttention,
    "l2": L2SelfAttention,
    "ball": BallL2Attention,
    "contractive": lambda *sizes: make_contractive("contractive", *sizes),
    "contractive-ball": lambda *sizes: make_contractive("contractive-ball", *sizes),
    "cosine": CosineSelfAttention,
}
"""The attention layers by name: name -> factory(dim, heads, causal)."""
