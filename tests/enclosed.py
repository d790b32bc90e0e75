"""Jacobians of attention in extended precision, every entry with a bound on its error.

Numbers are long doubles (64-bit mantissas and exponents up to 1e4932 on x86) with a radius that
grows with every rounding: the truth lies inside, whatever cancels or saturates. A hundred times
faster than the 60 digits of `tests/truth.py`, against which this file is tested. Where a long
double is a double, the radii are wider and still right.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import lipscope as ls

LONG = np.longdouble
UNIT = np.finfo(LONG).eps
"""Twice the rounding of one operation, so that products of roundings are covered."""
FUNCTION = 8 * UNIT
"""The rounding of exp, allowing for a library that is a few units off."""
TINY = LONG(2) ** -16000 if np.finfo(LONG).minexp < -16000 else np.finfo(LONG).tiny
"""More than what is lost where a result underflows."""


class Ball:
    """Numbers within `r` of `m`, both arrays of long doubles."""

    __array_ufunc__ = None  # numpy arrays on the left leave the operation to this class

    def __init__(self, m: np.ndarray, r: np.ndarray | float = 0.0):
        self.m, self.r = m, np.broadcast_to(np.asarray(r, dtype=LONG), m.shape)

    @property
    def size(self) -> np.ndarray:
        """The largest absolute value inside."""
        return np.abs(self.m) + self.r

    def __add__(self, other: Ball) -> Ball:
        m = self.m + other.m
        return Ball(m, self.r + other.r + UNIT * np.abs(m))

    def __sub__(self, other: Ball) -> Ball:
        return self + Ball(-other.m, other.r)

    def __mul__(self, other: Ball) -> Ball:
        m = self.m * other.m
        return Ball(m, np.abs(self.m) * other.r + self.r * other.size + UNIT * np.abs(m) + TINY)

    def __matmul__(self, other: Ball) -> Ball:
        rounding = (self.m.shape[-1] + 1) * UNIT
        spread = np.abs(self.m) @ (other.r + rounding * np.abs(other.m)) + self.r @ other.size
        return Ball(self.m @ other.m, spread * (1 + rounding) + TINY)

    def __truediv__(self, other: Ball) -> Ball:
        m = self.m / other.m
        least = np.abs(other.m) - other.r
        spread = (self.r + np.abs(m) * other.r) / np.where(least > 0, least, 1)
        spread = np.where(least > 0, spread, np.inf)
        return Ball(m, spread * (1 + 4 * UNIT) + UNIT * np.abs(m) + TINY)

    def __getitem__(self, index) -> Ball:
        return Ball(self.m[index], self.r[index])

    @property
    def T(self) -> Ball:
        """Transposed in the last two axes."""
        return Ball(self.m.swapaxes(-1, -2), self.r.swapaxes(-1, -2))

    def sum(self, axis: int = -1) -> Ball:
        """The sum over an axis, which is kept."""
        rounding = self.m.shape[axis] * UNIT
        m = self.m.sum(axis, keepdims=True)
        spread = (self.r + rounding * np.abs(self.m)).sum(axis, keepdims=True)
        return Ball(m, spread * (1 + rounding))

    def exp(self) -> Ball:
        m = np.exp(self.m)
        near = m * (np.expm1(self.r) * (1 + FUNCTION) + FUNCTION)
        spread = np.where(self.r < 1, near, np.exp(self.m + self.r) * (1 + FUNCTION))
        return Ball(m, spread + TINY)


def where(condition: np.ndarray, x: Ball, y: Ball) -> Ball:
    """x where the condition holds, y elsewhere."""
    return Ball(np.where(condition, x.m, y.m), np.where(condition, x.r, y.r))


def exact(x: Tensor | float) -> Ball:
    """Stored numbers, without an error."""
    return Ball(np.asarray(x.detach().double().numpy() if isinstance(x, Tensor) else x, dtype=LONG))


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def layer_jacobian(f: ls.SelfAttention, X: Tensor) -> Ball:
    """D_X f as a matrix [n d', n d], from the stored numbers of f and X [n, d].

    With g the derivative of the score of i and j by x_i and h that by x_j, for one head

        J_it = delta_it sum_j P_ij (v_j - o_i) g_ij' + P_it ((v_t - o_i) h_it' + V).
    """
    n, d = X.shape
    heads = [_head(f, X, h) for h in range(f.heads)]  # each [n, m, n d]
    J = Ball(*(np.concatenate([getattr(x, part) for x in heads], 1) for part in ("m", "r")))
    J = J if f.O is None else exact(f.O) @ J
    return Ball(J.m.reshape(-1, n * d), J.r.reshape(-1, n * d))


def _head(f: ls.SelfAttention, X: Tensor, h: int) -> Ball:
    """The Jacobian of one head before the output projection."""
    (n, d), g = X.shape, h * f.groups // f.heads
    bq, bk, bv = (b if b is None else b.chunk(c) for b, c in zip(
        f.biases or (None, None, None), (f.heads, f.groups, f.groups), strict=True))  # fmt: skip
    rope = f.kernel.rope if isinstance(f.kernel, ls.Dot) else None
    q, Dq = _projected(X, f.Q.chunk(f.heads)[h], bq and bq[h], rope)
    k, Dk = _projected(X, f.K.chunk(f.groups)[g], bk and bk[g], rope)
    v, Dv = _projected(X, f.V.chunk(f.groups)[g], bv and bv[g], None)
    S, by_query, by_key = _scores(f.kernel, q, Dq, k, Dk)
    P = _softmax(S, f, h)
    # Towards the mean that each row sees: [i, m, j].
    pull = P[:, None, :] * (v.T[None] - (P @ v)[:, :, None])
    own = pull @ by_query  # [i, m, c]
    others = pull[..., None] * by_key[:, None]  # [i, m, t, c]
    J = others + P[:, None, :, None] * Dv[0][None, :, None, :]
    itself = np.eye(n, dtype=bool)[:, None, :, None]
    J = where(itself, J + own[:, :, None, :], J)
    return Ball(J.m.reshape(n, -1, n * d), J.r.reshape(n, -1, n * d))


def _projected(X: Tensor, W: Tensor, b: Tensor | None, rope: ls.Rope | None) -> tuple[Ball, Ball]:
    """X W' + b [n, k], rotated, and its derivative by the own token [n, k, d]."""
    y = exact(X) @ exact(W).T
    y = y if b is None else y + exact(b)
    D = Ball(np.broadcast_to(exact(W).m, (len(X), *W.shape)))
    return (y, D) if rope is None else (_turned(y[..., None], rope)[..., 0], _turned(D, rope))


def _turned(y: Ball, rope: ls.Rope) -> Ball:
    """y [n, k, d] rotated in the planes of coordinates j and j + k/2."""
    (n, size), half = y.m.shape[:2], y.m.shape[1] // 2
    sign = np.where(np.arange(size) < half, -1, 1)[:, None]
    swapped = y[:, np.roll(np.arange(size), half)]
    cos, sin = (exact(table[:n])[..., None] for table in (rope.cos, rope.sin))
    return y * cos + Ball(sign * swapped.m, swapped.r) * sin


def _scores(kernel, q: Ball, Dq: Ball, k: Ball, Dk: Ball) -> tuple[Ball, Ball, Ball]:
    """Scores [i, j], and their derivatives by x_i and by x_j, both [i, j, d]."""
    root = 1 / np.sqrt(LONG(q.m.shape[1]))
    scale = Ball(root, 4 * UNIT * root) if kernel.scale is None else exact(kernel.scale)
    if isinstance(kernel, ls.L2):
        apart = q[:, None] - k[None]
        S = (apart * apart).sum()[..., 0] * scale
        S, slope = Ball(-S.m, S.r), scale * exact(-2.0)
        by_query, by_key = apart @ Dq, _swap(_swap(apart) @ Ball(-Dk.m))
    else:
        S, slope = q @ k.T * scale, scale
        by_query, by_key = k[None] @ Dq, _swap(q[None] @ Dk)
    if kernel.softcap is not None:
        # With t = exp(-2 |S / c|): tanh is (1 - t) / (1 + t), its derivative 4 t / (1 + t)^2.
        x = S / exact(kernel.softcap)
        t, one = Ball(-2 * np.abs(x.m), 2 * x.r).exp(), exact(1.0)
        tanh = (one - t) / (one + t)
        S = Ball(np.sign(x.m) * tanh.m, tanh.r + np.where(np.abs(x.m) < x.r, 2 * x.r, 0))
        S = S * exact(kernel.softcap)
        slope = slope * (exact(4.0) * t / ((one + t) * (one + t)))[..., None]
    return S, by_query * slope, by_key * slope


def _swap(y: Ball) -> Ball:
    """[j, i, ...] from [i, j, ...]."""
    return Ball(y.m.swapaxes(0, 1), y.r.swapaxes(0, 1))


def _softmax(S: Ball, f: ls.SelfAttention, h: int) -> Ball:
    """P [n, n] of one head; rows that see nothing are 0."""
    seen, zero = _seen(f, len(S.m)), exact(0.0)
    if f.mask is not None and f.mask.dtype != torch.bool:
        # A common shift of a row changes nothing; without it the digits of the scores are kept.
        extra = exact(f.mask)
        shift = np.where(seen, extra.m, -np.inf).max(-1, keepdims=True)
        shift = Ball(np.where(np.isinf(shift), 0, shift))
        S = S + (where(seen, extra, shift) - shift)
    else:
        shift = Ball(np.zeros((len(S.m), 1), dtype=LONG))
    top = np.where(seen, S.m, -np.inf).max(-1, keepdims=True)
    top, sink = Ball(np.where(np.isinf(top), 0, top)), None
    if f.kernel.sinks is not None:
        sink = exact(f.kernel.sinks[h]) - shift
        leads = (sink.m > top.m) | ~seen.any(-1, keepdims=True)
        top = where(leads, sink, top)
        sink = where(leads, zero, sink - top).exp()
    E = where(seen, (S - top).exp(), zero)
    total = E.sum() if sink is None else E.sum() + sink
    some = total.m > 0
    return where(some, E / where(some, total, exact(1.0)), zero)


def _seen(f: ls.SelfAttention, n: int) -> np.ndarray:
    """Which keys each query may attend to, [n, n]."""
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    seen = np.ones((n, n), dtype=bool)
    seen &= (j <= i) | (not f.causal)
    seen &= True if f.window is None else j > i - f.window
    if f.mask is not None:
        seen &= f.mask.numpy() if f.mask.dtype == torch.bool else f.mask.numpy() > -np.inf
    if f.padding is not None:
        real = f.padding.numpy()
        seen &= real[:, None] & real[None]
    return seen


class Interval(NamedTuple):
    """Two numbers that enclose a third."""

    low: LONG
    high: LONG


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def sigma(J: Ball) -> Interval:
    """The largest singular value.

    The top right vector v of a float64 SVD gives |J v|, a lower bound; Temple's inequality the
    upper one, |J v|^2 + |J'J v - |J v|^2 v|^2 / (|J v|^2 - s_2^2), where s_2 is well below.
    """
    size, spread = np.abs(J.m).max(), _norm(J.r)
    if not np.isfinite(spread + size):  # the radius overflows: any number is possible
        return Interval(LONG(0), LONG(np.inf))
    if size == 0:
        return Interval(LONG(0), spread)
    M = J.m / size
    _, s, Vh = torch.linalg.svd(torch.from_numpy(M.astype(float)), full_matrices=False)
    slack = 4 * max(M.shape) * 2.0**-52 * s[0].item()
    v = Vh[0].numpy().astype(LONG)
    v /= np.sqrt((v * v).sum())
    w = M @ v
    square = (w * w).sum()
    low, high = np.sqrt(square), LONG(s[0].item() + slack)
    apart = square - (LONG(s[1].item() if len(s) > 1 else 0.0) + slack) ** 2
    if len(s) > 1 and apart > 0:
        residual = M.T @ w - square * v
        high = min(high, np.sqrt(square + (residual * residual).sum() / apart))
    rounding = 4 * sum(M.shape) * UNIT
    return Interval(
        max(LONG(0), low * (1 - rounding) * size - spread), high * (1 + rounding) * size + spread
    )


def row_sum(J: Ball) -> Interval:
    """The largest absolute row sum, the infinity-norm."""
    rounding = 2 * J.m.shape[1] * UNIT
    low, high = (np.abs(J.m) - J.r).clip(0).sum(1).max(), J.size.sum(1).max()
    if not np.isfinite(high):
        return Interval(LONG(0), LONG(np.inf))
    return Interval(low * (1 - rounding), high * (1 + rounding))


def _norm(r: np.ndarray) -> LONG:
    """The Frobenius norm, of numbers of any size."""
    top = r.max()
    return top * np.sqrt(((r / top) ** 2).sum()) * (1 + r.size * UNIT) if top > 0 else top
