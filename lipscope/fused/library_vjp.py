"""The cotangent by torch's own attention backward (cuDNN or flash), from the saved o and lse."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.fused.pattern import Pattern

Triple = tuple[Tensor, Tensor, Tensor]


def unsupported(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> str | None:
    """Why torch's backward cannot do this, or None if it can."""
    if q.dtype not in (torch.bfloat16, torch.float16) or {q.dtype, k.dtype, v.dtype} != {q.dtype}:
        kinds = f"{q.dtype}, {k.dtype}, {v.dtype}"
        return f"torch's backward takes bfloat16 or float16; q, k, v are {kinds}"
    more = (
        pattern.window,
        pattern.softcap,
        pattern.mask,
        pattern.queries,
        pattern.keys,
        pattern.sinks,
    )
    if any(x is not None for x in more):
        return "torch's backward supports no window, softcap, mask, padding or sinks"
    if pattern.causal and (pattern.shift or q.shape[-2] != k.shape[-2]):
        lengths = f"{q.shape[-2]} and {k.shape[-2]}"
        return f"causal order in torch's backward needs as many queries as keys, got {lengths}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 128 or q.shape[-1] % 8:
        sizes = f"{q.shape[-1]} and {v.shape[-1]}"
        return f"torch's backward needs equal head sizes, a multiple of 8 up to 128, got {sizes}"
    if not q.is_cuda or backend(q, k, v, pattern.causal) is None:
        return "neither cuDNN nor flash attention supports these tensors on this device"
    return None


def backend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str | None:
    """The fastest backward torch has for these tensors: "cudnn", "flash" (slower) or None."""
    grouped = q.shape[-3] != k.shape[-3]
    params = torch.backends.cuda.SDPAParams(
        _flat(q), _flat(k), _flat(v), None, 0.0, causal, grouped
    )
    if torch.backends.cuda.can_use_cudnn_attention(params):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(params) else None


def vjp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, g: Tensor, pattern: Pattern
) -> Triple:
    """gq, gk, gv from g [..., H, n, m]."""
    flat = [_flat(x) for x in (g, q, k, v, o.to(q.dtype))]
    lse = lse.reshape(-1, *lse.shape[-2:]).contiguous()
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the dropout's random state
    n = q.shape[-2]
    n_keys = k.shape[-2]
    causal = pattern.causal
    if backend(q, k, v, causal) == "cudnn":
        out = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *flat,
            lse[..., None],
            unused,
            unused,
            None,
            None,
            None,
            n,
            n_keys,
            0.0,
            causal,
            scale=pattern.scale,
        )
    else:
        out = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *flat, lse, None, None, n, n_keys, 0.0, causal, unused, unused, scale=pattern.scale
        )
    gq, gk, gv = out
    return gq.view(q.shape), gk.view(k.shape), gv.view(v.shape)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-3:])
