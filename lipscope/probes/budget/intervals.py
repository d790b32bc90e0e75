"""Intervals for sums of squares that are estimated by probes.

With a Gaussian probe v of identity covariance, <v, dy> is normal with variance |dy|^2, so the mean
of K squares is |dy|^2 chi^2_K / K, and the interval from the quantiles of chi^2_K is exact. Several
sequences add up squares of different sizes w_b: a weighted sum of chi^2, which Satterthwaite's rule
replaces by the chi^2 of the same mean and variance,

    sum_b w_b chi^2_K / K  ~  W chi^2_nu / nu,   W = sum_b w_b,   nu = K W^2 / sum_b w_b^2.

The w_b are estimates themselves, and with few probes a dominant one may look like the others. But
nu is at least K, whatever the w_b: up to FEW probes the interval is that of chi^2_K, from MANY on
that of nu, and in between nu moves from one to the other.
"""

from __future__ import annotations

from typing import NamedTuple

from scipy.special import chdtri, fdtri, stdtrit
from torch import Tensor

from lipscope._checks import abbreviate, check_positive
from lipscope._types import UserError

MOST_PROBES = 10_000
"""The relative standard error of a total is then 1 / sqrt(2 probes), 0.7 %."""

LEVEL = 0.95
FEW = 8
MANY = 16


class Interval(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


def of_squares(t: Tensor) -> Interval:
    """Interval for sum_b w_b, given t [K, B] with t_kb normal of mean 0 and variance w_b."""
    return of_sums(t.square(), None)


def of_sums(squares: Tensor, spread: Tensor | None) -> Interval:
    """Interval for the expectation of sum_b (squares_b + spread_b), both [K, B].

    Args:
        squares: Squares of normal variables.
        spread: Sums of many squares of different sizes, whose variance is estimated.
    """
    K = len(squares)
    w = squares.mean(dim=0)
    value = float(w.sum())
    # E w_b^2 is (1 + 2 / K) times the square of what w_b estimates.
    variance = 2 * float((w.square() / (1 + 2 / K)).sum()) / K
    if spread is not None:
        value += float(spread.mean(dim=0).sum())
        variance += _variance_of_mean(spread)
    if value == 0 or variance == 0:
        return Interval(value, value, value)
    # The square of the estimate exceeds the square of its mean by its variance, on average; without
    # the difference one sequence would get K + 2 degrees of freedom for its K squares.
    freedom = 2 * max(value**2 - variance, value**2 / 3) / variance
    known = min(max((K - FEW) / (MANY - FEW), 0.0), 1.0)
    return around(value, K + known * (freedom - K))


def around(value: float, freedom: float) -> Interval:
    """The interval of an estimate that is distributed like chi^2 / nu."""
    tail = (1 - LEVEL) / 2
    return Interval(
        value,
        value * freedom / float(chdtri(freedom, tail)),
        value * freedom / float(chdtri(freedom, 1 - tail)),
    )


def degrees_of_freedom(q: Tensor) -> float:
    """nu such that q [K, B], summed over b, varies at most like a multiple of chi^2_nu.

    On the side of caution twice. Rounded weights are the same in all sequences, so standard
    deviations are added, not variances. And the variance is known from few probes only: the bound
    is the one that its estimate stays below with a confidence of 90 %.
    """
    K, B = q.shape
    mean = float(q.mean(dim=0).sum())
    deviation = float(q.std(dim=0).sum())
    samples = B * (K - 1)
    variance = deviation**2 * samples / float(chdtri(samples, 0.9))
    return 2 * mean**2 / variance if variance > 0 else float("inf")


def check_probes(probes: int, least: int) -> None:
    """Raise UserError unless `probes` is a number of backward passes that makes sense."""
    check_positive("probes", probes)
    if probes < least:
        raise UserError(f"probes must be at least {least}, one probe has no interval")
    if not isinstance(probes, int) or probes > MOST_PROBES:
        raise UserError(
            f"probes must be a whole number up to {MOST_PROBES}, got {abbreviate(probes)}: each "
            "is a "
            "backward pass, and as many give a total to 1 % already"
        )


def largest_ratio(freedom: float, probes: int, level: float) -> float:
    """What |error|^2 / estimate exceeds with probability 1 - level, when both are chi^2 / nu."""
    freedom = min(freedom, 1e9)
    return float(fdtri(freedom, freedom * probes, level))


def _variance_of_mean(q: Tensor) -> float:
    """Variance of the mean over probes, enlarged so that normal quantiles hold for few probes."""
    K, B = q.shape
    quantile = (1 + LEVEL) / 2
    students = float(stdtrit(B * (K - 1), quantile)) / float(stdtrit(1e9, quantile))
    return float(q.var(dim=0).sum()) / K * students**2
