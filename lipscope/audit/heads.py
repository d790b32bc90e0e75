"""The bounds probe: for every head what the theorems say, the worst input found in its ball, and its regime."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lipscope._types import Ball, Point, UserError
from lipscope.attack.ascent import Climb, ascend
from lipscope.attack.constructions import regime
from lipscope.attention.kernels import Dot
from lipscope.attention.layer import HeadsApart, SelfAttention
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.study.reading import Choice, Reading, Text, read
from lipscope.study.records import Row
from lipscope.study.run import measure
from lipscope.study.store import Store
from lipscope.study.study import Study
from lipscope.study.work import survey, threads_for
from lipscope.study.writer import Progress
from lipscope.theorems.registry import REGISTRY, enclosing, evaluate, failed_hypothesis
from lipscope.theorems.statement import NO_QUERY_BIAS

BOUND, WORST, REGIME = "bound: ", "worst found", "regime"
REFERENCE, LEFT_OUT = "reference", ", query bias left out"
"""The kind, and the mark in its name, of a number that would be a bound if the head had no query bias."""

LENGTHS = (64,)
QUICK = Climb(steps=20, restarts=1)


class Audit(NamedTuple):
    """A study with bounds in it, and the theorems that were not offered, each with the hypothesis that failed."""

    study: Study
    not_offered: dict[str, str]


class Target(NamedTuple):
    """One head at one sample; sigma is what was measured there."""

    sigma: Row
    f: SelfAttention
    X: Tensor
    R: float


def audit_model(
    model: Any = None,
    text: Text = None,
    lengths: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    *,
    radius: float | None = None,
    samples: int = 1,
    seed: int = 0,
    climb: Climb | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Measures the heads of a model on a text, bounds each from above and below, and looks for its worst input.

    lengths: numbers of tokens, 64 unless told; `samples` of each.
    radius:  bounds on a ball are for tokens of norm up to this; by default the largest norm in the sample.
    climb:   how the worst input is looked for; by default a short climb with `seed`.
    """
    climb = climb or replace(QUICK, seed=seed)
    model = model if isinstance(model, Model) else load(model)
    lengths = LENGTHS if lengths is None else lengths
    if radius is not None:
        Ball(radius, 1)  # says what a radius is
    study = measure(model, text, lengths, samples, layers, heads, ("heads",), seed=seed, out=out)
    reading = read(model, text, None, Choice(lengths, samples, seed, special_tokens=False))
    store = study._store if out is None else Store.create(Path(out), study.info)
    known = {_place(row): row.radius for row in store.rows(WORST)}
    wanted = [row for row in study.sigma if _asked(row, reading, layers, heads)]
    refused: dict[str, str] = {}
    try:
        for done, target in enumerate(_targets(model, reading, wanted, radius)):
            if progress is not None:
                progress(done, len(wanted))
            with threads_for(tokens=1):
                found, why = _bound_rows(target)
                refused |= why
                if not math.isclose(
                    known.get(_place(target.sigma), math.nan), target.R, rel_tol=1e-9
                ):
                    found += _search_rows(target, climb)
            store.write(found)
    finally:
        if out is not None:
            store.close()
    return Audit(Study(store) if out is None else Study.open(Path(out)), refused)


def _asked(
    row: Row, reading: Reading, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> bool:
    """Whether a row of the study, which may hold more, is part of this request."""
    here = (row.n, row.sample) in reading.inputs.pairs and row.scope == "heads"
    return here and (layers is None or row.layer in layers) and (heads is None or row.head in heads)


def _place(row: Row) -> tuple[Any, ...]:
    return row.layer, row.head, row.n, row.sample


def _targets(
    model: Model, reading: Reading, rows: list[Row], radius: float | None
) -> Iterator[Target]:
    """The heads behind rows of sigma, sample by sample and layer by layer, one forward pass a sample."""
    for n, sample in sorted({(row.n, row.sample) for row in rows}):
        seen = survey(model, reading.inputs, n, (sample,))
        here = [row for row in rows if (row.n, row.sample) == (n, sample)]
        for layer in sorted({row.layer for row in here if row.layer is not None}):
            site = seen.site("heads", layer)
            if not isinstance(site.f, HeadsApart):
                raise UserError(
                    f"layer {layer} of {model.card.name} is not plain self-attention, and no theorem speaks of it; "
                    "choose other --layers, or measure it."
                )
            for row in (r for r in here if r.layer == layer and r.head is not None):
                assert row.head is not None
                yield Target(
                    row,
                    for_one_sequence(site.f.layer.head(row.head)),
                    site.X[0],
                    _radius(row, radius),
                )


def for_one_sequence(f: SelfAttention) -> SelfAttention:
    """A layer that was recorded in a batch of one, for a sequence alone."""
    mask, padding = (
        x if x is None or x.ndim == size else x[0] for x, size in ((f.mask, 2), (f.padding, 1))
    )
    return replace(f, mask=mask, padding=padding)


def _radius(row: Row, radius: float | None) -> float:
    if radius is None:
        return row.radius * (1 + 1e-12)
    if radius < row.radius:
        raise UserError(
            f"layer {row.layer} reads a token of norm {row.radius:.4g}, outside the ball of radius {radius:g} "
            f"that the bounds cover. Give at least {math.ceil(row.radius)}, or leave the radius out."
        )
    return radius


def _bound_rows(target: Target) -> tuple[list[Row], dict[str, str]]:
    """Every bound at the sample and on the ball around the origin that holds it; and why others are not there."""
    sigma, f, X, R = target
    f, rows, refused = f.double(), [], {}
    for bound in REGISTRY:
        domain = enclosing(
            Point(X) if bound.domain is Point else Ball(R, sigma.n), bound.domain, bound.kind
        )
        if bound.norm != "2" or domain is None:
            continue
        name, kind, layer = bound.name, bound.kind, f
        why = failed_hypothesis(bound, f, domain)
        if why is not None:
            refused[name] = why
            name, kind, layer = name + LEFT_OUT, REFERENCE, replace(f, biases=None)
            if (
                why != NO_QUERY_BIAS.says
                or bound.kind == "lower"
                or failed_hypothesis(bound, layer, domain)
            ):
                continue
        began = time.perf_counter()
        value = evaluate(bound, layer, domain)
        rows.append(_bound_row(target, name, kind, value, time.perf_counter() - began))
    return rows, refused


def _bound_row(target: Target, name: str, kind: str, value: float, seconds: float) -> Row:
    """An upper bound is above a value that is not known, and a lower bound below one."""
    lower, upper = (value, math.inf) if kind == "lower" else (0.0, value)
    return _row(target, BOUND + name, kind, (value, lower, upper, 0.0, "evaluated", seconds))


def _search_rows(target: Target, climb: Climb) -> list[Row]:
    """The worst input found, starting from the text, the constructions and random inputs; and the regime."""
    sigma, f, X, R = target
    began = time.perf_counter()
    e = ascend(f, Ball(R, sigma.n), climb, starts=[X]).sigma
    seconds = time.perf_counter() - began
    rows = [
        _row(
            target,
            WORST,
            "local",
            (e.value, e.lower, e.upper, e.residual, e.status.name.lower(), seconds),
        )
    ]
    if isinstance(f.kernel, Dot):
        reach = regime(f, R).reach
        rows.append(
            _row(target, REGIME, "log length", (reach, reach, reach, 0.0, "evaluated", 0.0))
        )
    return rows


def _row(
    target: Target, probe: str, kind: str, numbers: tuple[float, float, float, float, str, float]
) -> Row:
    """value, lower, upper, residual, status and seconds, in the place and on the device of the target's sigma."""
    value, lower, upper, residual, status, seconds = numbers
    return target.sigma._replace(
        probe=probe,
        kind=kind,
        value=value,
        lower=lower,
        upper=upper,
        residual=residual,
        status=status,
        radius=target.R,
        seconds=seconds,
    )
