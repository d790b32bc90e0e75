"""Chooses the implementation: fused kernels for tensors on a GPU that fit them, tiles elsewhere."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from lipscope._torch_internals import is_wrapped
from lipscope.attention import tiled
from lipscope.attention.pattern import Pattern
from lipscope.attention.reference import Triple

second_vjp, second_jvp = tiled.second_vjp, tiled.second_jvp


def fused(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> bool:
    """Whether the Triton kernels support these tensors."""
    if not (q.is_cuda and k.is_cuda and v.is_cuda) or find_spec("triton") is None:
        return False
    # Inside vmap or jvp a tensor is a wrapper without memory of its own that a kernel could read.
    if any(is_wrapped(x) for x in (q, k, v)):
        return False
    from lipscope.attention import triton_operands

    return triton_operands.unsupported(q, k, v, pattern) is None


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """o (float32 out of the kernels) and the log-sum-exp, +inf for a fully masked row."""
    if not fused(q, k, v, pattern):
        return tiled.forward(q, k, v, pattern)
    from lipscope.attention import triton_forward

    o, lse = triton_forward.forward(q, k, v, pattern)
    return o, lse.masked_fill(lse == -torch.inf, torch.inf)


def jvp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tangent: Triple, pattern: Pattern
) -> Tensor:
    if not fused(q, k, v, pattern):
        return tiled.jvp(q, k, v, lse, tangent, pattern)
    from lipscope.attention import triton_jvp

    return triton_jvp.jvp(q, k, v, o, lse, tangent, pattern)


def vjp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, g: Tensor, pattern: Pattern
) -> Triple:
    """torch's own backward where it supports dtype and pattern, our kernels otherwise."""
    if not fused(q, k, v, pattern):
        return tiled.vjp(q, k, v, lse, g, pattern)
    from lipscope.attention import library_vjp, triton_vjp

    if library_vjp.unsupported(q, k, v, pattern) is None:
        return library_vjp.vjp(q, k, v, o, lse, g, pattern)
    return triton_vjp.vjp(q, k, v, o, lse, g, pattern)
