"""The most sensitive direction at an input, and steps along it: ||f(X + eta U) - f(X)|| / eta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._ambient import callers_device, entry_point
from lipscope._display import Displayed
from lipscope._types import UserError
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
    if X.ndim != 2:
        raise UserError(f"X must be one input [n, d], got shape {tuple(X.shape)}")
    if not etas or not all(eta > 0 for eta in etas):
        raise UserError(f"etas must be positive, at least one of them, got {list(etas)}")
    sigma = as_single(local_lipschitz(f, X, solver=Solver(seed=fresh_seed(seed, "measure"))))

    def change(E: Tensor) -> float:
        return lengths((f(X + E) - here).double().flatten()).item()

    with torch.no_grad(), callers_device():
        here = f(X)
        ratios, opposite = (
            tuple(change(sign * eta * sigma.right) / eta for eta in etas) for sign in (1, -1)
        )
    return Response(etas=tuple(etas), ratios=ratios, opposite=opposite, sigma=sigma)
