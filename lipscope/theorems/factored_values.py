"""Values that factor through the queries: V = M Q + E in every head, E bounded or exactly zero.

With E = 0 what moves a value also moves a distance, and L2 attention has a Lipschitz constant on
inputs of any size. With any other E the constant grows with the tokens; see docs/theory/bounds.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._types import Domain, Everywhere
from lipscope.attention.layer import FactoredAttention, SelfAttention
from lipscope.theorems.rounding import (
    TINY,
    frobenius_up,
    gamma,
    length_up,
    norm_up,
    row_sum_up,
    times_power,
    up,
)
from lipscope.theorems.statement import Head, heads_of, once


@dataclass(frozen=True, eq=False)
class Split:
    """One head's V (without its power of two) as (M + D) Q + E; all but M are upper bounds.

    drift:    norm of D, both in the 2-norm and for the largest coordinate.
    spectral: spectral norm of E.
    row:      length of the longest row of E.
    row_sum:  largest absolute row sum of E.
    """

    M: Tensor
    drift: float = 0.0
    spectral: float = 0.0
    row: float = 0.0
    row_sum: float = 0.0


Way = list[tuple[Head, Split]]


@once
def splits(f: SelfAttention, domain: Domain) -> list[Way]:
    """Ways to split the values of all heads: with E = 0 if possible, and with M = V Q^+."""
    heads = heads_of(f, folded=False)
    ways = []
    # On bounded tokens the bound also covers V as it is stored, rounded, however it was defined.
    if isinstance(domain, Everywhere) or not isinstance(f, FactoredAttention):
        ways.append([(h, split) for h in heads if (split := exact_split(h)) is not None])
    if not isinstance(domain, Everywhere):
        ways.append([(h, near_split(h)) for h in heads])
    return [way for way in ways if len(way) == len(heads)]


def exact_split(h: Head) -> Split | None:
    """V = (M + D) Q with E = 0, or None if that is false or cannot be proved."""
    if h.factor == math.inf:
        return None
    Q = h.one.Q
    if isinstance(h.one, FactoredAttention):
        # Scaling by a power of two is exact, except for entries that underflow.
        M = times_power(h.one.M[0], -h.power)
        return Split(M, drift=TINY * M.numel())
    inverse = torch.linalg.pinv(Q)
    M = h.V @ inverse
    for candidate in _simpler(M):
        if _is_product(h.one.V, candidate, Q, h.power):
            return Split(candidate)
    if Q.shape[0] < Q.shape[1]:
        return None
    # Q is invertible on the tokens: L Q = I for an L near the computed one, and V = (M + E L) Q.
    one = torch.eye(Q.shape[1], dtype=Q.dtype, device=Q.device)
    skew = norm_up(inverse @ Q - one).item() + gamma(h.steps) * _size(inverse) * _size(Q)
    if not skew < 0.5:
        return None
    rest = up(near_split(h, M).spectral * _size(inverse) / (1 - skew))
    return Split(M, drift=up(rest * math.sqrt(max(M.shape))))


def near_split(h: Head, M: Tensor | None = None) -> Split:
    """V = M Q + E for the given M; by default the M that defines the values, or V Q^+."""
    Q = h.one.Q
    if M is None:
        exact = exact_split(h) if isinstance(h.one, FactoredAttention) else None
        M = h.V @ torch.linalg.pinv(Q) if exact is None else exact.M
    E = h.V - M @ Q
    # Rounding of the product and of the difference, and what underflowed.
    error = up(gamma(h.steps) * (_size(M) * _size(Q) + h.V_size)) + TINY * M.numel()
    return Split(
        M,
        spectral=up(norm_up(E).item() + error),
        row=up(length_up(E).max().item() + error),
        row_sum=up(row_sum_up(E) + math.sqrt(h.d) * error),
    )


def whole_rest(h: Head) -> Split:
    """Return the split with M = 0 and E = V."""
    error = gamma(h.steps) * h.V_size
    return Split(
        h.V.new_zeros(h.V.shape[0], h.k),
        spectral=h.V_norm,
        row=up(length_up(h.V).max().item() + error),
        row_sum=up(row_sum_up(h.V) + math.sqrt(h.d) * error),
    )


def _size(M: Tensor) -> float:
    return frobenius_up(M).item()


def _simpler(M: Tensor) -> Iterator[Tensor]:
    """M, and M rounded: a pseudoinverse returns a factor of few digits with errors in the last."""
    yield M
    yield M.float().double()
    power = 26 - math.frexp(M.abs().max().item())[1]
    yield times_power(times_power(M, power).round(), -power)


def _is_product(V: Tensor, M: Tensor, Q: Tensor, power: int) -> bool:
    """Return whether V = 2^power M Q to the last bit, decided in integers."""
    if not (V.isfinite().all() and M.isfinite().all() and Q.isfinite().all()):
        return False
    # Integers are slow; floating point rejects almost everything that is not a product.
    rough = (times_power(V, -power) - M @ Q).abs()
    if bool((rough > gamma(2 * M.shape[1] + 8) * (M.abs() @ Q.abs()) + TINY).any()):
        return False
    (v, shift_v), (m, shift_m), (q, shift_q) = (_integers(W) for W in (V, M, Q.T))
    left = shift_v
    right = shift_m + shift_q + power
    least = min(left, right)
    # Row r of V is row r of M times the columns of Q; stop at the first entry that differs.
    for row, values in zip(m, v, strict=True):
        for column, value in zip(q, values, strict=True):
            product = sum(a * b for a, b in zip(row, column, strict=True))
            if value << (left - least) != product << (right - least):
                return False
    return True


def _integers(W: Tensor) -> tuple[list[list[int]], int]:
    """Integers I and p with W = I 2^p exactly."""
    mantissa, exponent = torch.frexp(W)
    least = int(exponent.min())
    digits = times_power(mantissa, 53).long().flatten().tolist()
    shifts = (exponent - least).flatten().tolist()
    flat = [digit << shift for digit, shift in zip(digits, shifts, strict=True)]
    width = W.shape[1]
    return [flat[i : i + width] for i in range(0, len(flat), width)], least - 53
