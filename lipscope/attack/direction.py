"""The most damaging direction at one input, and how far it stays so: ||f(X + eta U) - f(X)|| / eta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.linalg.differentiate import Map
from lipscope.linalg.estimate import Estimate
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver, fresh_seed

ETAS = tuple(10.0**e for e in range(-6, 1))


@dataclass(frozen=True, eq=False)
class Response:
    """Steps eta along the top right singular vector U of D_X f (||U|| = 1) and the change of f per unit of step.

    As eta goes to 0 the ratios tend to sigma; `opposite` are those of -eta.
    """

    etas: tuple[float, ...]
    ratios: tuple[float, ...]
    opposite: tuple[float, ...]
    sigma: Estimate

    @property
    def direction(self) -> Tensor:
        return self.sigma.right


def singular_response(
    f: Map, X: Tensor, etas: Sequence[float] = ETAS, *, seed: int = 0
) -> Response:
    """How f changes along its most sensitive direction at X [n, d]."""
    if X.ndim != 2:
        raise UserError(f"the response is taken at one input X [n, d], got shape {tuple(X.shape)}")
    if not etas or not all(eta > 0 for eta in etas):
        raise UserError(f"etas must be positive steps, at least one, got {list(etas)}")
    sigma = local_lipschitz(f, X, solver=Solver(seed=fresh_seed(seed, "measure")))
    with torch.no_grad():
        here = f(X)
        ratios, opposite = (
            tuple(_length(f(X + sign * eta * sigma.right) - here) / eta for eta in etas)
            for sign in (1, -1)
        )
    return Response(tuple(etas), ratios, opposite, sigma)


def _length(x: Tensor) -> float:
    """||x||_F without overflow or underflow in the squares."""
    largest = x.abs().max().double()
    return 0.0 if largest == 0 else ((x.double() / largest).norm() * largest).item()
