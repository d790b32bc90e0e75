"""A number with its certificate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Numbers = Any
"""A float for a single operator, a float64 vector of length B for a batch."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """The largest singular value of an operator, and how well it is known.

    value:      ||J right|| / ||right||, evaluated.
    lower:      value less its rounding: what the operator states, what was seen in float64 (float32 and half
                precision), or what repeating the map showed (maps that only autograd knows). At most the largest
                singular value as long as that rounding is not exceeded; chance plays no part in it.
    upper:      at least the largest singular value with probability `confidence` over the random start (jointly for a
                batch), provided that the input was not chosen with knowledge of the seed, that every product is within
                four times the error seen, and that the rounding is not exceeded; infinity with confidence 0 where no
                such bound is available: `note` says why.
    residual:   ||J' left - value right|| / value, as the recurrence has it, plus the rounding seen in the products.
    missed:     why a gap asked for was not reached; empty where it was, or none was asked for. `note` of a single
                operator ends with it.
    left, right: unit singular vectors in the operator's own shapes.

    A single operator gives floats, one Status and one `missed`; a batch gives float64 vectors of length B and tuples.
    """

    value: Numbers
    lower: Numbers
    upper: Numbers
    residual: Numbers
    steps: Numbers
    status: Any  # Status, or a tuple of them
    left: Tensor
    right: Tensor
    confidence: float
    note: str
    missed: Any = ""  # str, or a tuple of them

    def __len__(self) -> int:
        return len(self.status) if isinstance(self.status, tuple) else 1

    def __getitem__(self, i: int) -> Estimate:
        """Member i of a batch."""
        if not isinstance(self.status, tuple):
            raise TypeError("this Estimate is of a single operator; there is nothing to index")
        numbers = (self.value, self.lower, self.upper, self.residual, self.steps)
        value, lower, upper, residual, steps = (x[i].item() for x in numbers)
        missed = self.missed[i] if self.missed else ""
        return Estimate(
            value,
            lower,
            upper,
            residual,
            int(steps),
            self.status[i],
            self.left[i],
            self.right[i],
            self.confidence,
            f"{self.note}; {missed}" if missed else self.note,
            missed,
        )

    def _repr_html_(self) -> str:
        """A table for notebooks: a line per member."""
        members = (
            [self] if not isinstance(self.status, tuple) else [self[i] for i in range(len(self))]
        )
        head = "".join(
            f"<th>{name}</th>" for name in ("σ", "lower", "upper", "residual", "steps", "status")
        )
        lines = "".join(
            f"<tr><td>{e.value:.10g}</td><td>{e.lower:.10g}</td><td>{e.upper:.10g}</td>"
            f"<td>{e.residual:.1e}</td><td>{e.steps}</td><td>{e.status.name.lower()}</td></tr>"
            for e in members
        )
        return (
            f"<table><caption>upper bounds at confidence {self.confidence:.10g}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
        )

    def __repr__(self) -> str:
        if isinstance(self.status, tuple):
            return f"Estimate(batch of {len(self)}, value={self.value})"
        return (
            f"Estimate({self.value:.10g}, in [{self.lower:.10g}, {self.upper:.10g}] "
            f"at confidence {self.confidence:.10g}, "
            f"residual {self.residual:.1e}, {self.steps} steps, {self.status.name.lower()})"
        )
