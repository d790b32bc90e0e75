"""The budget of one sequence: what is computed and stored as a whole, and how parts add up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.probes.budget.formats import Format
from lipscope.probes.budget.metrics import Interval, Metric, of_squares, of_sums
from lipscope.probes.budget.result import BudgetRow
from lipscope.probes.budget.sites import ErrorSite


@dataclass(frozen=True, eq=False)
class Part:
    """One format at one sequence.

    q:        [K, sites]: the products <g, e> of every probe, or for a run in a dtype the sums of
              g_i^2 e_i^2 over its roundings
    summed:   whether q holds such sums
    curved:   the square of the error that is not linear in the rounding, and of the whole error;
              None where it was not measured
    observed: the squared error of a real run, if there was one
    size:     what squared errors are relative to
    n:        the number of tokens
    """

    sites: list[ErrorSite]
    q: Tensor
    summed: bool
    curved: tuple[float, float] | None
    observed: float | None
    size: float
    n: int

    def as_json(self) -> dict[str, Any]:
        """The part as plain values, with all digits."""
        sites = [list(asdict(site).values()) for site in self.sites]
        return {**vars(self), "sites": sites, "q": self.q.tolist()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Part:
        """The part that `as_json` wrote."""
        return Part(
            sites=[ErrorSite(*site) for site in data["sites"]],
            q=torch.tensor(data["q"], dtype=torch.float64).reshape(
                len(data["q"]), len(data["sites"])
            ),
            summed=bool(data["summed"]),
            curved=None if data["curved"] is None else (data["curved"][0], data["curved"][1]),
            observed=data["observed"],
            size=float(data["size"]),
            n=int(data["n"]),
        )


@dataclass(frozen=True)
class FormatBudget:
    """A format at several sequences: rows per site, the total, and what goes with it."""

    rows: list[BudgetRow]
    total: Interval
    second_order: float
    observed: float | None


def add_up(format: str, parts: Sequence[Part], metric: Metric) -> FormatBudget:
    """The budget of a format, errors of different sites added with their signs."""
    sites = list(dict.fromkeys(site for part in parts for site in part.sites))
    # A sequence may lack a site: an operation that happened to be exact there.
    q = torch.stack([_spread(part, sites) for part in parts], dim=1)  # [K, sequences, sites]
    size = sum(part.size for part in parts)
    summed = parts[0].summed
    means = (q if summed else q.square()).mean(dim=0).sum(dim=0)
    shares = means / means.sum().clamp_min(torch.finfo(q.dtype).tiny)

    def interval(t: Tensor) -> Interval:
        found = of_sums(torch.zeros_like(t), t) if summed else of_squares(t)
        return metric.interval(found, size)

    rows = [
        row_of(site, format, interval(q[..., i]), share=float(shares[i]))
        for i, site in enumerate(sites)
    ]
    curved = [part.curved for part in parts if part.curved is not None]
    missed, made = (sum(pair[i] for pair in curved) for i in (0, 1))
    seen = [part.observed for part in parts if part.observed is not None]
    return FormatBudget(
        rows=rows,
        total=interval(q.sum(dim=-1)),
        second_order=(missed / made) ** 0.5 if made else 0.0,
        observed=metric.value(sum(seen), size) if len(seen) == len(parts) else None,
    )


FINE = 1 / 128
"""Formats of this step and finer change an output by a small part of it; coarser ones may not."""


def check_possible(format: Format, part: Part, metric: Metric, limit: float) -> None:
    """Raise UserError for a prediction that is not a number, or more than the format can do."""
    found = add_up(format.name, [part], metric)
    if found.total.value <= (limit if format.step <= FINE else math.inf):
        return
    # NaN fails every comparison: a site without a number comes first.
    worst = max(found.rows, key=lambda row: (not math.isfinite(row.predicted), row.predicted))
    raise UserError(impossible(format.name, found.total.value, worst.site))


def impossible(format: str, value: float, site: str) -> str:
    """What to say about a prediction that cannot be right."""
    return (
        f"the predicted error in {format} is {value:.1e}, which rounding cannot explain; most of "
        f"it comes from {site}, which this budget cannot follow or where the model loses all its "
        f"digits; leave {format} out"
    )


def row_of(site: ErrorSite, format: str, interval: Interval, share: float) -> BudgetRow:
    """The row of a site, or of all sites together."""
    return BudgetRow(
        site=site.name,
        layer=site.layer,
        head=site.head,
        kind=site.kind,
        format=format,
        predicted=interval.value,
        low=interval.low,
        high=interval.high,
        observed=None,
        share=share,
    )


def _spread(part: Part, sites: list[ErrorSite]) -> Tensor:
    """q with a column for each of these sites."""
    columns = dict(zip(part.sites, part.q.T, strict=True))
    nothing = torch.zeros(len(part.q), dtype=part.q.dtype)
    return torch.stack([columns.get(site, nothing) for site in sites], dim=-1)
