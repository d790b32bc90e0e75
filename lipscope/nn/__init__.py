"""Attention layers with a Lipschitz constant, invertible residuals and regularisers, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipscope._contents import contents

_CONTENTS = {
    "ATTENTIONS": "contractive",
    "AttentionLayer": "attention_layer",
    "BallL2Attention": "l2_attention",
    "ContractiveL2Attention": "contractive",
    "ContractiveMLP": "contractive",
    "CosineSelfAttention": "attention_layer",
    "DotSelfAttention": "attention_layer",
    "Inverse": "invertible",
    "InvertibleResidual": "invertible",
    "L2SelfAttention": "l2_attention",
    "LogDet": "invertible",
    "SigmaReparam": "parametrize",
    "jasmin": "regularize",
    "measured_sigma": "regularize",
    "sigma_reparametrise": "parametrize",
    "spectrally_normalise": "parametrize",
    "unwrapped": "wrapped",
}

__getattr__, __dir__ = contents(__name__, _CONTENTS)
__all__ = [
    "ATTENTIONS",
    "AttentionLayer",
    "BallL2Attention",
    "ContractiveL2Attention",
    "ContractiveMLP",
    "CosineSelfAttention",
    "DotSelfAttention",
    "Inverse",
    "InvertibleResidual",
    "L2SelfAttention",
    "LogDet",
    "SigmaReparam",
    "jasmin",
    "measured_sigma",
    "sigma_reparametrise",
    "spectrally_normalise",
    "unwrapped",
]

if TYPE_CHECKING:
    from lipscope.nn.attention_layer import AttentionLayer, CosineSelfAttention, DotSelfAttention
    from lipscope.nn.contractive import ATTENTIONS, ContractiveL2Attention, ContractiveMLP
    from lipscope.nn.invertible import Inverse, InvertibleResidual, LogDet
    from lipscope.nn.l2_attention import BallL2Attention, L2SelfAttention
    from lipscope.nn.parametrize import SigmaReparam, sigma_reparametrise, spectrally_normalise
    from lipscope.nn.regularize import jasmin, measured_sigma
    from lipscope.nn.wrapped import unwrapped
