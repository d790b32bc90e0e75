"""Power laws fitted to stored points, with Student's 95 % interval of the exponent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
FIXED = 2e-3
"""Relative spread below which a quantity counts as constant; a LayerNorm leaves less."""


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
