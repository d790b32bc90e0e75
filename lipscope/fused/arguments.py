"""Validate the arguments of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lipscope.fused._torch_internals import (
    causal_bias_class,
    is_placeholder,
    overrides_functions,
    sees_operations,
)
from lipscope.fused.errors import UserError

HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32, torch.float64)

PLAIN = (Tensor, nn.Parameter)
"""Classes whose operations are torch's."""


class ArgumentError(UserError, RuntimeError):
    """A UserError that code written for torch's attention, which raises RuntimeError, catches."""


class ArgumentTypeError(UserError, TypeError):
    """The same for an argument of the wrong type, where torch raises TypeError."""


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None, padding: Tensor | None, sinks: Tensor | None,
    softcap: float | None, window: int | None,
) -> None:  # fmt: skip
    """Raise a UserError that names what does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.ndim < 3 or x.dtype not in DTYPES:
            raise ArgumentError(
                f"{name} must be a floating-point tensor [..., heads, tokens, size], "
                f"got {x.dtype} of shape {tuple(x.shape)}"
            )
        if 0 in (x.shape[-3:-1] if name == "v" else x.shape[-3:]):
            raise ArgumentError(
                f"{name} is empty (shape {tuple(x.shape)}); attention needs at least one head, "
                "one token, and one coordinate of q and k"
            )
    check_alike(q, k, v)
    (H, n, size), (G, n_keys) = q.shape[-3:], k.shape[-3:-1]
    if k.shape[-1] != size or v.shape[-3:-1] != k.shape[-3:-1]:
        raise ArgumentError(
            f"q, k, v do not fit: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; "
            "q and k need the same last dimension, k and v the same heads and tokens"
        )
    if H % G:
        raise ArgumentError(
            f"{H} query heads cannot share {G} key heads evenly; "
            "the number of key heads must divide the number of query heads"
        )
    check_options(mask, padding, sinks, softcap, window)
    leading = q.shape[:-3]
    if not leading == k.shape[:-3] == v.shape[:-3]:
        try:
            leading = torch.broadcast_shapes(leading, k.shape[:-3], v.shape[:-3])
        except RuntimeError as error:
            raise ArgumentError(
                f"the leading dimensions of q, k, v do not broadcast: {tuple(q.shape)}, "
                f"{tuple(k.shape)}, {tuple(v.shape)}"
            ) from error
    if mask is not None and not (mask.ndim > 1 and _expands(mask, (*leading, H, n, n_keys))):
        raise ArgumentError(
            f"mask must broadcast to {[*leading, H, n, n_keys]}, got {tuple(mask.shape)}"
        )
    if padding is not None and padding.shape[-1] != n_keys:
        raise ArgumentError(
            f"padding must be boolean of shape [..., {n_keys}], True for real tokens, "
            f"got {tuple(padding.shape)}"
        )
    if sinks is not None and sinks.shape != (H,):
        raise ArgumentError(
            f"sinks must be a detached tensor of shape [{H}], one logit per head, "
            f"got {tuple(sinks.shape)}"
        )
    for name, part in (("mask", mask), ("padding", padding), ("sinks", sinks)):
        if part is not None and part.device != q.device:
            raise ArgumentError(f"{name} is on {part.device} and q on {q.device}; move one of them")


def _expands(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether x broadcasts to this shape without enlarging it."""
    sizes = zip(reversed(x.shape), reversed(shape), strict=False)
    return x.ndim <= len(shape) and all(size in (1, full) for size, full in sizes)


def check_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Queries, keys and values have one dtype and one device."""
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentError(f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ArgumentError(
            f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}"
        )


def check_options(
    mask: Tensor | None,
    padding: Tensor | None,
    sinks: Tensor | None,
    softcap: float | None,
    window: int | None,
) -> None:
    """Check what can be checked of the options before the tokens are known."""
    for name, x in (("mask", mask), ("padding", padding), ("sinks", sinks)):
        if x is not None:
            check_tensor(name, x)
    # bool is a kind of int to Python, and window=True a slip for causal=True.
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise ArgumentTypeError(f"window must be an integer, got {type(window).__name__}")
    if softcap is not None and not isinstance(softcap, int | float):
        raise ArgumentTypeError(f"softcap must be a number, got {type(softcap).__name__}")
    if mask is not None and mask.requires_grad:
        raise ArgumentError(
            "mask requires grad, and attend treats it as a constant; pass mask.detach()"
        )
    if mask is not None and mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ArgumentError(
            f"mask must be boolean (True = may attend) or floating point (added), got {mask.dtype}"
        )
    if padding is not None and padding.dtype != torch.bool:
        raise ArgumentError(f"padding must be boolean, True for real tokens, got {padding.dtype}")
    if sinks is not None and sinks.requires_grad:
        raise ArgumentError(
            "sinks require grad, and attend treats them as constants; pass sinks.detach()"
        )
    if softcap is not None and not softcap > 0:
        raise ArgumentError(f"softcap must be positive, got {softcap!r}")
    if window is not None and window < 1:
        raise ArgumentError(f"window must be at least 1 (a token sees itself), got {window!r}")


def check_tensor(name: str, x: Any) -> None:
    """Refuse everything but strided tensors whose operations are torch's."""
    if type(x) in PLAIN and x.layout is torch.strided and not x.is_nested:
        return
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if is_causal_bias(x):
        raise ArgumentError(
            f"{name} is a CausalBias, which holds no numbers; pass causal=True to attend, or the "
            "bias to scaled_dot_product_attention"
        )
    if overrides_functions(x) or (sees_operations(x) and not is_placeholder(x)):
        raise ArgumentError(
            f"{name} is a {type(x).__name__}, a tensor class with operations of its own, which "
            "attend cannot differentiate; pass a plain torch.Tensor"
        )
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else x.layout
        raise ArgumentError(f"{name} is a {kind} tensor; pass a dense one")


def is_causal_bias(x: Any) -> bool:
    """Whether x is a CausalBias of torch: a mask given by its rule, in a tensor without content."""
    bias = causal_bias_class()
    return bias is not None and isinstance(x, bias)
