"""The bounds probe: for every head, all theorems, the worst input found in its ball, its regime."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._checks import check_positive
from lipscope._display import with_bar
from lipscope._types import Ball, Point, UserError
from lipscope.attack.ascent import Climb, ascend
from lipscope.attack.constructions import regime
from lipscope.attention.layer import HeadsApart, SelfAttention
from lipscope.attention.scores import Dot
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.study.jobs import check_engine, check_shard
from lipscope.study.probe import Place, Sigma, threads_for
from lipscope.study.reading import Text
from lipscope.study.records import Row
from lipscope.study.run import Progress, engine_for, gap_of, read_inputs, run
from lipscope.study.study import Study
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
    workers: int = 1,
    cluster: str | None = None,
    shard: Sequence[int] | None = None,
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
        layers: Layer numbers, from 0. Default: all layers with attention.
        heads: Head numbers. Default: all heads.
        radius: Radius of the ball for bounds on a ball. Default: the largest norm of a token in the
            sample.
        samples: Number of samples per length.
        seed: Seed for samples, solver and search.
        climb: Settings of the search for the worst input. Default: a short climb with `seed`.
        workers: Number of worker processes on this machine; 1 works in this process.
        cluster: Workers on other machines, as for :func:`measure`.
        shard: (k, N): only the k-th of N parts of the study, as for :func:`measure`.
        out: Directory to save the study in; repeat the same call to resume an interrupted run.
        progress: Called with the work done and the total work. Default: a bar in notebooks,
            nothing elsewhere.

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
    check_engine(workers, cluster)
    if radius is not None:
        check_positive("radius", radius)
    model = model if isinstance(model, Model) else load(model)
    settings: dict[str, Any] = {"lengths": LENGTHS if lengths is None else lengths}
    settings |= {"samples": samples, "layers": layers, "heads": heads, "seed": seed}
    given = read_inputs(model, text, settings)
    probe = Bounds(radius, climb)
    study = run(
        model,
        given,
        [Sigma(("heads",), gap=gap_of(None, model.card.dtype), seed=seed), probe],
        layers=layers,
        heads=heads,
        verb="bounds",
        options={"--radius": radius},
        engine=engine_for(model, workers, cluster),
        shard=None if shard is None else check_shard(shard),
        out=out,
        progress=progress,
    )
    not_offered: dict[str, str] = {}
    for row in study.rows:
        if (
            row.probe == WORST
            and row.extra.get("settings") == probe.settings
            and (row.n, row.sample) in given.pairs
            and (layers is None or row.layer in layers)
            and (heads is None or row.head in heads)
        ):
            not_offered |= row.extra.get("not_offered", {})
    return Audit(study, not_offered)


@dataclass(frozen=True)
class Bounds:
    """The probe of this file.

    Args:
        radius: Radius of the ball. Default: the largest norm of a token in the sample.
        climb: Settings of the search for the worst input.
    """

    radius: float | None
    climb: Climb
    name: str = field(default=WORST, init=False)
    scopes: tuple[str, ...] = field(default=("heads",), init=False)
    cost: float = field(default=20.0, init=False)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that decide the rows, besides those of the study."""
        return {"radius": self.radius, **asdict(self.climb)}

    def check(self, place: Place) -> None:
        """Raise UserError if no theorem applies, or a token lies outside the ball."""
        site = place.site
        if not isinstance(site.f, HeadsApart):
            raise UserError(
                f"layer {site.layer} of {place.model.card.name} is not plain self-attention, so no "
                "theorem applies to it; choose other --layers, or use lipscope measure"
            )
        largest = float(site.radius.max())
        if self.radius is not None and self.radius < largest:
            raise UserError(
                f"layer {site.layer} reads a token of norm {largest:.4g}, outside the ball of "
                f"radius {self.radius:g} that the bounds cover; give at least {math.ceil(largest)}"
                ", or omit the radius"
            )

    def __call__(self, place: Place) -> list[Row]:
        self.check(place)
        site = place.site
        assert isinstance(site.f, HeadsApart)
        rows = []
        with threads_for(tokens=1):
            for i, (sample, _) in enumerate(site.members):
                place.report(i / len(site.members))
                # Samples are the slower index of the members, heads the faster one.
                head = i % (len(site.members) // len(place.samples))
                f = for_one_sequence(site.f.layer.head(head), sample)
                X = site.X[sample]
                # A little larger, so that rounding does not push the sample itself outside.
                ball = Ball(self.radius or float(site.radius[i]) * (1 + 1e-12), place.n)
                row = partial(place.row, i, radius=ball.R)
                bounds, refused = _bound_rows(row, f, X, ball)
                began = time.perf_counter()
                # From the text too: the worst input found is then never smoother than the text.
                e = ascend(f, ball, self.climb, starts=[X]).sigma
                rows += bounds
                rows.append(
                    row(
                        WORST,
                        "local",
                        (e.value, e.lower, e.upper),
                        e.status.name.lower(),
                        residual=e.residual,
                        seconds=time.perf_counter() - began,
                        extra={"settings": self.settings, "not_offered": refused},
                    )
                )
                if isinstance(f.kernel, Dot):
                    reach = regime(f, ball.R).reach
                    rows.append(
                        row(
                            REGIME,
                            "log length",
                            (reach, reach, reach),
                            "evaluated",
                            residual=0.0,
                            seconds=0.0,
                        )
                    )
        return rows


def for_one_sequence(f: SelfAttention, sample: int = 0) -> SelfAttention:
    """A layer that was recorded in a batch, at one of its samples, without the batch dimension."""
    mask, padding = (
        x if x is None or x.ndim == size else x[sample if len(x) > 1 else 0]
        for x, size in ((f.mask, 2), (f.padding, 1))
    )
    return replace(f, mask=mask, padding=padding)


def _bound_rows(
    row: Callable[..., Row], f: SelfAttention, X: Tensor, ball: Ball
) -> tuple[list[Row], dict[str, str]]:
    """The bounds at the sample and on its ball around the origin, and why others do not apply."""
    # Bounds are evaluated in float64 whatever the model is measured in: a rounded bound is none.
    f = f.double()
    rows = []
    refused = {}
    for bound in REGISTRY:
        asked = Point(X) if bound.domain is Point else ball
        domain = enclosing(asked, bound.domain, bound.kind)
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
        seconds = time.perf_counter() - began
        # A bound encloses the unknown constant from one side only.
        interval = (value, value, math.inf) if kind == "lower" else (value, 0.0, value)
        rows.append(row(BOUND + name, kind, interval, "evaluated", residual=0.0, seconds=seconds))
    return rows, refused
