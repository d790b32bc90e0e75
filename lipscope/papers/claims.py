"""Claims of the papers: how to run and judge one, what a verdict says, and fitted power laws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lipscope.papers.page import Picture
    from lipscope.papers.setting import Setting

Numbers = dict[str, Any]
"""What a run measured: JSON, stored as it is; the only thing that a judge and a plot see."""

CONFIDENCE = 0.95
FIXED = 2e-3
"""Relative spread below which a quantity counts as constant; a LayerNorm leaves less."""

PAPERS = {
    "castin2024": "Castin, Ablin and Peyré (2024), How smooth is attention?",
    "kim2021": "Kim, Papamakarios and Mnih (2021), The Lipschitz constant of self-attention",
}


class Kind(StrEnum):
    """What a verdict says."""

    REPRODUCED = "REPRODUCED"
    DIFFERS = "DIFFERS"
    STAND_IN = "STAND-IN"
    NEEDS = "NEEDS"


@dataclass(frozen=True)
class Quoted:
    """What a paper states: numbers by name, and where they stand."""

    source: str
    values: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.values[name]


@dataclass(frozen=True)
class Verdict:
    """What stored numbers say about a claim.

    kind:     REPRODUCED, DIFFERS, STAND-IN or NEEDS
    holds:    whether the claim held where it was tested; None if it could not be tested
    interval: of the quantity that was judged, where it is one number
    reason:   what was compared with what; for DIFFERS, the cause that was tested
    """

    kind: Kind
    holds: bool | None
    interval: tuple[float, float] | None = None
    reason: str = ""


def judged(holds: bool, reason: str, interval: tuple[float, float] | None = None) -> Verdict:
    """The verdict of a claim that was tested as it is stated; `decide` knows about stand-ins."""
    kind = Kind.REPRODUCED if holds else Kind.DIFFERS
    return Verdict(kind=kind, holds=bool(holds), interval=interval, reason=reason)


class NotAvailable(Exception):  # noqa: N818, it is an answer, not an error
    """Raised by a run for something that the user must bring; the verdict is NEEDS."""


@dataclass(frozen=True)
class Claim:
    """One claim: an id, what the paper says, and how it is tested.

    id:    as in the table of the documentation, for example "C25"
    paper: "castin2024" or "kim2021"
    says:  the claim in our own words
    needs: what the full test needs: "nothing", "gpu", "bert-base-uncased", "Alice text", ...
    run:   measures; what it returns is stored
    judge: compares stored numbers with the quoted ones
    plot:  the figure beside the paper's, drawn from stored numbers
    """

    id: str
    paper: str
    says: str
    needs: str
    run: Callable[[Setting], Numbers]
    judge: Callable[[Numbers, Quoted], Verdict]
    plot: Callable[[Numbers], Picture] | None = None


def claim(
    id: str,
    says: str,
    run: Callable[[Setting], Numbers],
    judge: Callable[[Numbers, Quoted], Verdict],
    plot: Callable[[Numbers], Picture] | None = None,
    needs: str = "nothing",
) -> Claim:
    """A claim; the letter of its id says of which paper."""
    paper = "kim2021" if id[0] in "KA" else "castin2024"
    return Claim(id=id, paper=paper, says=says, needs=needs, run=run, judge=judge, plot=plot)


@dataclass(frozen=True)
class Fit:
    """y ~ x^alpha, and the interval [low, high] of alpha; rms is the residual in log y."""

    alpha: float
    low: float
    high: float
    rms: float

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high

    def contains(self, alpha: float, slack: float = 0.0) -> bool:
        """Whether an exponent lies in the interval, up to the rounding of a printed number."""
        return self.low - slack <= alpha <= self.high + slack

    def __str__(self) -> str:
        return f"{self.alpha + 0.0:.2f} [{self.low + 0.0:.2f}, {self.high + 0.0:.2f}]"


def power_law(points: Sequence[tuple[float, float]], held: Sequence[float] | None = None) -> Fit:
    """Least squares of log y on log x, one equation per point.

    Args:
        points: Pairs (x, y); pairs that are not positive are left out.
        held: A third quantity per point whose own power is fitted too, so that the exponent of x
            is the one at a fixed value of it.
    """
    from scipy.special import stdtrit

    third = [1.0] * len(points) if held is None else list(held)
    kept = [
        (x, y, z)
        for (x, y), z in zip(points, third, strict=True)
        if 0 < x < math.inf and 0 < y < math.inf and z > 0
    ]
    x, y, z = np.log(np.array(kept, dtype=np.float64).reshape(-1, 3)).T
    columns = [x - x.mean(), np.ones_like(x)] + ([] if held is None else [z - z.mean()])
    design = np.stack(columns, axis=1)
    freedom = len(y) - design.shape[1]
    fixed = x.std() < FIXED
    if freedom < 1 or fixed or np.linalg.matrix_rank(design) < design.shape[1]:
        # One value of x alone, or as many unknowns as points: the exponent could be anything.
        return Fit(0.0, -math.inf, math.inf, math.nan)
    found, *_ = np.linalg.lstsq(design, y, rcond=None)
    residual = y - design @ found
    spread = float(residual @ residual) / freedom * np.linalg.inv(design.T @ design)[0, 0]
    half = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * math.sqrt(spread)
    alpha = float(found[0])
    return Fit(
        alpha=alpha,
        low=alpha - half,
        high=alpha + half,
        rms=math.sqrt(float(residual @ residual) / len(y)),
    )
