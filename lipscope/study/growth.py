"""Growth with length: sigma ~ C n^alpha, fitted by least squares in log-log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lipscope._types import UserError

MIN_LENGTHS = 3
CONFIDENCE = 0.95

METHOD = (
    "Ordinary least squares of log sigma on log n, one point per length and sample (for heads, "
    "the head with the largest sigma); the interval is Student's, 95 %, with points - 2 degrees of "
    "freedom. rms is the root mean square residual of the fit, in log sigma: if it is large, sigma "
    "is not a power of n."
)


@dataclass(frozen=True)
class Growth:
    """sigma ~ C n^alpha at one layer and scope, with the 95 % interval [low, high] of alpha."""

    scope: str
    layer: int | None
    C: float
    alpha: float
    low: float
    high: float
    rms: float
    lengths: tuple[int, ...]
    points: int

    def __call__(self, n: int) -> float:
        """The fitted sigma at length n."""
        return self.C * n**self.alpha


def check_lengths(
    scope: str, layer: int | None, points: Sequence[tuple[int, float]]
) -> tuple[int, ...]:
    """The lengths that a fit can use; raises UserError if there are too few."""
    lengths = tuple(sorted({n for n, value in points if n > 0 and 0 < value < math.inf}))
    if len(lengths) < MIN_LENGTHS:
        raise UserError(
            f"a growth fit needs at least {MIN_LENGTHS} lengths with a positive sigma, and layer "
            f"{layer}, scope {scope} has {len(lengths)} {list(lengths)}; measure more lengths"
        )
    return lengths


def fit(scope: str, layer: int | None, points: Sequence[tuple[int, float]]) -> Growth:
    """Fit a power law to points (n, sigma); zeros have no logarithm and are left out."""
    from scipy.special import stdtrit

    xy = [(math.log(n), math.log(value)) for n, value in points if n > 0 and 0 < value < math.inf]
    lengths = check_lengths(scope, layer, points)
    # Centred sums in fsum: the textbook formula n sum(xy) - sum(x) sum(y) cancels, and a plain sum
    # would depend on the order of rows.
    count = len(xy)
    mean_x, mean_y = math.fsum(x for x, _ in xy) / count, math.fsum(y for _, y in xy) / count
    sxx = math.fsum((x - mean_x) ** 2 for x, _ in xy)
    alpha = math.fsum((x - mean_x) * (y - mean_y) for x, y in xy) / sxx
    intercept = mean_y - alpha * mean_x
    squares = math.fsum((y - intercept - alpha * x) ** 2 for x, y in xy)
    half = float(stdtrit(count - 2, 0.5 + CONFIDENCE / 2)) * math.sqrt(squares / (count - 2) / sxx)
    rms = math.sqrt(squares / count)
    return Growth(
        scope=scope,
        layer=layer,
        C=math.exp(intercept),
        alpha=alpha,
        low=alpha - half,
        high=alpha + half,
        rms=rms,
        lengths=lengths,
        points=count,
    )
