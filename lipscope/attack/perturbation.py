"""Steps from one input: along the most sensitive direction, at random, by projected gradient.

The functions of perturbations return one per radius, [B, n, d], of exactly that Frobenius norm; f
maps [B, n, d] memberwise. `output_changes` measures their effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._ambient import callers_device, entry_point
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.attack.search import Search
from lipscope.linalg.differentiate import Map
from lipscope.linalg.estimate import Estimate, as_single
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.operator import lengths
from lipscope.linalg.spectral import Solver, fresh_seed

ETAS = tuple(10.0**e for e in range(-6, 1))


@dataclass(frozen=True, eq=False)
class Response(Displayed):
    """Changes of f per step along the top right singular vector U of D_X f, with ||U|| = 1.

    etas:     The step sizes.
    ratios:   ||f(X + eta U) - f(X)|| / eta, which tends to sigma as eta tends to 0.
    opposite: The same for steps in the direction -U.
    sigma:    The local Lipschitz constant at X.
    """

    etas: tuple[float, ...]
    ratios: tuple[float, ...]
    opposite: tuple[float, ...]
    sigma: Estimate

    @property
    def direction(self) -> Tensor:
        return self.sigma.right


@entry_point
def singular_response(
    f: Map, X: Tensor, etas: Sequence[float] = ETAS, *, seed: int = 0
) -> Response:
    """Measure how f changes along its most sensitive direction at X.

    Args:
        f: A map of tokens.
        X: One input [n, d].
        etas: Positive step sizes.
        seed: Seed of the measurement.

    Returns:
        The changes per step in both directions, and sigma.

    Raises:
        UserError: If X is not [n, d] or a step is not positive.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> found = ls.attack.singular_response(lambda X: 3 * X, torch.ones(2, 4), etas=(0.1, 1.0))
        >>> [round(ratio, 3) for ratio in found.ratios]
        [3.0, 3.0]
    """
    _check_steps(X, "etas", etas)
    sigma = as_single(local_lipschitz(f, X, solver=Solver(seed=fresh_seed(seed, "measure"))))

    def change(E: Tensor) -> float:
        return lengths((f(X + E) - here).double().flatten()).item()

    with torch.no_grad(), callers_device():
        here = f(X)
        ratios, opposite = (
            tuple(change(sign * eta * sigma.right) / eta for eta in etas) for sign in (1, -1)
        )
    return Response(etas=tuple(etas), ratios=ratios, opposite=opposite, sigma=sigma)


TOL = 1e-3
"""Relative residual of the singular vector, far below the effect of a finite step."""


def random_perturbations(X: Tensor, radii: Sequence[float], *, seed: int = 0) -> Tensor:
    """Draw directions uniform on the sphere."""
    r = _check_steps(X, "radii", radii)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(r), *X.shape, generator=generator, dtype=torch.float64)
    return _of_norm(drawn.to(X), r)


def singular_perturbations(f: Map, X: Tensor, radii: Sequence[float], *, seed: int = 0) -> Tensor:
    """Step along the top right singular vector, with the better sign: optimal as r tends to 0."""
    r = _check_steps(X, "radii", radii)
    top = local_lipschitz(f, X[None], TOL, solver=Solver(seed=seed)).right.to(X)
    # To first order both signs change f equally; at finite radius one may do better.
    ahead, back = (_of_norm((sign * top).expand(len(r), -1, -1), r) for sign in (1, -1))
    better = output_changes(f, X, ahead) >= output_changes(f, X, back)
    return torch.where(better[:, None, None], ahead, back)


def gradient_perturbations(
    f: Map, X: Tensor, radii: Sequence[float], *, steps: int = 20, seed: int = 0
) -> Tensor:
    """Ascend by projected gradients on ||f(X + E) - f(X)|| over the sphere ||E|| = r.

    It starts from a random E and from -E: as r tends to 0 the gradient is a multiple of J'J E and
    the ascent a power iteration; for larger r the two starts may reach different maxima. A step
    that does not help is undone and shortened.
    """
    r = _check_steps(X, "radii", [*radii, *radii])
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


def _check_steps(X: Tensor, name: str, sizes: Sequence[float]) -> Tensor:
    """Return the sizes of steps from one input as a tensor."""
    if X.ndim != 2:
        raise UserError(f"X must be one input [n, d], got shape {tuple(X.shape)}")
    if not sizes or not all(0 < size < float("inf") for size in sizes):
        raise UserError(
            f"{name} must be positive and finite, at least one of them, got {list(sizes)}"
        )
    return torch.tensor(list(sizes), dtype=torch.float64).to(X)
