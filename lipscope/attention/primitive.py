"""The attention primitive: one function, differentiable twice, by autograd and by torch.func.

`attend` is written as three functions that know each other's derivatives: the value, its jvp J d
and its vjp J' g. With B = <g, J d> the derivatives of the last two are closed forms again:
grad_d B = J' g, grad_g B = J d, and grad_{q,k,v} B. The output and log-sum-exp they share are saved
state, not variables: their own dependence on q, k, v is part of the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._torch_internals import will_run_backward
from lipscope._types import UserError
from lipscope.attention import backend
from lipscope.attention.pattern import Pattern


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention `softmax(S) v`, differentiable twice in closed form.

    Like `torch.nn.functional.scaled_dot_product_attention`, with exact first and second
    derivatives in both modes and O(n d) memory. A fully masked row is zero, in value and in every
    derivative.

    Args:
        q: Queries, shape `[..., H, n, k]`.
        k: Keys, shape `[..., G, n', k]`; `G` divides `H` (grouped-query attention).
        v: Values, shape `[..., G, n', m]`.
        scale: Factor of the scores `<q_i, k_j>`; `1/sqrt(k)` by default.
        causal: Whether query `i` sees key `j` only if `j <= i + n' - n`.
        window: If given, query `i` sees key `j` only if `j > i + n' - n - window`.
        mask: Broadcastable to `[..., H, n, n']`. Boolean, `True` where a query may attend, or
            floating point, added to the scores. A large constant shared by all visible keys of a
            query does not cost the scores any digits.
        padding: Boolean, shape `[..., n']`, `True` for real tokens. A padded key is invisible;
            if `n = n'`, a padded query is fully masked.
        softcap: If given, a score `t` becomes `softcap * tanh(t / softcap)` before masking.
        sinks: If given, one logit per head, shape `[H]`, added to the denominator of the softmax.

    Returns:
        The output, shape `[..., H, n, m]`, in the dtype of `q`.

    Raises:
        UserError: If shapes or options do not fit, or if a third derivative is requested.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> q, k = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
        >>> v = torch.tensor([[[1.0], [3.0]]])
        >>> ls.attend(q, k, v).flatten().tolist()  # equal scores: the mean of the values
        [2.0, 2.0]
        >>> ls.attend(q, k, v, causal=True).flatten().tolist()
        [1.0, 2.0]
    """
    _check(q, k, v, mask, padding, sinks, softcap, window)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    leading = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (x.expand(*leading, *x.shape[-3:]) for x in (q * scale, k, v))
    shift = k.shape[-2] - q.shape[-2]
    rules = _Rules(causal=causal, window=window, softcap=softcap, shift=shift)
    out, _ = _Attend.apply(q, k, v, mask, padding, sinks, rules)
    return out.to(q.dtype)


@dataclass(frozen=True)
class _Rules:
    """The part of a Pattern without tensors; not a tuple, because vmap would unpack it."""

    causal: bool
    window: int | None
    softcap: float | None
    shift: int


def make_pattern(
    mask: Tensor | None, padding: Tensor | None, sinks: Tensor | None, rules: _Rules
) -> Pattern:
    """The whole pattern; a padded token is not read and, in self-attention, does not read."""
    queries = padding if rules.shift == 0 else None
    return Pattern(
        causal=rules.causal,
        window=rules.window,
        softcap=rules.softcap,
        mask=mask,
        queries=queries,
        keys=padding,
        sinks=sinks,
        shift=rules.shift,
    )


def _wanted(ctx, inputs: slice) -> bool:
    """Whether this backward pass continues into any of these inputs."""
    # A product J v needs no second derivatives, yet autograd asks for all of them. The engine says
    # which nodes it will run, except for leaves (nodes with a variable), which count as wanted.
    nodes = [node for node, _ in ctx.next_functions[inputs] if node is not None]
    return any(hasattr(node, "variable") or will_run_backward(node) for node in nodes)


def _or_zeros(
    tangents: tuple[Tensor | None, ...], like: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        torch.zeros_like(x) if t is None else t for t, x in zip(tangents, like, strict=True)
    )
    return dq, dk, dv


class _Attend(torch.autograd.Function):
    """(q, k, v) -> o, log-sum-exp."""

    # o may have more digits than q (float32 out of the half-precision kernels); derivatives are
    # computed from all of them, so the cast to the dtype of q happens outside.
    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, mask, padding, sinks, rules):
        return backend.forward(q, k, v, make_pattern(mask, padding, sinks, rules))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.rules = inputs
        o, lse = output
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(*tensors, o, lse)
        ctx.save_for_forward(*tensors, o, lse)

    @staticmethod
    def backward(ctx, g, _):
        q, k, v, mask, padding, sinks, o, lse = ctx.saved_tensors
        return (
            *_Vjp.apply(q, k, v, g.to(q.dtype), o, lse, mask, padding, sinks, ctx.rules),
            None,
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx, dq, dk, dv, *_):
        q, k, v, mask, padding, sinks, o, lse = ctx.saved_tensors
        dq, dk, dv = _or_zeros((dq, dk, dv), (q, k, v))
        do = _Jvp.apply(q, k, v, dq, dk, dv, o, lse, mask, padding, sinks, ctx.rules)
        return do.to(o.dtype), None


class _Jvp(torch.autograd.Function):
    """(q, k, v; dq, dk, dv) -> do."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, dq, dk, dv, o, lse, mask, padding, sinks, rules):
        return backend.jvp(q, k, v, o, lse, (dq, dk, dv), make_pattern(mask, padding, sinks, rules))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.rules = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, g):
        q, k, v, dq, dk, dv, *state = ctx.saved_tensors
        onto: list[Tensor | None] = [None] * 6
        if _wanted(ctx, slice(0, 3)):
            onto[:3] = _SecondVjp.apply(q, k, v, dq, dk, dv, g, *state[1:], ctx.rules)
        if _wanted(ctx, slice(3, 6)):
            onto[3:] = _Vjp.apply(q, k, v, g, *state, ctx.rules)
        return *onto, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx, eq, ek, ev, ddq, ddk, ddv, *_):
        q, k, v, dq, dk, dv, *state = ctx.saved_tensors
        other, moved = _or_zeros((eq, ek, ev), (q, k, v)), _or_zeros((ddq, ddk, ddv), (q, k, v))
        bent = _SecondJvp.apply(q, k, v, dq, dk, dv, *other, *state[1:], ctx.rules)
        return bent + _Jvp.apply(q, k, v, *moved, *state, ctx.rules)


class _Vjp(torch.autograd.Function):
    """(q, k, v; g) -> gq, gk, gv."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, g, o, lse, mask, padding, sinks, rules):
        return backend.vjp(q, k, v, o, lse, g, make_pattern(mask, padding, sinks, rules))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.rules = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, hq, hk, hv):
        q, k, v, g, *state = ctx.saved_tensors
        onto: list[Tensor | None] = [None] * 4
        if _wanted(ctx, slice(0, 3)):
            onto[:3] = _SecondVjp.apply(q, k, v, hq, hk, hv, g, *state[1:], ctx.rules)
        if _wanted(ctx, slice(3, 4)):
            onto[3] = _Jvp.apply(q, k, v, hq, hk, hv, *state, ctx.rules)
        return *onto, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx, eq, ek, ev, dg, *_):
        q, k, v, g, *state = ctx.saved_tensors
        bent = _SecondVjp.apply(
            q, k, v, *_or_zeros((eq, ek, ev), (q, k, v)), g, *state[1:], ctx.rules
        )
        moved = _Vjp.apply(q, k, v, torch.zeros_like(g) if dg is None else dg, *state, ctx.rules)
        return tuple(x + y for x, y in zip(bent, moved, strict=True))


class _Last(torch.autograd.Function):
    """The end of the chain: a third derivative is an error, never a silent zero."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise UserError(THIRD)

    @staticmethod
    def jvp(ctx, *_):
        raise UserError(THIRD)


THIRD = (
    "attend can be differentiated twice, and a third derivative was requested; "
    "write the attention out with torch.softmax instead"
)


class _SecondVjp(_Last):
    """(q, k, v; dq, dk, dv; g) -> the gradient of <g, J d> in q, k, v."""

    @staticmethod
    def forward(q, k, v, dq, dk, dv, g, lse, mask, padding, sinks, rules):
        return backend.second_vjp(
            q, k, v, lse, (dq, dk, dv), g, make_pattern(mask, padding, sinks, rules)
        )


class _SecondJvp(_Last):
    """(q, k, v; dq, dk, dv; eq, ek, ev) -> D^2 o [d, e]."""

    @staticmethod
    def forward(q, k, v, dq, dk, dv, eq, ek, ev, lse, mask, padding, sinks, rules):
        pattern = make_pattern(mask, padding, sinks, rules)
        return backend.second_jvp(q, k, v, lse, (dq, dk, dv), (eq, ek, ev), pattern)


def _check(q, k, v, mask, padding, sinks, softcap, window) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
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
