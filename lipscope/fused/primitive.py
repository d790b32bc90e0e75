"""The attention primitive: one function, differentiable twice, by autograd and by torch.func.

`attend` is written as three functions that know each other's derivatives: the value, its jvp J d
and its vjp J' g. With B = <g, J d> the derivatives of the last two are closed forms again:
grad_d B = J' g, grad_g B = J d, and grad_{q,k,v} B. The output and log-sum-exp they share are saved
state, not variables: their own dependence on q, k, v is part of the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from threading import RLock

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual
from torch.nn.functional import scaled_dot_product_attention as torchs_own

from lipscope.fused import backend
from lipscope.fused._torch_internals import (
    TransformFreeFunction,
    outside_transforms,
    read_tangents,
    transforms,
    will_run_backward,
)
from lipscope.fused.arguments import HALF, ArgumentError, check_arguments, check_tensor
from lipscope.fused.errors import UserError
from lipscope.fused.pattern import Pattern


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | Tensor | None = None,
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
    check_tensor("q", q)
    check_tensor("k", k)
    shift = k.shape[-2] - q.shape[-2] if min(q.ndim, k.ndim) > 1 else 0
    rules = Rules(causal=causal, window=window, softcap=softcap, shift=shift)
    return attend_by_rules(q, k, v, mask, padding, sinks, rules, scale)


Product = Callable[[Tensor], Tensor]


class Digits:
    """How the derivatives of one graph are computed: exactly, unless a rough product asks."""

    def __init__(self) -> None:
        self.low_precision = False
        self.used = False  # whether there is attention in the graph
        self._lock = RLock()

    def exact(self, product: Product) -> Product:
        return partial(self._run, product, False)

    def in_low_precision(self, product: Product) -> Product:
        return partial(self._run, product, True)

    def _run(self, product: Product, low_precision: bool, x: Tensor) -> Tensor:
        # Set for the graph, not for the thread: autograd computes on threads of its own.
        with self._lock:
            before = self.low_precision
            self.low_precision = low_precision
            try:
                return product(x)
            finally:
                self.low_precision = before


_current: ContextVar[Digits | None] = ContextVar("digits", default=None)


@contextmanager
def graph_of_any_digits() -> Iterator[Digits]:
    """Derivatives of the attention that is computed inside can be asked for roughly later on."""
    digits = Digits()
    token = _current.set(digits)
    try:
        yield digits
    finally:
        _current.reset(token)


@dataclass(frozen=True)
class Rules:
    """The part of a Pattern without tensors; not a tuple, because vmap would unpack it."""

    causal: bool
    window: int | None
    softcap: float | None
    shift: int
    scale: float = 1.0
    digits: Digits | None = None  # those of its derivatives, where they can be chosen


def attend_by_rules(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    sinks: Tensor | None,
    rules: Rules,
    scale: float | Tensor | None,
) -> Tensor:
    """`attend` with any alignment of queries and keys (`rules.shift`)."""
    check_arguments(q, k, v, mask, padding, sinks, rules.softcap, rules.window)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if isinstance(scale, Tensor):  # differentiable like any other factor of the queries
        q = q * scale
        scale = 1.0
    if torch.compiler.is_compiling():
        return _compiled(q, k, v, mask, padding, sinks, rules, scale)
    if q.dtype in HALF and not (q.is_cuda and backend.has_triton()):
        # Tiles compute in float32: the scale is applied there, before anything is rounded.
        wide = attend_by_rules(
            q.float(), k.float(), v.float(), mask, padding, sinks, rules, float(scale)
        )
        return wide.to(q.dtype)
    if autocast_dtype(q.device) is not None:
        # Derivatives are computed later, outside of autocast, and must be those of this value.
        with torch.autocast(q.device.type, enabled=False):
            return _attend(q, k, v, mask, padding, sinks, rules, scale)
    return _attend(q, k, v, mask, padding, sinks, rules, scale)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to on this device, or None if it is off or does not exist."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _attend(
    q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None, padding: Tensor | None, sinks: Tensor | None, rules: Rules, scale: float,
) -> Tensor:  # fmt: skip
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        leading = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        q, k, v = (x.expand(*leading, *x.shape[-3:]) for x in (q, k, v))
    # Half-precision queries times the scale would be rounded: the kernels scale the scores.
    late = q.dtype in HALF
    if late and scale <= 0:  # the kernels expect a positive one
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    digits = _current.get()
    if digits is not None:
        digits.used = True
    if late or digits is not None:
        rules = replace(rules, scale=scale if late else 1.0, digits=digits)
    duals = read_tangents((q, k, v, mask, sinks))
    if duals is not None and any(tangent is not None for _, tangent in duals[3:]):
        raise ArgumentError("mask or sinks carry a tangent, and attend treats them as constants")
    # A single level of forward mode is read here, so that value and tangent are computed together:
    # autograd would ask for the value first, and torch.func would spend milliseconds on its way to
    # either. Not where autograd records dual numbers outside of torch.func: a backward pass may
    # then want the tangent of a gradient, for which it needs them as they are.
    nested = transforms()
    duals_recorded = duals is not None and _records(*chain(*duals[:3]))
    if duals is None or nested > 1 or (nested == 0 and duals_recorded):
        direct = duals is None and nested == 0 and not _records(q, k, v)
        q = q if late else q * scale
        if direct:  # no derivative can be asked for
            pattern = make_pattern(mask, padding, sinks, rules)
            return backend.forward(q, k, v, pattern, keep_digits=False)[0]
        return _Attend.apply(q, k, v, mask, padding, sinks, rules)[0].to(q.dtype)
    (q, dq), (k, dk), (v, dv), (mask, _), (sinks, _) = duals
    with outside_transforms((q, k, v, dq, dk, dv, mask, padding, sinks)) as inside:
        q, k, v, dq, dk, dv, mask, padding, sinks = inside
        dq, dk, dv = _or_zeros((dq, dk, dv), (q, k, v))
        if not late:
            q = q * scale
            dq = dq * scale
        if _records(q, k, v, dq, dk, dv):
            moved = (q, k, v, dq, dk, dv, mask, padding, sinks, rules)
            o, do = (x.to(q.dtype) for x in _AttendAndTangent.apply(*moved)[:2])
        else:
            pattern = make_pattern(mask, padding, sinks, rules)
            o, do, *_ = backend.value_and_tangent(q, k, v, (dq, dk, dv), pattern, False)
    return make_dual(o, do)


def _compiled(
    q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None, padding: Tensor | None, sinks: Tensor | None, rules: Rules, scale: float,
) -> Tensor:  # fmt: skip
    """Inside torch.compile: torch's attention where it does the same, a graph break elsewhere."""
    # A compiled graph has no second derivatives and no forward mode, for which attend exists.
    special = (mask, padding, sinks, rules.window, rules.softcap)
    if any(x is not None for x in special) or (rules.causal and rules.shift):
        return torch.compiler.disable(_attend)(q, k, v, mask, padding, sinks, rules, scale)
    return torchs_own(
        q, k, v, is_causal=rules.causal, scale=scale, enable_gqa=q.shape[-3] != k.shape[-3]
    )


def _records(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed from these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def make_pattern(
    mask: Tensor | None, padding: Tensor | None, sinks: Tensor | None, rules: Rules
) -> Pattern:
    """The whole pattern; a padded token is not read and, in self-attention, does not read."""
    queries = padding if rules.shift == 0 else None
    keys = padding
    # One row for all queries and heads says which keys are real, and needs no n x n bits.
    row = mask is not None and mask.shape[-3:-1] == (1, 1) and mask.shape[-1] > 1
    if row and mask is not None and mask.dtype == torch.bool:
        real = mask[..., 0, 0, :]
        mask = None
        keys = real if keys is None else real & keys
    return Pattern(
        causal=rules.causal,
        window=rules.window,
        softcap=rules.softcap,
        mask=mask,
        queries=queries,
        keys=keys,
        sinks=sinks,
        shift=rules.shift,
        scale=rules.scale,
    )


def _wanted(ctx, inputs: slice) -> bool:
    """Whether this backward pass continues into any of these inputs."""
    # A product J v needs no second derivatives, yet autograd asks for all of them. The engine says
    # which nodes it will run, except for leaves (nodes with a variable), which count as wanted.
    nodes = [node for node, _ in ctx.next_functions[inputs] if node is not None]
    return any(hasattr(node, "variable") or will_run_backward(node) for node in nodes)


CONSTANTS = "attend treats mask and sinks as constants, and a derivative of one was requested"


def _refuse_gradient(ctx, mask: int) -> None:
    """Raise if autograd, at any level of torch.func, wants the gradient of the mask or sinks."""
    if ctx.needs_input_grad[mask] or ctx.needs_input_grad[mask + 2]:
        raise UserError(CONSTANTS)


def _refuse_tangent(mask: Tensor | None, padding: Tensor | None, sinks: Tensor | None, *_) -> None:
    """Raise if forward mode, at any level of torch.func, moves the mask or the sinks."""
    if mask is not None or sinks is not None:
        raise UserError(CONSTANTS)


def _or_zeros(
    tangents: tuple[Tensor | None, ...], like: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        torch.zeros_like(x) if t is None else t for t, x in zip(tangents, like, strict=True)
    )
    return dq, dk, dv


class _Attend(TransformFreeFunction):
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
        ctx.set_materialize_grads(False)  # a mask without a tangent is not one that moves by zero
        ctx.save_for_backward(*tensors, o, lse)
        ctx.save_for_forward(*tensors, o, lse)

    @staticmethod
    def backward(ctx, g, _):
        _refuse_gradient(ctx, mask=3)
        if g is None:
            return (None,) * 7
        q, k, v, mask, padding, sinks, o, lse = ctx.saved_tensors
        onto = _Vjp.apply(q, k, v, g.to(q.dtype), o, lse, mask, padding, sinks, ctx.rules)
        return *onto, None, None, None, None

    @staticmethod
    def jvp(ctx, dq, dk, dv, *constants):
        _refuse_tangent(*constants)
        q, k, v, mask, padding, sinks, o, lse = ctx.saved_tensors
        dq, dk, dv = _or_zeros((dq, dk, dv), (q, k, v))
        do = _Jvp.apply(q, k, v, dq, dk, dv, o, lse, mask, padding, sinks, ctx.rules)
        return do.to(o.dtype), None


class _AttendAndTangent(TransformFreeFunction):
    """(q, k, v; dq, dk, dv) -> o, do, log-sum-exp, row means of dT: one pass over the scores.

    For plain tensors only: torch.func differentiates the functions below.
    """

    @staticmethod
    def forward(q, k, v, dq, dk, dv, mask, padding, sinks, rules):
        pattern = make_pattern(mask, padding, sinks, rules)
        return backend.value_and_tangent(q, k, v, (dq, dk, dv), pattern)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.rules = inputs
        o, do, lse, drift = output
        ctx.mark_non_differentiable(lse, drift)
        ctx.set_materialize_grads(False)  # often only the value or only the tangent has a gradient
        ctx.save_for_backward(*tensors, o, do, lse, drift)

    @staticmethod
    def backward(ctx, g, gd, *_):
        _refuse_gradient(ctx, mask=6)
        q, k, v, dq, dk, dv, mask, padding, sinks, o, do, lse, drift = ctx.saved_tensors
        state = (lse, mask, padding, sinks, ctx.rules)
        if gd is None:
            onto = (None,) * 3 if g is None else _Vjp.apply(q, k, v, g.to(q.dtype), o, *state)
            return *onto, *(None,) * 7
        gd = gd.to(q.dtype)
        g = torch.zeros_like(gd) if g is None else g.to(q.dtype)
        if not torch.is_grad_enabled():
            six = _BothVjp.apply(q, k, v, dq, dk, dv, g, gd, o, do, drift, *state)
            return *six, None, None, None, None
        # These can be differentiated again where no third derivative is involved.
        of_tangent = _SecondVjp.apply(q, k, v, dq, dk, dv, gd, *state)
        of_value = _Vjp.apply(q, k, v, g, o, *state)
        both = tuple(x + y for x, y in zip(of_tangent, of_value, strict=True))
        return *both, *_Vjp.apply(q, k, v, gd, o, *state), None, None, None, None


def _with_digits(digits: Digits | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a derivative, in bfloat16 instead of float32 in low precision."""
    if digits is None or not digits.low_precision or tensors[0].dtype != torch.float32:
        return tensors
    return tuple(x.to(torch.bfloat16) for x in tensors)


class _First(TransformFreeFunction):
    """A first derivative, which needs its inputs for the second."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.rules = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)


class _Jvp(_First):
    """(q, k, v; dq, dk, dv) -> do."""

    @staticmethod
    def forward(q, k, v, dq, dk, dv, o, lse, mask, padding, sinks, rules):
        pattern = make_pattern(mask, padding, sinks, rules)
        dtype = q.dtype
        q, k, v, dq, dk, dv = _with_digits(rules.digits, q, k, v, dq, dk, dv)
        return backend.jvp(q, k, v, o, lse, (dq, dk, dv), pattern).to(dtype)

    @staticmethod
    def backward(ctx, g):
        _refuse_gradient(ctx, mask=8)
        q, k, v, dq, dk, dv, *state = ctx.saved_tensors
        onto: list[Tensor | None] = [None] * 6
        if g is not None and _wanted(ctx, slice(0, 3)):
            onto[:3] = _SecondVjp.apply(q, k, v, dq, dk, dv, g, *state[1:], ctx.rules)
        if g is not None and _wanted(ctx, slice(3, 6)):
            onto[3:] = _Vjp.apply(q, k, v, g, *state, ctx.rules)
        return *onto, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx, eq, ek, ev, ddq, ddk, ddv, _o, _lse, *constants):
        _refuse_tangent(*constants)
        q, k, v, dq, dk, dv, *state = ctx.saved_tensors
        other = _or_zeros((eq, ek, ev), (q, k, v))
        moved = _or_zeros((ddq, ddk, ddv), (q, k, v))
        bent = _SecondJvp.apply(q, k, v, dq, dk, dv, *other, *state[1:], ctx.rules)
        return bent + _Jvp.apply(q, k, v, *moved, *state, ctx.rules)


class _Vjp(_First):
    """(q, k, v; g) -> gq, gk, gv."""

    @staticmethod
    def forward(q, k, v, g, o, lse, mask, padding, sinks, rules):
        pattern = make_pattern(mask, padding, sinks, rules)
        dtype = q.dtype
        q, k, v, g = _with_digits(rules.digits, q, k, v, g)
        return tuple(x.to(dtype) for x in backend.vjp(q, k, v, o, lse, g, pattern))

    @staticmethod
    def backward(ctx, hq, hk, hv):
        _refuse_gradient(ctx, mask=6)
        q, k, v, g, *state = ctx.saved_tensors
        hq, hk, hv = _or_zeros((hq, hk, hv), (q, k, v))
        onto: list[Tensor | None] = [None] * 4
        if _wanted(ctx, slice(0, 3)):
            onto[:3] = _SecondVjp.apply(q, k, v, hq, hk, hv, g, *state[1:], ctx.rules)
        if _wanted(ctx, slice(3, 4)):
            onto[3] = _Jvp.apply(q, k, v, hq, hk, hv, *state, ctx.rules)
        return *onto, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx, eq, ek, ev, dg, _o, _lse, *constants):
        _refuse_tangent(*constants)
        q, k, v, g, *state = ctx.saved_tensors
        moved = _or_zeros((eq, ek, ev), (q, k, v))
        bent = _SecondVjp.apply(q, k, v, *moved, g, *state[1:], ctx.rules)
        moved = _Vjp.apply(q, k, v, torch.zeros_like(g) if dg is None else dg, *state, ctx.rules)
        return tuple(x + y for x, y in zip(bent, moved, strict=True))


THIRD = (
    "attend can be differentiated twice, and a third derivative was requested; "
    "write the attention out with torch.softmax instead"
)


class _Last(TransformFreeFunction):
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


class _SecondVjp(_Last):
    """(q, k, v; dq, dk, dv; g) -> the gradient of <g, J d> in q, k, v."""

    @staticmethod
    def forward(q, k, v, dq, dk, dv, g, lse, mask, padding, sinks, rules):
        pattern = make_pattern(mask, padding, sinks, rules)
        return backend.second_vjp(q, k, v, lse, (dq, dk, dv), g, pattern)


class _BothVjp(_Last):
    """(q, k, v; dq, dk, dv; g, gd) -> the gradient of <g, o> + <gd, J d> in all six."""

    @staticmethod
    def forward(q, k, v, dq, dk, dv, g, gd, o, do, drift, lse, mask, padding, sinks, rules):
        pattern = make_pattern(mask, padding, sinks, rules)
        return backend.both_vjp(q, k, v, (dq, dk, dv), g, gd, o, do, lse, drift, pattern)


class _SecondJvp(_Last):
    """(q, k, v; dq, dk, dv; eq, ek, ev) -> D^2 o [d, e]."""

    @staticmethod
    def forward(q, k, v, dq, dk, dv, eq, ek, ev, lse, mask, padding, sinks, rules):
        pattern = make_pattern(mask, padding, sinks, rules)
        return backend.second_jvp(q, k, v, lse, (dq, dk, dv), (eq, ek, ev), pattern)
