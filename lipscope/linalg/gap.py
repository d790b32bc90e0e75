"""A distance asked for between upper and lower bound: whether it is reached, whether it can be, why it was not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lipscope._types import UserError
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

ALLOWED = 1.1
"""How much noisier a product may be at the end: the same one, in another batch."""


def check_gap(gap: object) -> None:
    """A letter about what is no gap."""
    if gap is None:
        return
    if isinstance(gap, bool) or not isinstance(gap, int | float):
        raise UserError(f"gap, the relative distance upper / lower - 1, must be a number, got {gap!r}.")
    if not 0 < gap < 1:
        hint = f"; for upper / lower <= {gap:g} give {gap - 1:.6g}" if 1 < gap < 2 else ""
        raise UserError(f"gap, the relative distance upper / lower - 1, must lie between 0 and 1, got {gap:g}{hint}.")


class Gap:
    """Upper / lower <= ratio, asked of every member of a batch.

    Rounding in the products sets a floor that no further step gets the upper bound below (see certificate.py). Where
    the ratio lies under it, twice the distance of the floor is good enough: more steps would be taken for nothing.
    """

    def __init__(self, ratio: float, overlap: float, members: int):
        self.overlap, self.ratio = overlap, ratio
        self.noise = torch.zeros(members, dtype=torch.float64)

    def closed(
        self,
        basis: GolubKahan,
        ritz: tuple[Tensor, ...],
        index: Int[Tensor, "b"],
        asked: Bool[Tensor, "b"],
        rounding: Float[Tensor, "b"],
    ) -> Bool[Tensor, "b"]:
        """Which of those asked for need no further steps; the basis holds the members `index` of the batch.

        rounding: by how much, relative to the norm, both bounds will be widened at the end.
        """
        distance = self.ratio / widening(rounding[asked]) - 1
        closed, theta, members = torch.zeros_like(asked), ritz[0][asked], index[asked]
        a, b = (torch.stack(x, dim=1)[asked] for x in zip(*basis.coefficients, strict=True))
        drift = basis.drift[asked] / theta

        def reaches(wanted: Tensor) -> tuple[Tensor, Tensor]:
            noise = perturbation(self.noise[members], drift)
            return bounded_by(theta * (1 + SEARCHED * wanted), a, b, self.overlap, noise)

        reached, possible = reaches(distance)
        if possible.all() and not reached.any():
            return closed
        # Before anything is settled: the noise of the very vectors that the bounds would be drawn from.
        self.noise[index] = ALLOWED * basis.noise(*ritz)
        reached, possible = reaches(distance)
        if not possible.all():
            floor = noise_floor(a, b, self.overlap, perturbation(self.noise[members], drift))
            near, _ = reaches(2 * (floor / theta - 1))
            reached |= ~possible & (near | floor.isinf())
        closed[asked] = reached
        return closed


def widening(rounding: Tensor) -> Tensor:
    """By how much rounding of the map parts upper and lower, as a factor; beyond 1/2 there is no upper bound."""
    r = rounding.nan_to_num(nan=0.5).clamp(max=0.5)
    return (1 + r) / (1 - r)


def why_missed(room: float, kept: int, steps: int, max_steps: int) -> str:
    """Why a certificate is wider than asked: `room` is the ratio that rounding of the map left to the solver,
    `kept` the number of steps from which the upper bound could be drawn."""
    if room <= 1:
        return SCORES
    if kept < steps:
        return MEMORY
    return STEPS if steps >= max_steps else NOISE
