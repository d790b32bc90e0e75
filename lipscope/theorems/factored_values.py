"""Values that factor through the queries: V = M Q + E in every head, E bounded or exactly zero.

With E = 0 what moves a value also moves a distance, and L2 attention has a Lipschitz constant on
inputs of any size. With any other E the constant grows with the tokens; see docs/theory/bounds.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from lipscope._types import Domain, Everywhere, UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import L2
from lipscope.linalg.differentiate import check_one_device
from lipscope.theorems.heads import Head, heads_of, once
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


@dataclass(frozen=True, eq=False)
class FactoredAttention(SelfAttention):
    """L2 attention whose values are, by definition, `M_h` times the queries.

    The values are computed from the queries instead of the stored `V`, so that a rounding error of
    `V` is never multiplied by the size of the tokens. Only then does the layer have a Lipschitz
    constant over all inputs.

    Args:
        M: Shape `[heads, m, k]`, keyword only. All other arguments are those of `SelfAttention`,
            with `V = M_h Q_h` in every head (up to rounding), an `L2` kernel and no biases.

    Raises:
        UserError: If `V` is not `M Q`, or the kernel, the heads or the biases do not fit.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> Q = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        >>> M = torch.tensor([[[3.0]]], dtype=torch.float64)
        >>> f = ls.theorems.FactoredAttention(Q, Q, 3 * Q, kernel=ls.L2(), M=M)
        >>> [row.name for row in ls.bounds(f, ls.Everywhere(n=4)) if row.kind == "upper"]
        ['Kim et al., L2 attention', 'L2 attention']
    """

    M: Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = (self.heads, self.V.shape[0] // self.heads, self.Q.shape[0] // self.heads)
        biased = any(bias is not None for bias in self.biases or ())
        if not isinstance(self.kernel, L2) or self.groups != self.heads or biased:
            raise UserError(
                "FactoredAttention needs an L2 kernel, as many key heads as query heads, "
                "and no biases"
            )
        if tuple(self.M.shape) != shape or self.M.dtype != self.Q.dtype:
            expected = f"shape [heads, m, k] = {shape} and the dtype of Q, {self.Q.dtype}"
            raise UserError(f"M must have {expected}, got {tuple(self.M.shape)} of {self.M.dtype}")
        check_one_device("Q", self.Q, M=self.M)
        Q, V = (W.unflatten(0, (self.heads, -1)).double() for W in (self.Q, self.V))
        M = self.M.double()
        # Loose enough for values rounded to bfloat16. A product that overflows is not compared.
        if ((V - M @ Q).norm(dim=(1, 2)) > 2**-6 * (M.norm(dim=(1, 2)) * Q.norm(dim=(1, 2)))).any():
            raise UserError("V is not M Q; pass V = M_h Q_h, head by head")

    def project(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, _ = super().project(X)
        return q, k, q @ self.M.mT

    def head(self, h: int) -> FactoredAttention:
        one = SelfAttention(**_parts(self)).head(h)
        return FactoredAttention(**_parts(one) | {"biases": None}, M=self.M[h : h + 1])


def _parts(f: SelfAttention) -> dict[str, Any]:
    return {part.name: getattr(f, part.name) for part in fields(SelfAttention)}


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
