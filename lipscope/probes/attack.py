"""Attack the layers of a model: the inputs found, next to sigma at the text."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._checks import check_positive
from lipscope._display import with_bar
from lipscope._files import for_terminal
from lipscope._types import Around, Ball, UserError
from lipscope.attack.ascent import Climb, ascend
from lipscope.attack.constructions import explicit_inputs
from lipscope.attack.perturbation import singular_response
from lipscope.attack.tokens import (
    Swapped,
    duplicated_tokens,
    guided_swaps,
    projected_swaps,
    random_swaps,
    search_until,
)
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import Map
from lipscope.linalg.estimate import Estimate, as_batch
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver, fresh_seed
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.probes.bounds import QUICK, for_one_sequence
from lipscope.probes.sentence import AT_ONCE
from lipscope.probes.token_target import layer_sigma
from lipscope.study.jobs import check_engine, check_shard
from lipscope.study.probe import Place, Sigma, threads_for
from lipscope.study.reading import Text
from lipscope.study.records import Row
from lipscope.study.run import Progress, engine_for, gap_of, read_inputs, run
from lipscope.study.study import Study

PROBE = "attack: "
GUIDED_TEXTS = 160
"""Texts that a guided search measures per swap, about; its progress is relative to this."""

NEAR = 0.1
"""Radius of the neighbourhood of the text that ascent searches, relative to its largest token."""


@dataclass(frozen=True)
class AttackPlan:
    """The settings of an attack on the layers of a model.

    Args:
        kind: "construction", "ascent", "direction" or "tokens".
        length: The number of tokens of the text.
        swaps: The maximum number of tokens that the kind "tokens" may replace.
        layers: Layer numbers; all layers by default.
        seed: The seed of the searches.
        seconds: When the kind "tokens" stops searching, counted from the call, with the best texts
            found by then. Layers get equal shares, and so do the four searches of a layer; time
            that one leaves goes to the next. Default: no limit.

    Example:
        >>> import lipscope as ls
        >>> ls.AttackPlan("tokens", length=8, swaps=2).kind
        'tokens'
    """

    kind: str
    length: int = 32
    swaps: int = 3
    layers: Sequence[int] | None = None
    seed: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None:
            check_positive("seconds", self.seconds)
        if self.kind not in KINDS:
            raise UserError(f"there is no attack {self.kind!r}; the kinds are {', '.join(KINDS)}")
        if self.kind == "tokens" and not 1 <= self.swaps <= self.length:
            raise UserError(
                f"cannot replace {self.swaps} tokens in a text of {self.length}; "
                f"swaps must be 1 to {self.length}"
            )


class Line(NamedTuple):
    """One result: a sigma, or a change per unit of step, and where it was found, in words."""

    layer: int
    n: int
    name: str
    value: float
    lower: float
    upper: float
    detail: str


@dataclass(frozen=True, eq=False)
class AttackContext:
    """One layer to attack: the map and its input at the text.

    until: when search number i of the layer ends, on the clock of time.monotonic
    """

    place: Place
    plan: AttackPlan
    ids: list[int]
    f: Map
    X: Tensor
    until: Callable[[int], float]

    @property
    def layer(self) -> int:
        assert self.place.site.layer is not None
        return self.place.site.layer

    @property
    def ball(self) -> Ball:
        """The smallest ball around the origin that contains the tokens of the text."""
        # A little larger, so that rounding does not push the text itself outside.
        return Ball(self.X.norm(dim=1).max().item() * (1 + 1e-12), len(self.X))

    def line(self, name: str, e: Estimate, detail: str = "") -> Line:
        return Line(
            layer=self.layer,
            n=len(self.X),
            name=name,
            value=e.value,
            lower=e.lower,
            upper=e.upper,
            detail=detail,
        )

    def plain(self) -> SelfAttention:
        """The map as plain self-attention; raises UserError if it is not."""
        if not isinstance(self.f, SelfAttention):
            raise UserError(
                f"layer {self.layer} of {self.place.model.card.name} is not plain self-attention; "
                "attack it with --kind direction or tokens"
            )
        return self.f


class AttackedModel(NamedTuple):
    """What :func:`attack_model` returns: the study, and one line per attack, layer by layer."""

    study: Study
    lines: list[Line]

    def __repr__(self) -> str:
        return f"AttackedModel({self.study!r}, {len(self.lines)} lines)"

    def _repr_html_(self) -> str:
        from lipscope.report.study_table import terminal_html

        return terminal_html(attack_table(self.study, self.lines))


@entry_point
@with_bar("attacking")
def attack_model(
    model: Any,
    text: Text,
    plan: AttackPlan,
    *,
    workers: int = 1,
    cluster: str | None = None,
    shard: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> AttackedModel:
    """Attack the attention of a model, layer by layer.

    Args:
        model: A :class:`Model`, or anything :func:`load` takes.
        text: A string, a file (``Path``), a list of strings or token ids.
        plan: The kind of attack and its settings.
        workers: Number of worker processes on this machine; 1 works in this process.
        cluster: Workers on other machines, as for :func:`measure`.
        shard: (k, N): only the k-th of N parts of the study, as for :func:`measure`.
        out: Directory of a study to add the results to; repeat the call to resume an interrupted
            run. Default: keep them in memory.
        progress: Called with the work done and the total work. Default: a bar in notebooks,
            nothing elsewhere.

    Returns:
        The study, with a row per result, and the list of results. After Ctrl-C in a search of the
        kind "tokens", they cover the layers that were attacked until then.

    Raises:
        UserError: If the model or the text lacks what the plan requests.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> from transformers import LlamaConfig, LlamaModel
        >>> _ = torch.manual_seed(0)
        >>> model = LlamaModel(LlamaConfig(
        ...     vocab_size=99, hidden_size=16, intermediate_size=24,
        ...     num_hidden_layers=1, num_attention_heads=2))
        >>> plan = ls.AttackPlan("direction", length=8)
        >>> study, lines = ls.attack_model(model, torch.arange(32), plan)
        >>> (sigma,) = study.largest("attention", 0)
        >>> all(line.value <= 1.01 * sigma.value for line in lines[:1])
        True
    """
    began = time.time()
    check_engine(workers, cluster)
    model = model if isinstance(model, Model) else load(model)
    settings = {"lengths": (plan.length,), "samples": 1, "layers": plan.layers, "seed": plan.seed}
    given = read_inputs(model, text, settings)
    layers = tuple(range(model.layers) if plan.layers is None else plan.layers)
    probe = Attack(plan, layers, began)
    study = run(
        model,
        given,
        [Sigma(("attention",), gap=gap_of(None, model.card.dtype), seed=plan.seed), probe],
        layers=layers,
        verb="attack",
        options={
            "--kind": plan.kind,
            "--length": plan.length,
            "--swaps": plan.swaps,
            "--seconds": plan.seconds,
        },
        engine=engine_for(model, workers, cluster),
        shard=None if shard is None else check_shard(shard),
        out=out,
        progress=progress,
    )
    found = [
        row
        for row in study.rows
        if row.probe.startswith(probe.name)
        and row.layer in layers
        and (row.n, row.sample) == (plan.length, 0)
        and row.extra.get("settings") in (probe.settings, None)
    ]
    found.sort(key=lambda row: (layers.index(row.layer or 0), row.extra.get("order", 0)))
    lines = [
        Line(
            layer=row.layer or 0,
            n=row.n,
            name=row.probe.removeprefix(probe.name),
            value=row.value,
            lower=row.lower,
            upper=row.upper,
            detail=row.extra.get("detail", ""),
        )
        for row in found
    ]
    return AttackedModel(study, lines)


@dataclass
class Attack:
    """The probe of this file.

    Args:
        plan: The kind of attack and its settings.
        layers: All layers that are attacked; they share the time of the plan.
        began: When the time began to run, in seconds since the epoch, as on every worker.
    """

    plan: AttackPlan
    layers: tuple[int, ...]
    began: float
    scopes: tuple[str, ...] = field(default=("attention",), init=False)
    cost: float = field(default=50.0, init=False)
    interrupted: bool = field(default=False, init=False)

    @property
    def name(self) -> str:
        """The beginning of `Row.probe`."""
        return f"{PROBE}{self.plan.kind}, "

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that decide the rows, besides those of the study."""
        return {"swaps": self.plan.swaps, "seconds": self.plan.seconds}

    def check(self, place: Place) -> None:
        """Some layers can only be attacked in some ways, as the attack finds out."""

    def __call__(self, place: Place) -> list[Row]:
        if self.interrupted:
            return []
        site = place.site
        f = site.f
        X = site.X[0]
        # Searches need accurate singular vectors: float64, whatever the model is measured in.
        if isinstance(f, SelfAttention):
            f = for_one_sequence(f).double()
            X = X.double()
        ids = place.inputs.batch(place.n, place.samples)[0].tolist()
        with threads_for(tokens=1):
            context = AttackContext(
                place=place, plan=self.plan, ids=ids, f=f, X=X, until=partial(self.until, place)
            )
            try:
                found = KINDS[self.plan.kind](context)
            except StoppedError as stop:
                self.interrupted = True
                found = stop.lines
        return [
            place.row(
                0,
                f"{self.name}{line.name}",
                # A finite difference is not a solve: it has no certificate, and as "ratio" it is
                # left out of the study's joint confidence.
                "local" if self.plan.kind != "direction" else "ratio",
                (line.value, line.lower, line.upper),
                "evaluated",
                extra={
                    # Without settings, the next run attacks the layer again.
                    "settings": None if self.interrupted else self.settings,
                    "order": order,
                    "detail": line.detail,
                },
            )
            for order, line in enumerate(found)
        ]

    def until(self, place: Place, search: int) -> float:
        """When a search ends: all searches have equal shares, and what one leaves goes on."""
        searches = len(TOKEN_SEARCHES)
        layer = place.site.layer
        assert layer is not None
        steps = searches * self.layers.index(layer) + search + 1
        share = steps / (searches * len(self.layers))
        return time.monotonic() + self.began + (self.plan.seconds or math.inf) * share - time.time()


class StoppedError(Exception):
    """Ctrl-C ended a search; `lines` were found until then."""

    def __init__(self, lines: list[Line]) -> None:
        super().__init__()
        self.lines = lines


def attack_table(study: Study, lines: Sequence[Line]) -> Table:
    """A table of the results next to sigma of their layer at the text."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("layer", "σ at the text", "attack", "found", "factor", "where"):
        table.add_column(name)
    for line in lines:
        text = next(
            r.value
            for r in study.largest("attention", line.layer)
            if (r.n, r.sample) == (line.n, 0)
        )
        ratio = f"{line.value / text:.3g}" if text > 0 else "-"
        table.add_row(
            str(line.layer),
            f"{text:.4g}",
            line.name,
            f"{line.value:.4g}",
            ratio,
            for_terminal(line.detail, 80),
        )
    return table


def _construction(context: AttackContext) -> list[Line]:
    found = explicit_inputs(context.plain(), context.ball, seed=context.plan.seed)
    # Sorted by value, best first: reversed, the best head of each construction is written last.
    best = {one.name.split(", head ")[0]: one for one in reversed(found)}
    where = f"ball of radius {context.ball.R:.4g}"
    return [
        context.line(name, one.sigma, ", ".join([where, *one.name.split(", ")[-1:]]))
        for name, one in sorted(best.items(), key=lambda item: -item[1].value)
    ]


def _ascent(context: AttackContext) -> list[Line]:
    f = context.plain()
    climb = Climb(QUICK.steps, QUICK.restarts, context.plan.seed)
    ball = context.ball
    near = Around(context.X, NEAR * context.ball.R)
    return [
        context.line(
            "in the ball",
            ascend(f, ball, climb, starts=[context.X]).sigma,
            f"ball of radius {ball.R:.4g}",
        ),
        context.line(
            "near the text", ascend(f, near, climb).sigma, f"within {near.r:.4g} of the text"
        ),
    ]


def _direction(context: AttackContext) -> list[Line]:
    found = singular_response(context.f, context.X, seed=context.plan.seed)
    return [
        Line(
            layer=context.layer,
            n=len(context.X),
            name=f"step {eta:g}",
            value=ratio,
            lower=ratio,
            upper=ratio,
            detail="‖f(X + ηU) − f(X)‖ / η",
        )
        for eta, ratio in zip(found.etas, found.ratios, strict=True)
    ]


TOKEN_SEARCHES: dict[str, Callable[..., Swapped]] = {
    "gradient": guided_swaps,
    "duplicates": duplicated_tokens,
    "projection": projected_swaps,
    "random": random_swaps,
}


def _tokens(context: AttackContext) -> list[Line]:
    plan = context.plan
    model = context.place.model
    target = layer_sigma(model, context.layer, seed=plan.seed)
    found: dict[str, Swapped] = {}
    interrupted = False
    for number, (name, search) in enumerate(TOKEN_SEARCHES.items()):
        expected = GUIDED_TEXTS * plan.swaps
        options = {"swaps": plan.swaps}
        if name == "random":
            # As many measurements as the guided search used, for a fair comparison.
            expected = found["gradient"].measured - 1 if "gradient" in found else expected
            options |= {"tries": max(1, expected), "seed": plan.seed + 1}

        def report(texts: int, number: int = number, expected: int = expected) -> None:
            part = min(texts / (1 + expected), 1.0)
            context.place.report((number + part) / len(TOKEN_SEARCHES))

        one, interrupted = search_until(
            partial(search, **options),
            target,
            context.ids,
            until=context.until(number),
            part=AT_ONCE,
            report=report,
        )
        if one is not None:
            found[name] = one
        if interrupted:
            break
    lines = [
        context.line(name, _measured(context, one), _in_words(model, context.ids, one))
        for name, one in found.items()
    ]
    if interrupted:
        raise StoppedError(lines)
    return lines


def _measured(context: AttackContext, one: Swapped) -> Estimate:
    """Measure again, to full accuracy and from a random start independent of the search.

    The search selected its text with the starts it used, so a bound from the same start would not
    hold with the stated probability.
    """
    site = context.place.model.survey(torch.tensor([one.ids])).site("attention", context.layer)
    solver = Solver(seed=fresh_seed(context.plan.seed, "measure"))
    return as_batch(local_lipschitz(site.f, site.X, solver=solver))[0]


def _in_words(model: Model, ids: Sequence[int], one: Swapped) -> str:
    changed = [(model.tokens([ids[i]])[0], model.tokens([one.ids[i]])[0], i) for i in one.positions]
    return ", ".join(f"{old}→{new} ({i})" for old, new, i in changed) + (
        f"; {one.measured} texts{', stopped early' if one.stopped else ''}"
    )


KINDS: dict[str, Callable[[AttackContext], list[Line]]] = {
    "construction": _construction,
    "ascent": _ascent,
    "direction": _direction,
    "tokens": _tokens,
}
