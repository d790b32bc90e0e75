"""Perturbations of given norms: random, along the top singular vector, by projected gradient.

Each function returns one perturbation per radius, [B, n, d], of exactly that Frobenius norm; f maps
[B, n, d] memberwise. `output_changes` measures their effect.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipscope._ambient import callers_device
from lipscope._types import UserError
from lipscope.attack.line_search import Search
from lipscope.linalg.differentiate import Map
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.operator import lengths
from lipscope.linalg.spectral import Solver

TOL = 1e-3
"""Relative residual of the singular vector, far below the effect of a finite step."""


def random_perturbations(X: Tensor, radii: Sequence[float], *, seed: int = 0) -> Tensor:
    """Perturbations in directions uniform on the sphere."""
    r = _checked(X, radii)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(r), *X.shape, generator=generator, dtype=torch.float64)
    return _of_norm(drawn.to(X), r)


def singular_perturbations(f: Map, X: Tensor, radii: Sequence[float], *, seed: int = 0) -> Tensor:
    """The top right singular vector of D_X f with the better sign: optimal as r tends to 0."""
    r = _checked(X, radii)
    top = local_lipschitz(f, X[None], TOL, solver=Solver(seed=seed)).right.to(X)
    # To first order both signs change f equally; at finite radius one may do better.
    ahead, back = (_of_norm((sign * top).expand(len(r), -1, -1), r) for sign in (1, -1))
    better = output_changes(f, X, ahead) >= output_changes(f, X, back)
    return torch.where(better[:, None, None], ahead, back)


def gradient_perturbations(
    f: Map, X: Tensor, radii: Sequence[float], *, steps: int = 20, seed: int = 0
) -> Tensor:
    """Projected gradient ascent on ||f(X + E) - f(X)|| over the sphere ||E|| = r.

    It starts from a random E and from -E: as r tends to 0 the gradient is a multiple of J'J E and
    the ascent a power iteration; for larger r the two starts may reach different maxima. A step
    that does not help is undone and shortened.
    """
    r = _checked(X, [*radii, *radii])
    E = random_perturbations(X, radii, seed=seed)
    E = torch.cat([E, -E])
    with torch.no_grad(), callers_device():
        here = f(X[None])
    value, slope = _slope(f, X, here, E)
    search = Search(value, (E, slope), stride=r.clone())
    for _ in range(steps):
        E, slope = search.state
        uphill = _of_norm(slope, torch.ones_like(r))
        trial = _of_norm(E + search.stride[:, None, None] * uphill, r)
        value, slope = _slope(f, X, here, trial)
        search.judge(value, trial, slope)
    (ahead, back), (there, behind) = search.value.chunk(2), search.state[0].chunk(2)
    return torch.where((ahead >= back)[:, None, None], there, behind)


def output_changes(f: Map, X: Tensor, E: Tensor) -> Tensor:
    """||f(X + E_b) - f(X)||_F for each perturbation of E [B, n, d]."""
    with torch.no_grad(), callers_device():
        return lengths((f(X + E) - f(X[None])).flatten(1))


def _slope(f: Map, X: Tensor, here: Tensor, E: Tensor) -> tuple[Tensor, Tensor]:
    """||f(X + E) - f(X)|| and its gradient in E, member by member."""
    e = E.detach().clone().requires_grad_(True)
    with torch.enable_grad(), callers_device():
        change = lengths((f(X + e) - here).flatten(1))
        (gradient,) = torch.autograd.grad(change.sum(), e)
    return change.detach(), gradient


def _of_norm(E: Tensor, r: Tensor) -> Tensor:
    size = lengths(E.flatten(1))
    return E * (r / torch.where(size > 0, size, 1.0))[:, None, None]


def _checked(X: Tensor, radii: Sequence[float]) -> Tensor:
    if X.ndim != 2:
        raise UserError(f"X must be one input [n, d], got shape {tuple(X.shape)}")
    if not radii or not all(0 < r < float("inf") for r in radii):
        raise UserError(
            f"radii must be positive and finite, at least one of them, got {list(radii)}"
        )
    return torch.tensor(list(radii), dtype=torch.float64).to(X)
