"""The jobs of a budget, one per sequence, the parts they find, and how parts add up.

A part (one format at one sequence) is a record with all its products, from which a resumed run, a
merged study and the report add up the same budget. Its numbers are also rows of the study, for
exports: the probe is "budget: FORMAT" or "observed error: FORMAT", the kind says what is rounded
and where, the norm is the metric. A worst case is a record and a row of its own, at the first
sequence.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.probes.budget.formats import Format
from lipscope.probes.budget.metrics import Interval, Metric, of_squares, of_sums, read_metric
from lipscope.probes.budget.result import BudgetRow, ErrorBudget
from lipscope.probes.budget.sites import ErrorSite
from lipscope.probes.budget.subject import Subject
from lipscope.study.jobs import WHOLE_MODEL
from lipscope.study.probe import NUMERIC_VERSION, config_digest
from lipscope.study.records import (
    BUDGET,
    OBSERVED,
    WORST_CASE,
    Fingerprint,
    Row,
    StudyHeader,
)
from lipscope.study.run import describe
from lipscope.study.store import Kept, Store
from lipscope.study.study import Study

if TYPE_CHECKING:
    from lipscope.probes.budget.comparing import Tolerance


class BudgetJob(NamedTuple):
    """Some formats at sequence b of n tokens; with `worst`, their worst cases there."""

    b: int
    n: int
    formats: tuple[str, ...]
    worst: bool = False
    weight: float = 1.0
    fatal: bool = True

    @property
    def place(self) -> str:
        """The name that decides which shard the job belongs to."""
        return f"budget {self.b} {self.worst}"

    @property
    def group(self) -> tuple[int, bool]:
        return self.b, self.worst


@dataclass(frozen=True)
class Settings:
    """What decides the numbers of a budget, besides model, sequence and format."""

    metric: str
    probes: int
    embeddings: bool
    observe: bool
    seed: int

    def key(self, b: int, n: int, format: str) -> str:
        """The key of a part in the study."""
        return json.dumps([*asdict(self).values(), b, n, format])


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
    columns = []
    for part in parts:
        own = dict(zip(part.sites, part.q.T, strict=True))
        # A sequence may lack a site: an operation that happened to be exact there.
        nothing = torch.zeros(len(part.q), dtype=part.q.dtype)
        columns.append(torch.stack([own.get(site, nothing) for site in sites], dim=-1))
    q = torch.stack(columns, dim=1)  # [K, sequences, sites]
    size = sum(part.size for part in parts)
    summed = parts[0].summed
    means = (q if summed else q.square()).mean(dim=0).sum(dim=0)
    shares = means / means.sum().clamp_min(torch.finfo(q.dtype).tiny)

    def interval(t: Tensor) -> Interval:
        found = of_sums(torch.zeros_like(t), t) if summed else of_squares(t)
        return metric.interval(found, size)

    rows = []
    for i, site in enumerate(sites):
        value, low, high = interval(q[..., i])
        rows.append(
            BudgetRow(
                site=site.name,
                layer=site.layer,
                head=site.head,
                kind=site.kind,
                format=format,
                predicted=value,
                low=low,
                high=high,
                observed=None,
                share=float(shares[i]),
            )
        )
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


def part_rows(subject: Subject, format: str, part: Part, b: int, metric: Metric) -> list[Row]:
    """The numbers of one format at one sequence."""
    found = add_up(format, [part], metric)
    row = partial(budget_row, subject, format, part.n, b, metric.name)
    rows = [
        row(BUDGET, f"{r.kind}: {r.site}", (r.predicted, r.low, r.high), r.layer, r.head)
        for r in found.rows
    ]
    second = {} if part.curved is None else {"second_order": found.second_order}
    rows.append(row(BUDGET, "total", found.total, extra=second))
    if found.observed is not None:
        rows.append(row(OBSERVED, "total", (found.observed,) * 3))
    return rows


def budget_row(
    subject: Subject,
    format: str,
    n: int,
    b: int,
    metric: str,
    probe: str,
    kind: str,
    interval: tuple[float, float, float],
    layer: int | None = None,
    head: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Row:
    """A number about a format at sequence b of n tokens."""
    value, low, high = interval
    known = not math.isnan(value)
    return Row(
        probe=f"{probe}: {format}",
        scope=WHOLE_MODEL,
        layer=layer,
        head=head,
        n=n,
        sample=b,
        kind=kind,
        norm=metric,
        value=value,
        lower=low if known else 0.0,
        upper=high if known else math.inf,
        residual=math.nan,
        status=("observed" if probe == OBSERVED else "predicted") if known else "non_finite",
        radius=math.nan,
        dtype=str(subject.dtype).removeprefix("torch."),
        device=next(subject.module.parameters()).device.type,
        seconds=math.nan,
        extra={"format": format, **(extra or {})},
    )


def assemble(
    model: str,
    settings: Settings,
    parts: Mapping[str, Sequence[Part]],
    metric: Metric,
    worst: dict[str, float],
    tolerance: Callable[[int, str], Tolerance],
) -> ErrorBudget:
    """The budget of all formats from their parts."""
    found = {name: add_up(name, some, metric) for name, some in parts.items()}
    first: Sequence[Part] = next(iter(parts.values()), ())
    return ErrorBudget(
        model=model,
        metric=settings.metric,
        rows=[row for one in found.values() for row in one.rows],
        totals={name: one.total for name, one in found.items()},
        observed={n: one.observed for n, one in found.items() if one.observed is not None},
        worst=worst,
        second_order={name: one.second_order for name, one in found.items()},
        sequences=len(first),
        tokens=sum(part.n for part in first),
        probes=settings.probes,
        _tolerance=tolerance,
    )


def stored_parts(store: Store | Kept) -> dict[Settings, dict[str, dict[int, Part]]]:
    """The parts in a study, by settings, format and sequence."""
    found: dict[Settings, dict[str, dict[int, Part]]] = {}
    for key, text in store.records(BUDGET):
        *values, b, _, format = json.loads(key)
        parts = found.setdefault(Settings(*values), {})
        parts.setdefault(format, {})[b] = Part.from_json(json.loads(text))
    return found


def stored_worst(store: Store | Kept, metric: str) -> dict[str, float]:
    """The worst cases in a study, by format."""
    every = ((*json.loads(key), json.loads(value)) for key, value in store.records(WORST_CASE))
    return {format: value for its, format, value in every if its == metric}


def stored_budgets(study: Study) -> list[ErrorBudget]:
    """The budgets of a study, one per metric and settings; of the sequences that are done."""
    found = []
    for settings, formats in stored_parts(study.store).items():
        # Formats that were added later may not have all sequences yet.
        most = max(len(parts) for parts in formats.values())
        whole = {
            name: [part for _, part in sorted(parts.items())]
            for name, parts in formats.items()
            if len(parts) == most
        }
        metric = read_metric(settings.metric)
        known = stored_worst(study.store, settings.metric)
        worst = {name: known[name] for name in whole if name in known}
        model = study.info.about.model
        found.append(assemble(model, settings, whole, metric, worst, _no_tolerance))
    return found


def _no_tolerance(state: int, format: str) -> Tolerance:
    raise UserError(
        "a budget read from a study has no model to compute tolerances from; call error_budget"
    )


def budget_header(subject: Subject, seed: int, line: str) -> StudyHeader:
    """Identity and description of a study of budgets; raises UserError if the model has none."""
    model = subject.model
    if model is None:
        raise UserError(
            f"{subject.name} is not a transformers model, so a study or a worker cannot tell it "
            "from others; omit out and workers"
        )
    contents = [
        ids.tolist()
        if isinstance(ids, Tensor)
        else {name: x.tolist() for name, x in sorted(ids.arguments.items())}
        for ids in subject.sequences
    ]
    identity = Fingerprint(
        weights=model.card.weights,
        config=config_digest(model),
        revision=model.card.revision or "",
        tokenizer=model.card.tokenizer or "",
        text=hashlib.sha256(repr(contents).encode()).hexdigest(),
        special_tokens=False,
        dtype=str(subject.dtype).removeprefix("torch."),
        mask="the model's own; nothing is padded",
        tol=0.0,
        seed=seed,
        numeric_version=NUMERIC_VERSION,
    )
    text = f"{len(subject.sequences)} sequences"
    return StudyHeader(identity, describe(model, text, subject.tokens, line, {}))
