"""The leading singular triplets of an operator, one after the other, by deflation."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._types import UserError
from lipscope.linalg.estimate import BatchEstimate, Estimate
from lipscope.linalg.operator import LinearOperator, Pair
from lipscope.linalg.spectral import Solver, fresh_seed, random_start, spectral_norm


@entry_point
def singular_triplets(
    J: LinearOperator, k: int, tol: float = 1e-8, *, solver: Solver | None = None
) -> list[Estimate] | list[BatchEstimate]:
    """The k largest singular triplets of an operator, repeated values included.

    They are found one after the other, each on J less what has been found: a single Krylov space
    shows each distinct value only once, and saturated attention repeats its largest.

    Args:
        J: The operator, or a batch of operators.
        k: Number of triplets, at most the smaller side of J.
        tol: Relative residual to reach for each triplet.
        solver: Options of the solver. Its failure probability is shared by the k upper bounds.

    Returns:
        k estimates in the order they were found. All k upper bounds hold together with the
        confidence that each of them states. Left vectors are orthonormal, and so are right ones,
        also past the rank of J, where the value is zero up to rounding and any vectors orthogonal
        to the earlier ones belong to it.

    Raises:
        UserError: If k is out of range.

    Example:
        >>> import torch, lipscope as ls
        >>> f = ls.SelfAttention(*(torch.eye(2, dtype=torch.float64) for _ in range(3)))
        >>> J = ls.jacobian(f, torch.zeros(3, 2, dtype=torch.float64))  # every token to the mean
        >>> [round(e.value, 6) for e in ls.singular_triplets(J, 2)]
        [1.0, 1.0]
    """
    if not 1 <= k <= min(J.domain_size, J.range_size):
        raise UserError(
            f"k must be between 1 and {min(J.domain_size, J.range_size)}, the smaller side of J, "
            f"got {k!r}"
        )
    solver = solver or Solver()
    # The vectors found so far depend on their starts, so every search needs a start of its own.
    first = secrets.randbits(63) if solver.seed is None else solver.seed
    first = int(J.space.broadcast(torch.tensor(first)))
    found: list[Any] = []
    blur = torch.zeros(J.leading, dtype=torch.float64)
    least = blur + math.inf
    for i in range(k):
        seed = fresh_seed(first, f"triplet {i}")
        own = replace(solver, seed=seed, failure=solver.failure / k)
        e: Any = spectral_norm(_deflated(J, found), tol, solver=own)
        value, residual, lower, upper = (
            torch.as_tensor(x, dtype=torch.float64) for x in (e.value, e.residual, e.lower, e.upper)
        )
        # Deflation with vectors of residual r moves the rest by at most r sigma. Vectors that were
        # found out of order span a space on which J is at least the smallest of their values, less
        # what their residuals mix.
        mixed = blur + 2 * residual * value
        least = torch.minimum(least, lower)
        bounds: Any = (least - mixed).clamp_min(0.0) if found else lower, upper + blur
        if J.batch is None:
            bounds = [x.item() for x in bounds]
        left, right = ([getattr(one, side) for one in found] for side in ("left", "right"))
        found.append(
            replace(
                e,
                lower=bounds[0],
                upper=bounds[1],
                confidence=1 - solver.failure if e.confidence else 0.0,
                left=_orthonormal(J.T, e.left, left, fresh_seed(first, f"left {i}")),
                right=_orthonormal(J, e.right, right, fresh_seed(first, f"right {i}")),
            )
        )
        blur = mixed
    return found


def _orthonormal(J: LinearOperator, x: Tensor, others: list[Tensor], seed: int) -> Tensor:
    """A vector of J's domain as a unit vector orthogonal to the unit vectors `others`.

    Past the rank nothing but rounding is left in x: it is then replaced by a random vector.
    """
    members = J.batch or 1
    rows = [v.reshape(members, -1).double() for v in others]

    def purified(y: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors, and which of them were orthogonal to the others to begin with."""
        y = y.reshape(members, -1).double()
        y = y / J.space.norm(y.norm(dim=1))[:, None]
        usable = torch.ones(members, dtype=torch.bool, device=y.device)
        for _ in range(2):  # the second time takes out what the first one rounded
            for v in rows:
                y = y - J.space.sum((y * v).sum(dim=1, keepdim=True)) * v
            size = J.space.norm(y.norm(dim=1))
            usable &= size > 0.5
            y = y / size[:, None]
        return y, usable

    y, usable = purified(x)
    if not usable.all():
        y = torch.where(usable[:, None], y, purified(random_start(J, members, seed))[0])
    return y.to(x.dtype).reshape(x.shape)


def _deflated(J: LinearOperator, found: list[Any]) -> LinearOperator:
    """(I - U U') J (I - V V') for the vectors found so far."""
    if not found:
        return J

    def without(x: Tensor, vectors: list[Tensor]) -> Tensor:
        for v in vectors:
            inner = tuple(range(len(J.leading), x.ndim))
            x = x - J.space.sum((x * v).sum(dim=inner, keepdim=True)) * v
        return x

    left = [e.left for e in found]
    right = [e.right for e in found]

    def deflated(pair: Pair) -> Pair:
        mv, rmv = pair
        return lambda E: without(mv(without(E, right)), left), lambda U: without(
            rmv(without(U, left)), right
        )

    # What was taken out was of the size of the largest: rounding still is.
    size = found[0].value if J.rounding.size is None else J.rounding.size
    return J.changed(deflated, size=size)
