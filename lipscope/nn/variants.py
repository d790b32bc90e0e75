"""The attention layers by name: the table that training, conversion and the comparison read."""

from __future__ import annotations

from collections.abc import Callable

from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.cosine_attention import CosineSelfAttention
from lipscope.nn.dot_attention import DotSelfAttention
from lipscope.nn.l2_attention import ContractiveL2Attention, L2SelfAttention

Factory = Callable[[int, int, bool], AttentionLayer]

CONSTANT = 0.9
"""The constant of the contractive layer when only its name is given."""

ATTENTIONS: dict[str, Factory] = {
    "dot": DotSelfAttention,
    "l2": L2SelfAttention,
    "contractive": lambda dim, heads, causal: ContractiveL2Attention(
        dim, heads, CONSTANT, causal=causal
    ),
    "cosine": CosineSelfAttention,
}
"""name -> factory(dim, heads, causal)."""
