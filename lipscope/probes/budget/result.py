"""The result of a budget: predicted errors by site and format, with intervals."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lipscope._files import for_spreadsheet, whole_file
from lipscope._types import UserError
from lipscope.probes.budget.metrics import Interval
from lipscope.study.records import data_frame

if TYPE_CHECKING:
    import pandas as pd

    from lipscope.probes.budget.comparing import Tolerance

LINEAR = 0.5
"""Second-order share of an error above which a linear prediction is not to be trusted."""


OF_THE_RUN = ("decision", "repeat")
"""Kinds of errors that belong to a run as a whole, not to a module or an operation."""


class BudgetRow(NamedTuple):
    """The error that one site causes at the output in one format."""

    site: str
    layer: int | None
    head: int | None
    kind: str
    format: str
    predicted: float
    low: float
    high: float
    observed: float | None
    share: float


@dataclass(frozen=True, eq=False)
class ErrorBudget:
    """Predicted errors of a model in several formats, as returned by :func:`error_budget`.

    Attributes:
        model: Name of the model.
        metric: What the errors are: "output" is relative to the output, "kl" in nats per token.
        rows: One row per format and site.
        observed: By format, the error of a real run, if it was asked for.
        worst: By format, an upper bound of the error to first order, if it was asked for: the sum
            over all sites of an upper bound of sigma of what follows times the norm of the error,
            at the first sequence. Each bound holds with the confidence of :func:`spectral_norm`,
            if products with the derivative are as accurate as float64 makes them.
        second_order: By format, the norm of the part of the error that is not linear, relative to
            the error. A large share means that the prediction is not to be trusted.
        sequences: Number of sequences.
        tokens: Number of tokens of all sequences.
        probes: Backward passes per sequence.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> layer = torch.nn.Sequential(torch.nn.Embedding(9, 16), torch.nn.Linear(16, 4))
        >>> budget = ls.error_budget(layer, torch.arange(9), formats="int8,int4:8")
        >>> budget.total("int4:8").value > budget.total("int8").value
        True
        >>> [(row.site, row.kind, row.share) for row in budget.rows if row.format == "int8"]
        [('1', 'weight', 1.0)]
    """

    model: str
    metric: str
    rows: list[BudgetRow]
    totals: dict[str, Interval]
    observed: dict[str, float]
    worst: dict[str, float]
    second_order: dict[str, float]
    sequences: int
    tokens: int
    probes: int
    _tolerance: Callable[[int, str], Tolerance]

    @property
    def formats(self) -> list[str]:
        """The names of the formats."""
        return list(self.totals)

    def total(self, format: str) -> Interval:
        """The predicted error of the whole model, with its 95 % interval (value, low, high)."""
        self._check(format)
        return self.totals[format]

    def tolerance(self, state: int, format: str) -> Tolerance:
        """`atol` and `rtol` for `torch.testing.assert_close` at a hidden state.

        Args:
            state: Index of the hidden state: 0 for the embeddings, l + 1 for the output of layer l,
                -1 for the last one, after the final norm.
            format: bf16, fp16 or fp32.
        """
        return self._tolerance(state, format)

    def warnings(self) -> list[str]:
        """A sentence for every format whose prediction is not to be trusted."""
        bent = [
            f"{name}: {share:.0%} of the error is not linear in the rounding, so its prediction "
            "may be far off; run the format (observe=True)"
            for name, share in self.second_order.items()
            if share > LINEAR or math.isnan(share)
        ]
        repeated = [
            f"{row.format}: {row.share:.0%} of the squared error comes from equal roundings that "
            "add up, as seen in one run; another correct run may differ"
            for row in self.rows
            if row.kind == "repeat"
        ]
        return bent + repeated

    def shares(self, format: str, by: str = "layer") -> dict[Any, float]:
        """The shares of a format's squared error, added up by "layer", "head" or "kind"."""
        self._check(format)
        if by not in ("layer", "head", "kind"):
            raise UserError(f"shares are by layer, head or kind, got {by!r}")
        found: dict[Any, float] = {}
        for row in self.rows:
            if row.format == format:
                key = (row.layer, row.head) if by == "head" else getattr(row, by)
                found[key] = found.get(key, 0.0) + row.share
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def keep_high(self, format: str, share: float = 0.5) -> list[str]:
        """The fewest sites that together make this share of the squared error of all sites.

        Decisions taken otherwise and equal roundings that add up belong to the whole run; they
        cannot be kept in high precision, and are left out.
        """
        self._check(format)
        chosen: list[str] = []
        reached = 0.0
        rows = [r for r in self.rows if r.format == format and r.kind not in OF_THE_RUN]
        whole = sum(row.share for row in rows)
        for row in sorted(rows, key=lambda row: -row.share):
            if reached >= share * whole:
                break
            chosen.append(row.site if row.head is None else f"{row.site}, head {row.head}")
            reached += row.share
        return chosen

    def to_dataframe(self) -> pd.DataFrame:
        """The rows as a pandas DataFrame; the total of each format is a row of kind "total"."""
        return data_frame(self.records(), BudgetRow._fields).astype({"observed": "float64"})

    def records(self) -> list[BudgetRow]:
        """All rows, then the total of each format with its observed error."""
        totals = [
            BudgetRow(
                site="total",
                layer=None,
                head=None,
                kind="total",
                format=name,
                predicted=total.value,
                low=total.low,
                high=total.high,
                observed=self.observed.get(name),
                share=1.0,
            )
            for name, total in self.totals.items()
        ]
        return [*self.rows, *totals]

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write all rows as CSV."""
        with (
            whole_file(Path(path), typed=True) as place,
            open(place, "w", newline="", encoding="utf-8") as f,
        ):
            writer = csv.writer(f, lineterminator="\n")
            writer.writerow(BudgetRow._fields)
            writer.writerows(
                [for_spreadsheet(x) if isinstance(x, str) else x for x in row]
                for row in self.records()
            )

    def as_dict(self) -> dict[str, Any]:
        """All rows and what they belong to, as plain values."""
        return {
            "model": self.model,
            "metric": self.metric,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "probes": self.probes,
            "second_order": self.second_order,
            "worst": self.worst,
            "rows": [row._asdict() for row in self.records()],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write all rows and what they belong to as JSON."""
        with whole_file(Path(path), typed=True) as place:
            place.write_text(json.dumps(self.as_dict(), indent=1), encoding="utf-8")

    def plot(self, ax: Any = None) -> Any:
        """Plot the error of each layer in each format; returns matplotlib Axes."""
        from lipscope.report.budgets import layer_errors

        return layer_errors(self, ax)

    def __repr__(self) -> str:
        unit = " nats per token" if self.metric == "kl" else ""
        lines = [
            f"{name}: {t.value:.3g} [{t.low:.3g}, {t.high:.3g}]{unit}"
            + (f", observed {self.observed[name]:.3g}" if name in self.observed else "")
            for name, t in self.totals.items()
        ]
        return f"ErrorBudget of {self.model} ({self.metric}): " + "; ".join(lines)

    def _repr_html_(self) -> str:
        from lipscope.report.budgets import budget_table
        from lipscope.report.study_table import terminal_html

        return terminal_html(budget_table(self))

    def _check(self, format: str) -> None:
        if format not in self.totals:
            raise UserError(
                f"this budget has no format {format!r}; it has {', '.join(self.totals)}"
            )
