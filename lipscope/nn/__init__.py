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
    from lipscope.nn.attention_layer import AttentionLayer as AttentionLayer
    from lipscope.nn.attention_layer import CosineSelfAttention as CosineSelfAttention
    from lipscope.nn.attention_layer import DotSelfAttention as DotSelfAttention
    from lipscope.nn.contractive import ATTENTIONS as ATTENTIONS
    from lipscope.nn.contractive import ContractiveL2Attention as ContractiveL2Attention
    from lipscope.nn.contractive import ContractiveMLP as ContractiveMLP
    from lipscope.nn.invertible import Inverse as Inverse
    from lipscope.nn.invertible import InvertibleResidual as InvertibleResidual
    from lipscope.nn.invertible import LogDet as LogDet
    from lipscope.nn.l2_attention import BallL2Attention as BallL2Attention
    from lipscope.nn.l2_attention import L2SelfAttention as L2SelfAttention
    from lipscope.nn.parametrize import SigmaReparam as SigmaReparam
    from lipscope.nn.parametrize import sigma_reparametrise as sigma_reparametrise
    from lipscope.nn.parametrize import spectrally_normalise as spectrally_normalise
    from lipscope.nn.regularize import jasmin as jasmin
    from lipscope.nn.regularize import measured_sigma as measured_sigma
    from lipscope.nn.wrapped import unwrapped as unwrapped
