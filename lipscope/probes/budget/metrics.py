"""What counts as error: a distance between two outputs, its probes, and intervals.

A metric is, to first order, a quadratic form dy' M dy in the change dy of what it reads from the
output. Probes v are Gaussian of mean zero and covariance M, so that E <v, dy>^2 = dy' M dy and
<v, dy> is exactly normal. M is the identity for the squared norm. For the divergence of the next
token's distribution p, KL(p, q) = 1/2 dz' (diag p - p p') dz + O(dz^3) in the logits z, and
v = sqrt(p) u - p <sqrt(p), u> with standard normal u has the covariance diag p - p p'. The vectors
e_y - p with y drawn from p have the same covariance, with heavier tails.

The mean of K squares is |dy|^2 chi^2_K / K, and the interval from the quantiles of chi^2_K is
exact. Several sequences add up squares of different sizes w_b: a weighted sum of chi^2, which
Satterthwaite's rule replaces by the chi^2 of the same mean and variance,

    sum_b w_b chi^2_K / K  ~  W chi^2_nu / nu,   W = sum_b w_b,   nu = K W^2 / sum_b w_b^2.

The w_b are estimates themselves, and with few probes a dominant one may look like the others. But
nu is at least K, whatever the w_b: up to FEW probes the interval is that of chi^2_K, from MANY on
that of nu, and in between nu moves from one to the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from scipy.special import chdtri, fdtri, stdtrit
from torch import Tensor

from lipscope._checks import abbreviate, check_positive
from lipscope._types import UserError
from lipscope.probes.budget.subject import last_hidden

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
    freedom = K + known * (freedom - K)
    # The estimate is distributed like chi^2 / nu.
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
            f"probes must be a whole number up to {MOST_PROBES}, got {abbreviate(probes)}: "
            "each is a backward pass, and as many give a total to 1 % already"
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


Measure = str | Callable[[Any], Tensor]


@dataclass(frozen=True)
class Metric:
    """A distance between the outputs of two runs.

    read:       the tensor y that matters, from the output of the model
    divergence: whether y are logits and the distance is their KL divergence; otherwise it is the
                norm of the difference, relative to the norm of y
    """

    name: str
    read: Callable[[Any], Tensor]
    divergence: bool = False

    @property
    def head(self) -> bool:
        """Whether the outputs of the task head are needed."""
        return self.read is not last_hidden

    def probe(self, y: Tensor, generator: torch.Generator) -> Tensor:
        """A random v in the shape of y; drawn on the CPU, so that a seed is portable."""
        u = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)
        if not self.divergence:
            return u
        root = y.detach().softmax(dim=-1).sqrt()
        return root * (u - root * (root * u).sum(dim=-1, keepdim=True))

    def squared(self, y: Tensor, other: Tensor) -> float:
        """The distance of two outputs, as a quantity that adds up over sequences.

        Twice the divergence, or the squared norm: what E <v, dy>^2 predicts.
        """
        y = y.detach().double()
        other = other.detach().double()
        if not self.divergence:
            return float((other - y).square().sum())
        p = y.log_softmax(dim=-1)
        q = other.log_softmax(dim=-1)
        return 2 * float((p.exp() * (p - q)).sum())

    def size(self, y: Tensor) -> float:
        """What the distance of a sequence is relative to: the squared norm, or the tokens."""
        return y.shape[:-1].numel() if self.divergence else float(y.double().square().sum())

    def value(self, squared: float, size: float) -> float:
        """The reported number: nats per token, or a relative error."""
        if not size:
            return 0.0
        return squared / 2 / size if self.divergence else (squared / size) ** 0.5

    def limit(self, y: Tensor) -> float:
        """A distance that no small change reaches: that from y to nothing at all."""
        return math.log(max(y.shape[-1], 2)) if self.divergence else 1.0

    def interval(self, squared: Interval, size: float) -> Interval:
        return Interval(*(self.value(part, size) for part in squared))


def read_metric(wanted: Measure) -> Metric:
    """The metric with this name, or the norm of what a function reads from the output."""
    if callable(wanted):
        return Metric(getattr(wanted, "__name__", "metric"), _checked(wanted))
    if wanted == "output":
        return Metric("output", last_hidden)
    if wanted == "kl":
        return Metric("kl", _logits, divergence=True)
    raise UserError(
        f"metric must be 'output', 'kl' or a function of the model's output, got {wanted!r}"
    )


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "logits", None)
    if found is None:
        raise UserError(
            f"metric 'kl' needs logits, and {type(output).__name__} has none; pass a model with a "
            "language-model head, or use metric='output'"
        )
    return found


def _checked(own: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    def read(output: Any) -> Tensor:
        y = own(output)
        if not isinstance(y, Tensor) or not y.is_floating_point():
            raise UserError(
                "a metric must return a floating-point tensor that depends on the output, "
                f"got {type(y).__name__}"
            )
        return y

    return read
