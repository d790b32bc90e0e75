"""The attention layers by name: the table behind training, conversion and comparison."""

from __future__ import annotations

from collections.abc import Callable

from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.contractive import ContractiveL2Attention
from lipscope.nn.cosine_attention import CosineSelfAttention
from lipscope.nn.dot_attention import DotSelfAttention
from lipscope.nn.l2_attention import L2SelfAttention

Factory = Callable[[int, int, bool], AttentionLayer]

CONSTANT = 0.9
"""The constant of the contractive layer if only its name is given."""

ATTENTIONS: dict[str, Factory] = {
    "dot": DotSelfAttention,
    "l2": L2SelfAttention,
    "contractive": lambda dim, heads, causal: ContractiveL2Attention(
        dim, heads, CONSTANT, causal=causal
    ),
    "cosine": CosineSelfAttention,
}
"""The attention layers by name: name -> factory(dim, heads, causal)."""
