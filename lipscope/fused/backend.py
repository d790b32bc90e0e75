"""Chooses the implementation: fused kernels for tensors on a GPU that fit them, tiles elsewhere.

Whatever the dtype, a row's log-sum-exp is float32 at least, and tiles compute in float32 at least:
bfloat16 and float16 are formats to store numbers in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from lipscope.fused import tiled
from lipscope.fused._torch_internals import has_memory
from lipscope.fused.pattern import Pattern
from lipscope.fused.reference import Triple

HALF = (torch.bfloat16, torch.float16)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def fused(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *moved: Tensor) -> bool:
    """Whether the Triton kernels support these tensors, tangents and gradients among them."""
    if not (q.is_cuda and k.is_cuda and v.is_cuda) or not has_triton():
        return False
    # Inside vmap or jvp a tensor is a wrapper without memory of its own that a kernel could read.
    parts = (pattern.mask, pattern.queries, pattern.keys, pattern.sinks)
    if not all(has_memory(x) for x in (q, k, v, *moved, *parts) if x is not None):
        return False
    from lipscope.fused import triton_operands

    return triton_operands.unsupported(q, k, v, pattern) is None


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _wide3(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Triple:
    """A point or a tangent as the tiles take it: float32 at least, the scale in its queries."""
    q, k, v = (x.float() if x.dtype in HALF else x for x in (q, k, v))
    return q if pattern.scale == 1 else q * pattern.scale, k, v


def _narrow3(onto: Sequence[Tensor], dtype: torch.dtype, pattern: Pattern) -> Triple:
    """Gradients in scaled queries, keys and values as those in q, k, v of this dtype."""
    gq, gk, gv = onto
    gq = gq if pattern.scale == 1 else gq * pattern.scale
    return gq.to(dtype), gk.to(dtype), gv.to(dtype)


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """o (float32 for half precision) and the log-sum-exp, +inf for a fully masked row."""
    if not fused(q, k, v, pattern):
        return tiled.forward(*_wide3(q, k, v, pattern), pattern)
    from lipscope.fused import triton_forward

    return triton_forward.forward(q, k, v, pattern)


def value(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """o in the dtype of q, where no derivative will follow."""
    if not fused(q, k, v, pattern):
        return forward(q, k, v, pattern)[0].to(q.dtype)
    from lipscope.fused import triton_forward

    return triton_forward.forward(q, k, v, pattern, keep_digits=False)[0]


def jvp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tangent: Triple, pattern: Pattern
) -> Tensor:
    if not fused(q, k, v, pattern, *tangent):
        wide = _wide3(q, k, v, pattern)
        return tiled.jvp(*wide, lse, _wide3(*tangent, pattern), pattern).to(q.dtype)
    from lipscope.fused import triton_jvp

    return triton_jvp.jvp(q, k, v, o, lse, tangent, pattern)


def value_and_tangent(
    q: Tensor, k: Tensor, v: Tensor, tangent: Triple, pattern: Pattern
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, J d and the log-sum-exp, as `forward` and `jvp` return them, and each row's mean of dT."""
    if not fused(q, k, v, pattern, *tangent):
        wide = _wide3(q, k, v, pattern)
        o, do, lse, drift = tiled.value_and_tangent(*wide, _wide3(*tangent, pattern), pattern)
        return o, do.to(q.dtype), lse, drift
    from lipscope.fused import triton_jvp, triton_tangent

    if triton_tangent.unsupported(q, pattern) is None:
        return triton_tangent.value_and_tangent(q, k, v, tangent, pattern)
    o, lse = forward(q, k, v, pattern)
    do, drift = triton_jvp.jvp_and_drift(q, k, v, o, lse, tangent, pattern)
    return o, do, lse, drift


def dual_number(
    q: Tensor, k: Tensor, v: Tensor, tangent: Triple, pattern: Pattern
) -> tuple[Tensor, Tensor]:
    """o and J d in the dtype of q, where no derivative will follow."""
    if fused(q, k, v, pattern, *tangent):
        from lipscope.fused import triton_tangent

        if triton_tangent.unsupported(q, pattern) is None:
            return triton_tangent.value_and_tangent(q, k, v, tangent, pattern, False)[:2]
    o, do, *_ = value_and_tangent(q, k, v, tangent, pattern)
    return o.to(q.dtype), do.to(q.dtype)


def vjp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, g: Tensor, pattern: Pattern
) -> Triple:
    """torch's own backward where it supports dtype and pattern, our kernels otherwise."""
    if not fused(q, k, v, pattern, g):
        onto = tiled.vjp(*_wide3(q, k, v, pattern), lse, _wide(g), pattern)
        return _narrow3(onto, q.dtype, pattern)
    from lipscope.fused import library_vjp, triton_vjp

    if library_vjp.unsupported(q, k, v, pattern) is None:
        return library_vjp.vjp(q, k, v, o, lse, g, pattern)
    return triton_vjp.vjp(q, k, v, o, lse, g, pattern)


def second_vjp(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, tangent: Triple, g: Tensor, pattern: Pattern
) -> Triple:
    """The gradient of <g, J d> in q, k, v."""
    if fused(q, k, v, pattern, *tangent, g):
        from lipscope.fused import triton_second

        if triton_second.unsupported(q, v, pattern) is None:
            o, do, _, drift = value_and_tangent(q, k, v, tangent, pattern)
            zero = torch.zeros_like(g)
            return triton_second.both_vjp(q, k, v, tangent, zero, g, o, do, lse, drift, pattern)[:3]
    wide = _wide3(q, k, v, pattern)
    moved = _wide3(*tangent, pattern)
    onto = tiled.second_vjp(*wide, lse, moved, _wide(g), pattern)
    return _narrow3(onto, q.dtype, pattern)


def second_jvp(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, first: Triple, other: Triple, pattern: Pattern
) -> Tensor:
    """The second derivative of o in the directions `first` and `other`."""
    point, d, e = (_wide3(*x, pattern) for x in ((q, k, v), first, other))
    return tiled.second_jvp(*point, lse, d, e, pattern).to(q.dtype)


def both_vjp(
    q: Tensor, k: Tensor, v: Tensor, tangent: Triple, g: Tensor, gd: Tensor,
    o: Tensor, do: Tensor, lse: Tensor, drift: Tensor, pattern: Pattern,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradient of <g, o> + <gd, J d> in q, k, v, dq, dk, dv."""
    if fused(q, k, v, pattern, *tangent, g, gd):
        from lipscope.fused import triton_second

        if triton_second.unsupported(q, v, pattern) is None:
            return triton_second.both_vjp(q, k, v, tangent, g, gd, o, do, lse, drift, pattern)
    wide = _wide3(q, k, v, pattern)
    moved = _wide3(*tangent, pattern)
    onto = tiled.both_vjp(*wide, lse, moved, _wide(g), _wide(gd), pattern)
    return _narrow3(onto[:3], q.dtype, pattern) + _narrow3(onto[3:], q.dtype, pattern)
