"""The bounds probe: for every head, all theorems, the worst input found in its ball, its regime."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._checks import check_positive
from lipscope._notebook_bar import with_bar
from lipscope._types import Ball, Point, UserError
from lipscope.attack.ascent import Climb, ascend
from lipscope.attack.constructions import regime
from lipscope.attention.layer import HeadsApart, SelfAttention
from lipscope.attention.scores import Dot
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.study.reading import Text, WholeInputs, Windows, read
from lipscope.study.records import Row
from lipscope.study.run import Progress, Verb, measure_as
from lipscope.study.store import Store
from lipscope.study.study import Study
from lipscope.study.work import survey, threads_for
from lipscope.theorems.registry import REGISTRY, enclosing, evaluate, failed_hypothesis
from lipscope.theorems.statement import NO_QUERY_BIAS

BOUND = "bound: "
WORST = "worst found"
REGIME = "regime"
REFERENCE = "reference"
LEFT_OUT = ", query bias left out"
"""Kind and name suffix of a number that would be a bound if the head had no query bias."""

LENGTHS = (64,)
QUICK = Climb(steps=20, restarts=1)


class Audit(NamedTuple):
    """A study with bounds, and the theorems that do not apply, each with the failed hypothesis."""

    study: Study
    not_offered: dict[str, str]

    def __repr__(self) -> str:
        return f"Audit({self.study!r}, {len(self.not_offered)} theorems not applicable)"

    def _repr_html_(self) -> str:
        from lipscope.report.bounds import bound_summary
        from lipscope.report.study_table import terminal_html

        return terminal_html(bound_summary(self))


class HeadAtSample(NamedTuple):
    """One head at one sample; `sigma` is the row that was measured there."""

    sigma: Row
    f: SelfAttention
    X: Tensor
    R: float


@entry_point
@with_bar("bounding")
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
    """Compare every theorem with the measured constant of each head of a model.

    Each head is measured on the text and bounded from above and below, and the worst input in its
    ball is searched for.

    Args:
        model: A :class:`Model`, or anything :func:`load` takes. Default: the embedded model.
        text: A string, a file (``Path``), a list of strings or token ids. Default: the embedded
            text.
        lengths: Numbers of tokens. Default: 64.
        layers: Layer numbers, from 0. Default: all layers.
        heads: Head numbers. Default: all heads.
        radius: Radius of the ball for bounds on a ball. Default: the largest norm of a token in the
            sample.
        samples: Number of samples per length.
        seed: Seed for samples, solver and search.
        climb: Settings of the search for the worst input. Default: a short climb with `seed`.
        out: Directory to save the study in; repeat the same call to resume an interrupted run.
        progress: Called with the number of heads done and their total. Default: a
            bar in notebooks, nothing elsewhere.

    Returns:
        The study, with a row per bound, and the theorems that do not apply.

    Raises:
        UserError: If a layer is not plain self-attention, or a token lies outside the ball.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> from transformers import BertConfig, BertModel
        >>> _ = torch.manual_seed(0)
        >>> model = BertModel(BertConfig(
        ...     vocab_size=99, hidden_size=16, intermediate_size=24,
        ...     num_hidden_layers=1, num_attention_heads=2))
        >>> climb = ls.attack.Climb(steps=2, restarts=1)
        >>> study, _ = ls.audit_model(model, torch.arange(32), [8], heads=[0], climb=climb)
        >>> sigma = study.sigma[0].value
        >>> all(row.value >= sigma for row in study.rows if row.kind == "upper")
        True
    """
    climb = climb or replace(QUICK, seed=seed)
    model = model if isinstance(model, Model) else load(model)
    lengths = LENGTHS if lengths is None else lengths
    if radius is not None:
        check_positive("radius", radius)
    verb = Verb("bounds", WORST, {"--radius": radius})
    study = measure_as(
        verb, model, text, lengths, samples, layers, heads, ("heads",), seed=seed, out=out
    )
    inputs = read(model, text, lengths=lengths, samples=samples, seed=seed)
    store = study.store if out is None else Store.create(Path(out), study.info)
    # The search is the expensive part: it is skipped where the study has it for the same radius.
    known = {_place(row): row.radius for row in store.rows(WORST)}
    wanted = [row for row in study.sigma if _asked(row, inputs, layers, heads)]
    refused: dict[str, str] = {}
    try:
        for done, at in enumerate(_heads_at_samples(model, inputs, wanted, radius)):
            if progress is not None:
                progress(done, len(wanted))
            with threads_for(tokens=1):
                found, why = _bound_rows(at)
                refused |= why
                if not math.isclose(known.get(_place(at.sigma), math.nan), at.R, rel_tol=1e-9):
                    found += _search_rows(at, climb)
            store.write(found)
    finally:
        if out is not None:
            store.close()
    return Audit(Study(store) if out is None else Study.open(Path(out)), refused)


def _asked(
    row: Row,
    inputs: Windows | WholeInputs,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
) -> bool:
    """Whether a row of the study, which may contain others, is part of this request."""
    here = (row.n, row.sample) in inputs.pairs and row.scope == "heads"
    return here and (layers is None or row.layer in layers) and (heads is None or row.head in heads)


def _place(row: Row) -> tuple[Any, ...]:
    return row.layer, row.head, row.n, row.sample


def _heads_at_samples(
    model: Model, inputs: Windows | WholeInputs, rows: list[Row], radius: float | None
) -> Iterator[HeadAtSample]:
    """The heads behind rows of sigma, sample by sample, with one forward pass per sample."""
    for n, sample in sorted({(row.n, row.sample) for row in rows}):
        seen = survey(model, inputs, n, (sample,))
        here = [row for row in rows if (row.n, row.sample) == (n, sample)]
        for layer in sorted({row.layer for row in here if row.layer is not None}):
            site = seen.site("heads", layer)
            if not isinstance(site.f, HeadsApart):
                raise UserError(
                    f"layer {layer} of {model.card.name} is not plain self-attention, so no "
                    "theorem applies to it; choose other --layers, or use lipscope measure"
                )
            for row in (r for r in here if r.layer == layer and r.head is not None):
                assert row.head is not None
                yield HeadAtSample(
                    sigma=row,
                    f=for_one_sequence(site.f.layer.head(row.head)),
                    X=site.X[0],
                    R=_radius(row, radius),
                )


def for_one_sequence(f: SelfAttention) -> SelfAttention:
    """A layer that was recorded in a batch of one, without its batch dimension."""
    mask, padding = (
        x if x is None or x.ndim == size else x[0] for x, size in ((f.mask, 2), (f.padding, 1))
    )
    return replace(f, mask=mask, padding=padding)


def _radius(row: Row, radius: float | None) -> float:
    if radius is None:
        # A little larger, so that rounding does not push the sample itself outside.
        return row.radius * (1 + 1e-12)
    if radius < row.radius:
        raise UserError(
            f"layer {row.layer} reads a token of norm {row.radius:.4g}, outside the ball of radius "
            f"{radius:g} that the bounds cover; give at least {math.ceil(row.radius)}, or omit "
            "the radius"
        )
    return radius


def _bound_rows(at: HeadAtSample) -> tuple[list[Row], dict[str, str]]:
    """The bounds at the sample and on its ball around the origin, and why others do not apply."""
    sigma, f, X, R = at
    # Bounds are evaluated in float64 whatever the model is measured in: a rounded bound is none.
    f = f.double()
    rows = []
    refused = {}
    for bound in REGISTRY:
        domain = enclosing(
            Point(X) if bound.domain is Point else Ball(R, sigma.n), bound.domain, bound.kind
        )
        if bound.norm != "2" or domain is None:
            continue
        name = bound.name
        kind = bound.kind
        layer = f
        why = failed_hypothesis(bound, f, domain)
        if why is not None:
            refused[name] = why
            # Papers assume no query bias, and most models have one: what the theorem would give
            # without it is kept as a reference, never as a bound.
            name = name + LEFT_OUT
            kind = REFERENCE
            layer = replace(f, biases=None)
            if (
                why != NO_QUERY_BIAS.says
                or bound.kind == "lower"
                or failed_hypothesis(bound, layer, domain)
            ):
                continue
        began = time.perf_counter()
        value = evaluate(bound, layer, domain)
        rows.append(_bound_row(at, name, kind, value, time.perf_counter() - began))
    return rows, refused


def _bound_row(at: HeadAtSample, name: str, kind: str, value: float, seconds: float) -> Row:
    """The row of a bound: it encloses the unknown constant from one side only."""
    lower, upper = (value, math.inf) if kind == "lower" else (0.0, value)
    return _row(at, BOUND + name, kind, (value, lower, upper, 0.0, "evaluated", seconds))


def _search_rows(at: HeadAtSample, climb: Climb) -> list[Row]:
    """The worst input found from the text, the constructions and random starts; and the regime."""
    sigma, f, X, R = at
    began = time.perf_counter()
    # From the text too: the worst input found is then never smoother than the text.
    e = ascend(f, Ball(R, sigma.n), climb, starts=[X]).sigma
    seconds = time.perf_counter() - began
    rows = [
        _row(
            at,
            WORST,
            "local",
            (e.value, e.lower, e.upper, e.residual, e.status.name.lower(), seconds),
        )
    ]
    if isinstance(f.kernel, Dot):
        reach = regime(f, R).reach
        rows.append(_row(at, REGIME, "log length", (reach, reach, reach, 0.0, "evaluated", 0.0)))
    return rows


def _row(
    at: HeadAtSample,
    probe: str,
    kind: str,
    numbers: tuple[float, float, float, float, str, float],
) -> Row:
    """A row with these numbers: value, lower, upper, residual, status, seconds."""
    value, lower, upper, residual, status, seconds = numbers
    return at.sigma._replace(
        probe=probe,
        kind=kind,
        value=value,
        lower=lower,
        upper=upper,
        residual=residual,
        status=status,
        radius=at.R,
        seconds=seconds,
    )
