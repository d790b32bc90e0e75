"""The arguments of attend: what fits together, and what a misfit is called."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope._types import UserError


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None, padding: Tensor | None, sinks: Tensor | None,
    softcap: float | None, window: int | None,
) -> None:  # fmt: skip
    """Raise a UserError that names what does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise UserError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.ndim < 3 or not x.dtype.is_floating_point:
            raise UserError(
                f"{name} must be a floating-point tensor [..., heads, tokens, size], "
                f"got {x.dtype} of shape {tuple(x.shape)}"
            )
        if x.shape[-2] == 0:
            raise UserError(
                f"{name} is empty (shape {tuple(x.shape)}); a sequence needs at least one token"
            )
    (H, n, size), (G, n_keys) = q.shape[-3:], k.shape[-3:-1]
    if k.shape[-1] != size or v.shape[-3:-1] != k.shape[-3:-1]:
        raise UserError(
            f"q, k, v do not fit: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; "
            "q and k need the same last dimension, k and v the same heads and tokens"
        )
    if H % G:
        raise UserError(
            f"{H} query heads cannot share {G} key heads evenly; "
            "the number of key heads must divide the number of query heads"
        )
    check_options(mask, padding, sinks, softcap, window)
    if mask is not None and (
        mask.ndim < 2 or mask.shape[-1] not in (1, n_keys) or mask.shape[-2] not in (1, n)
    ):
        raise UserError(
            f"mask must broadcast to [..., {H}, {n}, {n_keys}], got {tuple(mask.shape)}"
        )
    if padding is not None and padding.shape[-1] != n_keys:
        raise UserError(
            f"padding must be boolean of shape [..., {n_keys}], True for real tokens, "
            f"got {tuple(padding.shape)}"
        )
    if sinks is not None and sinks.shape != (H,):
        raise UserError(
            f"sinks must be a detached tensor of shape [{H}], one logit per head, "
            f"got {tuple(sinks.shape)}"
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
        if x is not None and not isinstance(x, Tensor):
            raise UserError(f"{name} must be a tensor, got {type(x).__name__}")
    # bool is a kind of int to Python, and window=True a slip for causal=True.
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise UserError(f"window must be an integer, got {type(window).__name__}")
    if softcap is not None and not isinstance(softcap, int | float):
        raise UserError(f"softcap must be a number, got {type(softcap).__name__}")
    if mask is not None and mask.requires_grad:
        raise UserError(
            "mask requires grad, and attend treats it as a constant; pass mask.detach()"
        )
    if mask is not None and mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise UserError(
            f"mask must be boolean (True = may attend) or floating point (added), got {mask.dtype}"
        )
    if padding is not None and padding.dtype != torch.bool:
        raise UserError(f"padding must be boolean, True for real tokens, got {padding.dtype}")
    if sinks is not None and sinks.requires_grad:
        raise UserError(
            "sinks require grad, and attend treats them as constants; pass sinks.detach()"
        )
    if softcap is not None and not softcap > 0:
        raise UserError(f"softcap must be positive, got {softcap!r}")
    if window is not None and window < 1:
        raise UserError(f"window must be at least 1 (a token sees itself), got {window!r}")
