"""Growth with length: sigma ~ C n^alpha, fitted by least squares in log-log."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

from lipscope._types import UserError

MIN_LENGTHS = 3
CONFIDENCE = 0.95

LEVEL = 1.2816
"""Quantile of the normal distribution at 0.9: one test in ten of independent residuals fails."""

PRIOR_FACTOR = 3.0
PRIOR_FREEDOM = 2
"""What correlation makes of the variance before samples are compared, and its weight.

Three samples show their variance with two degrees of freedom: their own interval would be up to
four times as wide where residuals seem correlated by chance. An AR(1) process or a random walk
along n doubles the variance; tests/campaigns/exponent_intervals.py has the coverage.
"""

LARGEST_LOG = 700.0
"""Laws whose constant or power is beyond exp of this cannot be evaluated."""

METHOD = (
    "Ordinary least squares of log sigma on log n, one point per length and sample (for heads, "
    "the head with the largest sigma); the interval is Student's, 95 %, with points - 2 degrees of "
    "freedom. If the residuals of samples resemble their neighbours along n more than independent "
    "ones do in nine cases of ten (Durbin-Watson), the variance of the exponent is taken from the "
    "differences between samples (samples - 1 degrees of freedom), pooled with three times the "
    "first variance (2 degrees of freedom); the wider interval counts. rms is the root mean square "
    "residual of the fit, in log sigma: if it is large, sigma is not a power of n."
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


def fit(
    scope: str,
    layer: int | None,
    points: Sequence[tuple[int, float]],
    samples: Sequence[int] | None = None,
) -> Growth:
    """Fit a power law to points (n, sigma); zeros have no logarithm and are left out.

    `samples` is the number of each point's sample. Default: every point has a sample of its own.
    """
    from scipy.special import stdtrit

    usable = [n > 0 and 0 < value < math.inf for n, value in points]
    xy = [(math.log(n), math.log(value)) for n, value in compress(points, usable)]
    lengths = check_lengths(scope, layer, points)
    # Centred sums in fsum: the textbook formula n sum(xy) - sum(x) sum(y) cancels, and a plain sum
    # would depend on the order of rows.
    count = len(xy)
    mean_x = math.fsum(x for x, _ in xy) / count
    mean_y = math.fsum(y for _, y in xy) / count
    sxx = math.fsum((x - mean_x) ** 2 for x, _ in xy)
    alpha = math.fsum((x - mean_x) * (y - mean_y) for x, y in xy) / sxx
    intercept = mean_y - alpha * mean_x
    if max(abs(intercept), abs(alpha) * max(x for x, _ in xy)) > LARGEST_LOG:
        raise UserError(f"the growth of layer {layer}, scope {scope} overflows: no law is fitted")
    residuals = [y - intercept - alpha * x for x, y in xy]
    squares = math.fsum(r**2 for r in residuals)
    rms = math.sqrt(squares / count)
    variance = squares / (count - 2) / sxx
    half = float(stdtrit(count - 2, 0.5 + CONFIDENCE / 2)) * math.sqrt(variance)
    groups = defaultdict(list)
    for (x, _), residual, sample in zip(
        xy, residuals, compress(samples or range(len(points)), usable), strict=True
    ):
        groups[sample].append((x - mean_x, residual))
    if len(groups) > 1 and _correlated(list(groups.values())):
        # The sandwich estimator with one score per sample: if every sample has every length, the
        # variance of a mean of the samples' own slopes, times its degrees of freedom.
        scores = [math.fsum(x * residual for x, residual in group) for group in groups.values()]
        between = math.fsum(score**2 for score in scores) * len(groups) / sxx**2
        freedom = len(groups) - 1 + PRIOR_FREEDOM
        variance = (between + PRIOR_FREEDOM * PRIOR_FACTOR * variance) / freedom
        half = max(half, float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * math.sqrt(variance))
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


def _correlated(groups: Sequence[Sequence[tuple[float, float]]]) -> bool:
    """Test whether neighbouring residuals of a sample are closer than independent ones would be.

    `groups` has the points (x, residual) of each sample. The statistic is that of Durbin and
    Watson, summed over samples, of residuals less the mean of their sample and less a slope: a
    sample that is larger at every length does not harm the interval of the exponent. Its mean and
    variance for independent residuals follow from traces, since it is a ratio e'A e / e'e.
    """
    centred = []
    for group in groups:
        mean_x = math.fsum(x for x, _ in sorted(group)) / len(group)
        mean_y = math.fsum(y for _, y in sorted(group)) / len(group)
        centred.append([(x - mean_x, y - mean_y) for x, y in sorted(group)])
    xs = [[x for x, _ in group] for group in centred]
    sxx = math.fsum(x**2 for group in xs for x in group)
    freedom = sum(len(group) - 1 for group in xs) - 1
    if freedom < 2 or sxx == 0:
        return False
    slope = math.fsum(x * r for group in centred for x, r in group) / sxx
    errors = [[r - slope * x for x, r in group] for group in centred]
    squares = math.fsum(e**2 for group in errors for e in group)
    steps = math.fsum((b - a) ** 2 for group in errors for a, b in pairwise(group))
    # A has the second differences of each sample, where at the ends there is one neighbour only;
    # only the slope mixes samples.
    first = math.fsum((b - a) ** 2 for group in xs for a, b in pairwise(group)) / sxx
    ends = [[0.0, *(b - a for a, b in pairwise(group)), 0.0] for group in xs]
    second = math.fsum((a - b) ** 2 for group in ends for a, b in pairwise(group)) / sxx
    counts = [len(group) for group in xs if len(group) > 1]
    trace = sum(2 * (count - 1) for count in counts) - first
    trace_squared = sum(6 * count - 8 for count in counts) - 2 * second + first**2
    mean = trace / freedom
    variance = 2 * (freedom * trace_squared - trace**2) / (freedom**2 * (freedom + 2))
    return steps < (mean - LEVEL * math.sqrt(variance)) * squares
