"""Attention with a guarantee: layers with a Lipschitz constant, residuals that invert, and eyes on both in training."""

from lipscope.nn.cosine_attention import CosineSelfAttention
from lipscope.nn.dot_attention import DotSelfAttention
from lipscope.nn.invertible import Inverse, InvertibleResidual, LogDet
from lipscope.nn.l2_attention import ContractiveL2Attention, L2SelfAttention
from lipscope.nn.variants import ATTENTIONS

__all__ = [
    "ATTENTIONS",
    "ContractiveL2Attention",
    "CosineSelfAttention",
    "DotSelfAttention",
    "Inverse",
    "InvertibleResidual",
    "L2SelfAttention",
    "LogDet",
]
