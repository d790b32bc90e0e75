"""Jacobians in 60 digits, from the stored numbers taken as exact: the truth for certificates.

Nothing here knows a formula for the derivative of attention. A `Jet` carries numbers and their
derivatives along every input coordinate; attention is written from its definition, and the chain
rule does the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import numpy as np
import torch
from torch import Tensor

import lipscope as ls
from lipscope.mean_field.measures import DiscreteMeasure

DIGITS = 60
mp = mpmath.mp.clone()
mp.dps = DIGITS

Exact = np.ndarray
"""An array of mpmath numbers."""

_number, _exp, _log, _sqrt, _tanh, _cos, _sin = (
    np.frompyfunc(f, 1, 1) for f in (mp.mpf, mp.exp, mp.log, mp.sqrt, mp.tanh, mp.cos, mp.sin)
)


def exact(x: Tensor | Exact | float) -> Exact:
    """The same numbers in mpmath, without rounding."""
    return _number(x.detach().double().numpy() if isinstance(x, Tensor) else np.asarray(x))


class Jet:
    """Numbers x [...] and their derivatives dx [N, ...] along N directions."""

    def __init__(self, x: Exact, dx: Exact):
        self.x, self.dx = x, dx

    @staticmethod
    def variable(X: Tensor | Exact) -> Jet:
        """X with its derivatives along every coordinate."""
        x = exact(X)
        return Jet(x, exact(np.eye(x.size)).reshape(x.size, *x.shape))

    def __add__(self, other: Jet | Exact) -> Jet:
        if not isinstance(other, Jet):
            return Jet(self.x + other, self.dx)
        return Jet(self.x + other.x, self.dx + other.dx)

    def __mul__(self, other: Jet | Exact) -> Jet:
        if not isinstance(other, Jet):
            return Jet(self.x * other, self.dx * other)
        return Jet(self.x * other.x, self.dx * other.x + self.x * other.dx)

    def __matmul__(self, other: Jet | Exact) -> Jet:
        if not isinstance(other, Jet):
            return Jet(self.x @ other, self.dx @ other)
        return Jet(self.x @ other.x, self.dx @ other.x + self.x @ other.dx)

    def __sub__(self, other: Jet | Exact) -> Jet:
        return self + other * _number(-1)

    def __truediv__(self, other: Jet) -> Jet:
        y = self.x / other.x
        return Jet(y, (self.dx - y * other.dx) / other.x)

    def __getitem__(self, index) -> Jet:
        index = index if isinstance(index, tuple) else (index,)
        return Jet(self.x[index], self.dx[(slice(None), *index)])

    @property
    def T(self) -> Jet:
        return Jet(self.x.T, self.dx.swapaxes(-1, -2))

    def sum(self) -> Jet:
        """The sum over the last axis, which is kept."""
        return Jet(self.x.sum(-1, keepdims=True), self.dx.sum(-1, keepdims=True))

    def exp(self) -> Jet:
        y = _exp(self.x)
        return Jet(y, y * self.dx)

    def tanh(self) -> Jet:
        y = _tanh(self.x)
        return Jet(y, (1 - y * y) * self.dx)

    def cos(self) -> Jet:
        return Jet(_cos(self.x), -_sin(self.x) * self.dx)

    def sqrt(self) -> Jet:
        y = _sqrt(self.x)
        return Jet(y, self.dx / (2 * y))

    def jacobian(self) -> Exact:
        """[outputs, N]."""
        return self.dx.reshape(len(self.dx), -1).T


def joined(parts: list[Jet]) -> Jet:
    """Concatenation along the last axis."""
    return Jet(np.concatenate([p.x for p in parts], -1), np.concatenate([p.dx for p in parts], -1))


def layer_norm(X: Jet, eps: float) -> Jet:
    """Tokens minus their mean, divided by the root of their variance plus eps."""
    share = exact(1.0) / X.x.shape[-1]
    Y = X - X.sum() * share
    return Y / ((Y * Y).sum() * share + exact(eps)).sqrt()


def softmax(S: Jet, extra: Exact | None = None, sink: Exact | None = None) -> Jet:
    """Softmax over the last axis of S + extra, extra finite or -inf; 0 in a row of -inf."""
    extra = exact(np.zeros(S.x.shape)) if extra is None else extra
    # A common shift of a row changes nothing; removing it keeps the digits of the scores.
    shift = _or_zero(extra.max(-1, keepdims=True))
    extra = extra - shift
    top = (S.x + extra).max(-1, keepdims=True)
    top = _or_zero(top if sink is None else np.maximum(top, sink - shift))
    E = (S + (extra - top)).exp()
    total = E.sum() + (_number(0) if sink is None else _exp(sink - shift - top))
    return E / (total + np.where(total.x == 0, _number(1), _number(0)))


def _or_zero(x: Exact) -> Exact:
    return np.where(x == -mp.inf, _number(0), x)


def attention(
    f: ls.SelfAttention,
    X: Jet,
    head: int | None = None,
    extra: Exact | None = None,
) -> Jet:
    """f at X [n, d], or one head before the output projection; `extra` is added to the scores."""
    n, kernel = X.x.shape[0], f.kernel
    extra = _visible(f, n) + (0 if extra is None else extra)
    outputs = []
    for h in range(f.heads) if head is None else [head]:
        g = h * f.groups // f.heads
        bq, bk, bv = f.biases or (None, None, None)
        q, k, v = (
            _project(X, W, b, i, count)
            for W, b, i, count in (
                (f.Q, bq, h, f.heads),
                (f.K, bk, g, f.groups),
                (f.V, bv, g, f.groups),
            )
        )
        scale = 1 / mp.sqrt(q.x.shape[1]) if kernel.scale is None else mp.mpf(kernel.scale)
        if getattr(kernel, "rope", None) is not None:
            q, k = _turn(q, kernel.rope), _turn(k, kernel.rope)
        S = q @ k.T
        if isinstance(kernel, ls.L2):
            S = S * _number(2) - (q * q).sum() - (k * k).sum().T
        S = S * scale
        if kernel.softcap is not None:
            S = (S * (1 / mp.mpf(kernel.softcap))).tanh() * mp.mpf(kernel.softcap)
        sink = None if kernel.sinks is None else exact(kernel.sinks[h])
        outputs.append(softmax(S, extra, sink) @ v)
    y = joined(outputs)
    return y if f.O is None or head is not None else y @ exact(f.O).T


def _project(X: Jet, W: Tensor, b: Tensor | None, i: int, count: int) -> Jet:
    """Part i of count equal parts of X W' + b."""
    y = X @ exact(W.chunk(count)[i]).T
    return y if b is None else y + exact(b.chunk(count)[i])


def _turn(x: Jet, rope: ls.Rope) -> Jet:
    n, half = x.x.shape[0], x.x.shape[1] // 2
    swapped = joined([x[:, half:] * _number(-1), x[:, :half]])
    return x * exact(rope.cos[:n]) + swapped * exact(rope.sin[:n])


def _visible(f: ls.SelfAttention, n: int) -> Exact:
    """The additive mask, with -inf where j is hidden from i."""
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    seen = np.ones((n, n), dtype=bool)
    seen &= (j <= i) | (not f.causal)
    seen &= (j > i - f.window) if f.window is not None else True
    if f.padding is not None:
        real = f.padding.numpy()
        seen &= real[:, None] & real[None]
    additive = np.zeros((n, n))
    if f.mask is not None and f.mask.dtype == torch.bool:
        seen &= f.mask.numpy()
    elif f.mask is not None:
        additive = f.mask.double().numpy()
    return exact(np.where(seen, additive, -np.inf))


def layer_jacobian(f: ls.SelfAttention, X: Tensor, head: int | None = None) -> Exact:
    """D_X f, or the Jacobian of a single head."""
    return attention(f, Jet.variable(X), head).jacobian()


def measure_jacobian(f: ls.SelfAttention, mu: DiscreteMeasure) -> Exact:
    """W^{1/2} J W^{-1/2}, J the Jacobian of attention with weights w_j e^{S_ij}."""
    n, w = len(mu), exact(mu.weights)
    s = np.zeros(n) if mu.positions is None else mu.positions.numpy()
    extra = _log(w) + exact(np.where(s[None] <= s[:, None], 0.0, -np.inf))
    J = attention(f, Jet.variable(mu.points), extra=extra).jacobian()
    roots = _sqrt(w)
    return roots.repeat(len(J) // n)[:, None] * J / roots.repeat(J.shape[1] // n)


def map_jacobian(function: Callable[[Jet], Jet], X: Tensor) -> Exact:
    """The Jacobian of any map written for jets."""
    return function(Jet.variable(X)).jacobian()


def differences(function: Callable[[Jet], Jet], X: Tensor) -> Exact:
    """The Jacobian by central differences, accurate to half of the digits."""
    step, x, columns = mp.mpf(10) ** (-DIGITS // 3), exact(X), []
    for index in np.ndindex(*x.shape):
        sides = []
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            sides.append(function(Jet(moved, np.empty((0, *x.shape), dtype=object))).x)
        columns.append((sides[0] - sides[1]).reshape(-1) / (2 * step))
    return np.stack(columns, -1)


def row_sum(J: Exact) -> mpmath.mpf:
    """The largest absolute row sum, the infinity-norm."""
    return abs(J).sum(1).max()


def sigma(J: Exact) -> mpmath.mpf:
    """The largest singular value."""
    return singular_values(J)[0]


def singular_values(J: Exact) -> list[mpmath.mpf]:
    """All singular values, in decreasing order."""
    J = J if J.shape[0] >= J.shape[1] else J.T
    size = max(map(abs, J.reshape(-1)))
    if size == 0:
        return [mp.mpf(0)] * J.shape[1]
    values = mp.svd_r(mp.matrix((J / size).tolist()), compute_uv=False)
    return sorted((size * x for x in values), reverse=True)
