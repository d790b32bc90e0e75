"""Norms that are never rounded the wrong way: float64, widened by explicit error terms.

u = 2^-53 is the unit roundoff and gamma(m) = m u / (1 - m u) bounds the relative error of m
operations in sequence. An error term is added wherever a computed number enters a bound;
docs/theory/bounds.md lists them.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

U = 2.0**-53
TINY = torch.finfo(torch.float64).tiny


def gamma(operations: int) -> float:
    """m u / (1 - m u); infinite if that many operations can lose everything."""
    lost = operations * U
    return lost / (1 - lost) if lost < 0.5 else math.inf


def up(value: float, operations: int = 64) -> float:
    """Round up a nonnegative result of that many operations; NaN becomes infinity."""
    return math.inf if math.isnan(value) else value * (1 + gamma(operations + 4))


def scaled_up(value: float, power: int) -> float:
    """value 2^power rounded up, also where it under- or overflows."""
    try:
        return value if value == 0 else math.nextafter(math.ldexp(value, power), math.inf)
    except OverflowError:
        return math.inf


def times_power(M: Tensor, power: int) -> Tensor:
    """M 2^power, exactly unless it under- or overflows."""
    # An exponent on the CPU, even a single number, is refused for M on a GPU.
    return torch.ldexp(M, torch.tensor(power, device=M.device))


def down(value: float, operations: int = 64) -> float:
    """Round a result of that many operations down to a lower bound of at least 0."""
    return max(0.0, value * (1 - gamma(operations + 4))) if math.isfinite(value) else 0.0


def exp_up(x: float) -> float:
    """Return an upper bound of e^x for a computed x."""
    return math.exp(x) * (1 + (8 + 4 * abs(x)) * U) if x < 709 else math.inf


def length_up(x: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch"]:
    """Return upper bounds of the Euclidean norms of the vectors x [..., m]."""
    size = _exponent(x.unsqueeze(-2))[..., 0]
    return torch.ldexp(
        torch.ldexp(x, -size).norm(dim=-1) * (1 + gamma(x.shape[-1] + 4)), size[..., 0]
    )


def frobenius_up(M: Float[Tensor, "*batch p q"]) -> Float[Tensor, "*batch"]:
    """Return upper bounds of the Frobenius norms of the matrices M [..., p, q]."""
    return length_up(M.flatten(-2))


def norm_up(M: Float[Tensor, "*batch p q"]) -> Float[Tensor, "*batch"]:
    """Return upper bounds of the spectral norms of the matrices M [..., p, q].

    With G = M M' = W L W' + (residual), ||M||^2 <= max|L| ||W'W|| + ||residual||_F, however
    inaccurate the computed eigenvalues L and eigenvectors W.
    """
    if not M.isfinite().all():
        return torch.full(M.shape[:-2], math.inf, dtype=M.dtype, device=M.device)
    # The smaller Gram matrix, of a matrix scaled to entries of order one (exactly, by powers of 2).
    M = M if M.shape[-2] <= M.shape[-1] else M.mT
    p, q = M.shape[-2:]
    size = _exponent(M)
    M = torch.ldexp(M, -size)
    G = M @ M.mT
    L, W = torch.linalg.eigh(G)
    largest = L.abs().amax(dim=-1)
    # How far W is from orthogonal, how far W L W' is from G, and how far G is from M M': each as
    # computed, plus the rounding of that computation.
    one = torch.eye(p, dtype=M.dtype, device=M.device)
    skew = (W.mT @ W - one).norm(dim=(-2, -1)) + 2 * p * gamma(p + 4)
    off = (G - (W * L[..., None, :]) @ W.mT).norm(dim=(-2, -1))
    residual = off + 2 * p * gamma(p + 4) * largest
    gram = gamma(q + 4) * M.square().sum(dim=(-2, -1))
    square = (largest * (1 + skew) + residual + gram) * (1 + gamma(p * p + 16))
    return torch.ldexp(square.sqrt() * (1 + 4 * U), size[..., 0, 0])


def norm_down(M: Float[Tensor, "p q"]) -> float:
    """Return a lower bound of the spectral norm of M [p, q]: ||M v|| / ||v|| minus rounding."""
    if not M.isfinite().all():
        return 0.0
    size = _exponent(M)
    M = torch.ldexp(M, -size)
    v = torch.linalg.svd(M, full_matrices=False)[2][0]
    # Any v gives a lower bound; an inaccurate SVD only makes it worse, never wrong.
    value = (M @ v).norm() / v.norm()
    slack = gamma(2 * M.shape[1] + 8) * (value + M.norm())
    return max(0.0, torch.ldexp(value - slack, size[0, 0]).item())


def row_sum_up(M: Float[Tensor, "p q"]) -> float:
    """Return an upper bound of the largest absolute row sum of M [p, q], its infinity-norm."""
    return up(M.abs().sum(dim=-1).max().item(), M.shape[-1])


def _exponent(M: Float[Tensor, "*batch p q"]) -> Int[Tensor, "*batch 1 1"]:
    """Return the power of two just above the largest entry of each matrix, [..., 1, 1]."""
    return torch.frexp(M.abs().amax(dim=(-2, -1), keepdim=True)).exponent
