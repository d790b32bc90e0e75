"""The jobs of a budget, one per sequence, and what a study keeps of them.

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
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lipscope._types import UserError
from lipscope.probes.budget.metrics import Metric, read_metric
from lipscope.probes.budget.parts import Part, add_up
from lipscope.probes.budget.result import ErrorBudget
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

    def seed_of(self, b: int) -> int:
        """A seed of its own for every sequence, so that runs can resume at any of them."""
        name = f"lipscope budget {self.seed} {b}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")

    def key(self, b: int, n: int, format: str) -> str:
        """The key of a part in the study."""
        return json.dumps([*asdict(self).values(), b, n, format])


def part_record(settings: Settings, b: int, format: str, part: Part) -> tuple[str, str, str]:
    """What a study keeps of one format at one sequence."""
    return BUDGET, settings.key(b, part.n, format), json.dumps(part.as_json())


def worst_record(metric: str, format: str, value: float) -> tuple[str, str, str]:
    """What a study keeps of a worst case."""
    return WORST_CASE, json.dumps([metric, format]), json.dumps(value)


def part_rows(subject: Subject, format: str, part: Part, b: int, metric: Metric) -> list[Row]:
    """The numbers of one format at one sequence."""
    found = add_up(format, [part], metric)
    place = _RowMaker(subject, format, part.n, b, metric.name)
    rows = [
        place.row(BUDGET, f"{r.kind}: {r.site}", (r.predicted, r.low, r.high), r.layer, r.head)
        for r in found.rows
    ]
    total = (found.total.value, found.total.low, found.total.high)
    second = {} if part.curved is None else {"second_order": found.second_order}
    rows.append(place.row(BUDGET, "total", total, extra=second))
    if found.observed is not None:
        rows.append(place.row(OBSERVED, "total", (found.observed,) * 3))
    return rows


def worst_row(subject: Subject, format: str, n: int, metric: str, value: float) -> Row:
    """The worst case of a format, at the first sequence."""
    return _RowMaker(subject, format, n, 0, metric).row(WORST_CASE, "total", (value,) * 3)


class _RowMaker(NamedTuple):
    """What the rows of one format at one sequence share."""

    subject: Subject
    format: str
    n: int
    b: int
    metric: str

    def row(
        self,
        probe: str,
        kind: str,
        interval: tuple[float, float, float],
        layer: int | None = None,
        head: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Row:
        value, low, high = interval
        known = not math.isnan(value)
        return Row(
            probe=f"{probe}: {self.format}",
            scope=WHOLE_MODEL,
            layer=layer,
            head=head,
            n=self.n,
            sample=self.b,
            kind=kind,
            norm=self.metric,
            value=value,
            lower=low if known else 0.0,
            upper=high if known else math.inf,
            residual=math.nan,
            status=("observed" if probe == OBSERVED else "predicted") if known else "non_finite",
            radius=math.nan,
            dtype=str(self.subject.dtype).removeprefix("torch."),
            device=next(self.subject.module.parameters()).device.type,
            seconds=math.nan,
            extra={"format": self.format, **(extra or {})},
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
