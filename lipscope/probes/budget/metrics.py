"""What counts as error: a distance between two outputs, and the probes whose products measure it.

A metric is, to first order, a quadratic form dy' M dy in the change dy of what it reads from the
output. Probes v are Gaussian of mean zero and covariance M, so that E <v, dy>^2 = dy' M dy and
<v, dy> is exactly normal. M is the identity for the squared norm. For the divergence of the next
token's distribution p, KL(p, q) = 1/2 dz' (diag p - p p') dz + O(dz^3) in the logits z, and
v = sqrt(p) u - p <sqrt(p), u> with standard normal u has the covariance diag p - p p'. The vectors
e_y - p with y drawn from p have the same covariance, with heavier tails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.probes.budget.intervals import Interval
from lipscope.probes.budget.subject import last_hidden

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
