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
from lipscope.fused.arguments import HALF
from lipscope.fused.pattern import Pattern
from lipscope.fused.reference import Triple


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

    return triton_operands.supports(q, k, v, pattern)


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


def forward(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, keep_digits: bool = True
) -> tuple[Tensor, Tensor]:
    """o and the log-sum-exp, +inf for a fully masked row.

    With `keep_digits`, o is float32 for half precision, for derivatives to come.
    """
    if not fused(q, k, v, pattern):
        o, lse = tiled.forward(*_wide3(q, k, v, pattern), pattern)
        return o if keep_digits else o.to(q.dtype), lse
    from lipscope.fused import triton_forward

    return triton_forward.forward(q, k, v, pattern, keep_digits)


def jvp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tangent: Triple, pattern: Pattern
) -> Tensor:
    if not fused(q, k, v, pattern, *tangent):
        wide = _wide3(q, k, v, pattern)
        return tiled.jvp(*wide, lse, _wide3(*tangent, pattern), pattern).to(q.dtype)
    from lipscope.fused import triton_forward

    return triton_forward.jvp(q, k, v, o, lse, tangent, pattern)


def value_and_tangent(
    q: Tensor, k: Tensor, v: Tensor, tangent: Triple, pattern: Pattern, keep_digits: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, J d and the log-sum-exp, as `forward` and `jvp` return them, and each row's mean of dT.

    Without `keep_digits`, the means may be missing.
    """
    if not fused(q, k, v, pattern, *tangent):
        wide = _wide3(q, k, v, pattern)
        o, do, lse, drift = tiled.value_and_tangent(*wide, _wide3(*tangent, pattern), pattern)
        return o if keep_digits else o.to(q.dtype), do.to(q.dtype), lse, drift
    from lipscope.fused import triton_forward

    if triton_forward.supports_one_launch(q, pattern):
        return triton_forward.value_and_tangent(q, k, v, tangent, pattern, keep_digits)
    o, lse = forward(q, k, v, pattern)
    do, drift = triton_forward.jvp_and_drift(q, k, v, o, lse, tangent, pattern)
    return o if keep_digits else o.to(q.dtype), do, lse, drift


def vjp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, g: Tensor, pattern: Pattern
) -> Triple:
    """torch's own backward where it supports dtype and pattern, our kernels otherwise."""
    if not fused(q, k, v, pattern, g):
        onto = tiled.vjp(*_wide3(q, k, v, pattern), lse, _wide(g), pattern)
        return _narrow3(onto, q.dtype, pattern)
    library = torchs_backward(q, k, v, pattern)
    if library is not None:
        return torchs_vjp(library, q, k, v, o, lse, g, pattern)
    from lipscope.fused import triton_backward

    return triton_backward.vjp(q, k, v, o, lse, g, pattern)


def torchs_backward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> str | None:
    """The fastest of torch's own backwards for these: "cudnn", "flash" (slower), or None."""
    p = pattern
    special = (p.window, p.softcap, p.mask, p.queries, p.keys, p.sinks)
    n, size = q.shape[-2:]
    if (
        q.dtype not in HALF
        or any(x is not None for x in special)
        or (p.causal and (p.shift or n != k.shape[-2]))
        or size != v.shape[-1]
        or size > 128
        or size % 8
    ):
        return None
    grouped = q.shape[-3] != k.shape[-3]
    params = torch.backends.cuda.SDPAParams(
        _flat(q), _flat(k), _flat(v), None, 0.0, p.causal, grouped
    )
    if torch.backends.cuda.can_use_cudnn_attention(params):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(params) else None


def torchs_vjp(
    library: str, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, g: Tensor,
    pattern: Pattern,
) -> Triple:  # fmt: skip
    """gq, gk, gv by one of `torchs_backward`, from the saved o and log-sum-exp."""
    flat = [_flat(x) for x in (g, q, k, v, o.to(q.dtype))]
    lse = lse.reshape(-1, *lse.shape[-2:]).contiguous()
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the dropout's random state
    sizes = (q.shape[-2], k.shape[-2], 0.0, pattern.causal)
    state: tuple[object, ...]
    if library == "cudnn":
        backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        state = (lse[..., None], unused, unused, None, None, None, *sizes)
    else:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        state = (lse, None, None, *sizes, unused, unused)
    gq, gk, gv = backward(*flat, *state, scale=pattern.scale)
    return gq.view(q.shape), gk.view(k.shape), gv.view(v.shape)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-3:])


def second_vjp(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, tangent: Triple, g: Tensor, pattern: Pattern
) -> Triple:
    """The gradient of <g, J d> in q, k, v."""
    if fused(q, k, v, pattern, *tangent, g):
        from lipscope.fused import triton_backward

        if triton_backward.supports_both_vjp(q, v, pattern):
            o, do, _, drift = value_and_tangent(q, k, v, tangent, pattern)
            given = (tangent, torch.zeros_like(g), g, o, do, lse, drift, pattern)
            return triton_backward.both_vjp(q, k, v, *given)[:3]
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
        from lipscope.fused import triton_backward

        if triton_backward.supports_both_vjp(q, v, pattern):
            return triton_backward.both_vjp(q, k, v, tangent, g, gd, o, do, lse, drift, pattern)
    wide = _wide3(q, k, v, pattern)
    moved = _wide3(*tangent, pattern)
    onto = tiled.both_vjp(*wide, lse, moved, _wide(g), _wide(gd), pattern)
    return _narrow3(onto[:3], q.dtype, pattern) + _narrow3(onto[3:], q.dtype, pattern)
