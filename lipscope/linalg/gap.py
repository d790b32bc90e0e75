"""A distance asked for between upper and lower bound: whether it is reached, whether it can be, why it was not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lipscope.linalg.certificate import bounded_by, noise_floor, perturbation

if TYPE_CHECKING:
    from lipscope.linalg.golub_kahan import GolubKahan

MISSED = "gap not reached: "
UNCERTIFIED = MISSED + "there is no upper bound"
NO_VALUE = MISSED + "there is no value"
SCORES = MISSED + "rounding of the scores alone is wider; ask for a wider gap or scale the input down"
MEMORY = (
    MISSED + "the Krylov vectors outgrew their memory; raise Solver's memory, use basis='host' or ask for a wider gap"
)
STEPS = MISSED + "the steps are used up; raise Solver's max_steps or ask for a wider gap"
NOISE = MISSED + "rounding in the products allows no bound so tight; ask for a wider gap or raise Solver's failure"

SEARCHED = 1 - 1e-4
"""The part of the distance that is aimed at: the bound is searched on a grid, whose last step is finer than this."""


class Gap:
    """Upper / lower <= ratio, asked of every member of a batch; rounding: what widens both bounds at the end.

    Rounding in the products sets a floor that no further step gets the upper bound below (see certificate.py). A member
    that is asked for less is asked for twice the distance of the floor instead: more steps would be taken for nothing.
    """

    def __init__(self, ratio: float, overlap: float, rounding: Float[Tensor, "B"]):
        self.overlap, self.rounding = overlap, rounding
        self.noise: Tensor | None = None
        self.distance = ratio / widening(rounding) - 1

    def closed(
        self, basis: GolubKahan, ritz: tuple[Tensor, ...], index: Int[Tensor, "b"], asked: Bool[Tensor, "b"]
    ) -> Bool[Tensor, "b"]:
        """Which of those asked for need no further steps; the basis holds the members `index` of the batch."""
        if self.noise is None:
            self.noise = torch.zeros_like(self.rounding)
            self._listen(basis, ritz, index)
        closed = torch.zeros_like(asked)
        closed[asked] = self._enough(basis, ritz[0], index, asked)
        if closed.any():
            # The vectors that the bounds will be drawn from may be noisier than those before.
            self._listen(basis, ritz, index)
            closed[asked] = self._enough(basis, ritz[0], index, asked)
        return closed

    def _listen(self, basis: GolubKahan, ritz: tuple[Tensor, ...], index: Tensor) -> None:
        """The largest noise so far, and a little more: it is measured once again at the end, in another batch."""
        assert self.noise is not None
        self.noise[index] = torch.maximum(self.noise[index], 1.25 * basis.noise(*ritz))

    def _enough(self, basis: GolubKahan, theta: Tensor, index: Tensor, asked: Tensor) -> Tensor:
        assert self.noise is not None
        theta, members = theta[asked], index[asked]
        a, b = (torch.stack(x, dim=1)[asked] for x in zip(*basis.coefficients, strict=True))
        known = a, b, self.overlap, perturbation(self.noise[members], basis.drift[asked] / theta)
        reached, possible = bounded_by(self._aim(theta, members), *known)
        if not possible.all():
            nearest = 2 * (noise_floor(*known) / theta - 1)
            self.distance[members] = torch.where(possible, self.distance[members], nearest)
            reached, _ = bounded_by(self._aim(theta, members), *known)
        return reached | self.distance[members].isinf()

    def _aim(self, theta: Tensor, members: Tensor) -> Tensor:
        return theta * (1 + SEARCHED * self.distance[members])


def widening(rounding: Tensor) -> Tensor:
    """By how much rounding of the map parts upper and lower, as a factor; beyond 1/2 there is no upper bound."""
    r = rounding.clamp(max=0.5)
    return (1 + r) / (1 - r)


def why_missed(room: float, kept: int, steps: int, max_steps: int) -> str:
    """Why a certificate is wider than asked: `room` is the ratio that rounding of the map left to the solver,
    `kept` the number of steps from which the upper bound could be drawn."""
    if room <= 1:
        return SCORES
    if kept < steps:
        return MEMORY
    return STEPS if steps >= max_steps else NOISE
