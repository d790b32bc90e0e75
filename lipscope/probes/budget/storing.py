"""Budgets in a study: one job per sequence, stored with everything that its numbers need.

A part (one format at one sequence) is a record with all its products, from which a resumed run and
the report add up the same budget. Its numbers are also rows of the study, for exports: the probe is
"budget" or "observed error", the scope is the format, the kind says what is rounded and where, the
norm is the metric, and `residual` is the second-order share of a total. A worst case is a record
and a row of its own, at the first sequence.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lipscope import __version__
from lipscope._types import UserError
from lipscope.probes.budget.formats import Format
from lipscope.probes.budget.metrics import Metric, read_metric
from lipscope.probes.budget.parts import Part, add_up
from lipscope.probes.budget.result import ErrorBudget
from lipscope.probes.budget.subject import Subject, Text, length_of
from lipscope.study.jobs import Command, Request
from lipscope.study.reading import text_option
from lipscope.study.records import (
    BUDGET,
    OBSERVED,
    WORST_CASE,
    About,
    Identity,
    Row,
    StudyInfo,
)
from lipscope.study.store import Store
from lipscope.study.study import Study
from lipscope.study.work import NUMERIC_VERSION, config_digest

if TYPE_CHECKING:
    from lipscope.probes.budget.comparing import Tolerance


Value = tuple[str, int | None, int | None, str, tuple[float, float, float], float]
"""What a row holds besides its format and place: probe, layer, head, kind, interval, residual."""


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


class BudgetStore:
    """The study that a budget is saved in."""

    def __init__(self, directory: Path, subject: Subject, seed: int, command: str) -> None:
        self._subject = subject
        # A budget has no jobs by layer and length; its line is noted, each different one once.
        empty = Request(groups=(), layers=(), heads={}, scopes=())
        made = Command(verb="budget", line=command, asked=empty, probe_prefix=f"{BUDGET} {command}")
        self._store = Store.create(directory, _info(subject, seed, command), made)

    def close(self) -> None:
        """Close the study and release its lock."""
        self._store.close()

    def parts(
        self, settings: Settings, b: int, n: int, formats: Sequence[Format]
    ) -> dict[str, Part]:
        """The stored parts of sequence b."""
        found = {f.name: self._store.get(BUDGET, settings.key(b, n, f.name)) for f in formats}
        return {
            name: Part.from_json(json.loads(text))
            for name, text in found.items()
            if text is not None
        }

    def write(
        self,
        settings: Settings,
        b: int,
        parts: Mapping[str, Part],
        metric: Metric,
        seconds: float,
    ) -> None:
        """Store the parts of sequence b; on disk when it returns."""
        rows = [row for f, part in parts.items() for row in self._rows(f, part, b, metric)]
        self._store.write(row._replace(seconds=seconds / len(rows)) for row in rows)
        # Last: a part is there only if its rows are.
        self._store.put_all(
            (BUDGET, settings.key(b, part.n, f), json.dumps(part.as_json()))
            for f, part in parts.items()
        )

    def worst(self, metric: str) -> dict[str, float]:
        """The stored worst cases of a metric, by format."""
        return _stored_worst(self._store, metric)

    def write_worst(self, metric: str, found: Mapping[str, float]) -> None:
        """Store the worst cases of some formats; on disk when it returns."""
        n = length_of(self._subject.sequences[0])
        for f, value in found.items():
            total = (WORST_CASE, None, None, "total", (value,) * 3, math.nan)
            self._store.write(self._as_rows([total], f, n, 0, metric))
        self._store.put_all(
            (WORST_CASE, json.dumps([metric, f]), json.dumps(value)) for f, value in found.items()
        )

    def _rows(self, format: str, part: Part, b: int, metric: Metric) -> list[Row]:
        found = add_up(format, [part], metric)
        values: list[Value] = [
            (BUDGET, r.layer, r.head, f"{r.kind}: {r.site}", (r.predicted, r.low, r.high), math.nan)
            for r in found.rows
        ]
        second = math.nan if part.curved is None else found.second_order
        low = found.total.low
        high = found.total.high
        values.append((BUDGET, None, None, "total", (found.total.value, low, high), second))
        if found.observed is not None:
            values.append((OBSERVED, None, None, "total", (found.observed,) * 3, math.nan))
        return self._as_rows(values, format, part.n, b, metric.name)

    def _as_rows(
        self, values: Sequence[Value], format: str, n: int, b: int, metric: str
    ) -> list[Row]:
        return [
            Row(
                probe=probe,
                scope=format,
                layer=layer,
                head=head,
                n=n,
                sample=b,
                kind=kind,
                norm=metric,
                value=value,
                lower=low,
                upper=high,
                residual=residual,
                status="observed" if probe == OBSERVED else "predicted",
                radius=math.nan,
                dtype=str(self._subject.dtype).removeprefix("torch."),
                device=next(self._subject.module.parameters()).device.type,
                seconds=math.nan,
            )
            for probe, layer, head, kind, (value, low, high), residual in values
        ]


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
    first = next(iter(parts.values()))
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


def stored_budgets(study: Study) -> list[ErrorBudget]:
    """The budgets of a study, one per metric and settings; of the sequences that are done."""
    groups: dict[Settings, dict[str, dict[int, Part]]] = {}
    for key, text in study.store.records(BUDGET):
        *values, b, _, format = json.loads(key)
        parts = groups.setdefault(Settings(*values), {})
        parts.setdefault(format, {})[b] = Part.from_json(json.loads(text))
    found = []
    for settings, formats in groups.items():
        # Formats that were added later may not have all sequences yet.
        most = max(len(parts) for parts in formats.values())
        whole = {
            name: [part for _, part in sorted(parts.items())]
            for name, parts in formats.items()
            if len(parts) == most
        }
        metric = read_metric(settings.metric)
        known = _stored_worst(study.store, settings.metric)
        worst = {name: known[name] for name in whole if name in known}
        model = study.info.about.model
        found.append(assemble(model, settings, whole, metric, worst, _no_tolerance))
    return found


def _stored_worst(store: Store, metric: str) -> dict[str, float]:
    every = ((*json.loads(key), json.loads(value)) for key, value in store.records(WORST_CASE))
    return {format: value for its, format, value in every if its == metric}


def command_line(
    subject: Subject,
    text: Text,
    settings: Settings,
    formats: Sequence[str],
    length: int,
    samples: int,
    worst: bool,
) -> str:
    """The command line that computes a budget again; empty if only Python can."""
    given = text_option(text) if isinstance(subject.sequences[0], Tensor) else None
    if subject.model is None or subject.model.card.option is None or given is None:
        return ""
    options = {
        "--format": ",".join(formats),
        "--metric": settings.metric,
        "--probes": settings.probes,
        "--length": length,
        "--samples": samples,
        "--dtype": subject.model.card.dtype,
        "--seed": settings.seed,
    }
    flags = {
        "--observe": settings.observe,
        "--embeddings": settings.embeddings,
        "--worst": worst,
    }
    words = ["lipscope", "budget", *subject.model.card.option, *given]
    words += [word for name, value in options.items() for word in (name, str(value))]
    return shlex.join(words + [name for name, on in flags.items() if on])


def _no_tolerance(state: int, format: str) -> Tolerance:
    raise UserError(
        "a budget read from a study has no model to compute tolerances from; call error_budget"
    )


def _info(subject: Subject, seed: int, command: str) -> StudyInfo:
    """Identity and description of a study of budgets."""
    model = subject.model
    if model is None:
        raise UserError(
            f"{subject.name} is not a transformers model, so a study cannot tell it from others; "
            "omit out"
        )
    contents = [
        ids.tolist()
        if isinstance(ids, Tensor)
        else {name: x.tolist() for name, x in sorted(ids.arguments.items())}
        for ids in subject.sequences
    ]
    text = hashlib.sha256(repr(contents).encode()).hexdigest()
    card: Any = model.card
    identity = Identity(
        weights=card.weights,
        config=config_digest(model),
        revision=card.revision or "",
        tokenizer=card.tokenizer or "",
        text=text,
        special_tokens=False,
        dtype=str(subject.dtype).removeprefix("torch."),
        mask="the model's own; nothing is padded",
        tol=0.0,
        seed=seed,
        numeric_version=NUMERIC_VERSION,
    )
    about = About(
        model=card.name,
        architecture=card.architecture,
        layers=model.layers,
        heads=model.heads,
        device=model.device.type,
        text=f"{len(subject.sequences)} sequences",
        text_tokens=subject.tokens,
        scopes={},
        difference_to_eager=model.preflight.difference,
        confidence=0.0,
        versions={"lipscope": __version__, "python": platform.python_version(), **card.versions},
        command=command,
        random_init=card.random_init,
    )
    return StudyInfo(identity, about)
