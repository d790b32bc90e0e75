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
from lipscope.probes.token_target import AT_ONCE, layer_sigma
from lipscope.study.jobs import check_engine, check_shard
from lipscope.study.probe import Place, Sigma, threads_for
from lipscope.study.reading import Text
from lipscope.study.records import Row
from lipscope.study.run import Progress, engine_for, gap_of, read_inputs, run
from lipscope.study.study import Study

PROBE = "attack: "

Interval = tuple[float, float, float]
"""(value, lower, upper)"""

Finding = tuple[str, Interval, str]
"""What was found, its sigma or its change per unit of step, and where, in words."""

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
        layers: Layer numbers; all layers with attention by default.
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
    layers = model.attending if plan.layers is None else tuple(plan.layers)
    probe = Attack(plan, layers, began)

    def tell(done: float, total: float) -> None:
        # After Ctrl-C in a search a terminal's progress would raise it again, and nothing be shown.
        if progress is not None and not probe.interrupted:
            progress(done, total)

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
        progress=tell,
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
        f = place.site.f
        X = place.site.X[0]
        # Searches need accurate singular vectors: float64, whatever the model is measured in.
        if isinstance(f, SelfAttention):
            f = for_one_sequence(f).double()
            X = X.double()
        with threads_for(tokens=1):
            found = KINDS[self.plan.kind](self, place, f, X)
        return [
            place.row(
                0,
                f"{self.name}{name}",
                # A finite difference is not a solve: it has no certificate, and as "ratio" it is
                # left out of the study's joint confidence.
                "local" if self.plan.kind != "direction" else "ratio",
                interval,
                "evaluated",
                extra={
                    # Without settings, the next run attacks the layer again.
                    "settings": None if self.interrupted else self.settings,
                    "order": order,
                    "detail": detail,
                },
            )
            for order, (name, interval, detail) in enumerate(found)
        ]

    def until(self, layer: int, search: int) -> float:
        """When a search of a layer ends, on the clock of time.monotonic.

        All searches have equal shares, and what one leaves goes to the next.
        """
        searches = len(TOKEN_SEARCHES)
        share = (searches * self.layers.index(layer) + search + 1) / (searches * len(self.layers))
        return time.monotonic() + self.began + (self.plan.seconds or math.inf) * share - time.time()


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


def _interval(e: Estimate) -> Interval:
    return e.value, e.lower, e.upper


def _plain(place: Place, f: Map) -> SelfAttention:
    """The map as plain self-attention; raises UserError if it is not."""
    if not isinstance(f, SelfAttention):
        raise UserError(
            f"layer {place.site.layer} of {place.model.card.name} is not plain self-attention; "
            "attack it with --kind direction or tokens"
        )
    return f


def _ball(X: Tensor) -> Ball:
    """The smallest ball around the origin that contains the tokens of the text."""
    # A little larger, so that rounding does not push the text itself outside.
    return Ball(X.norm(dim=1).max().item() * (1 + 1e-12), len(X))


def _construction(attack: Attack, place: Place, f: Map, X: Tensor) -> list[Finding]:
    ball = _ball(X)
    found = explicit_inputs(_plain(place, f), ball, seed=attack.plan.seed)
    # Sorted by value, best first: reversed, the best head of each construction is written last.
    best = {one.name.split(", head ")[0]: one for one in reversed(found)}
    where = f"ball of radius {ball.R:.4g}"
    return [
        (name, _interval(one.sigma), ", ".join([where, *one.name.split(", ")[-1:]]))
        for name, one in sorted(best.items(), key=lambda item: -item[1].value)
    ]


def _ascent(attack: Attack, place: Place, f: Map, X: Tensor) -> list[Finding]:
    f = _plain(place, f)
    climb = Climb(QUICK.steps, QUICK.restarts, attack.plan.seed)
    ball = _ball(X)
    near = Around(X, NEAR * ball.R)
    inside = ascend(f, ball, climb, starts=[X]).sigma
    around = ascend(f, near, climb).sigma
    return [
        ("in the ball", _interval(inside), f"ball of radius {ball.R:.4g}"),
        ("near the text", _interval(around), f"within {near.r:.4g} of the text"),
    ]


def _direction(attack: Attack, place: Place, f: Map, X: Tensor) -> list[Finding]:
    found = singular_response(f, X, seed=attack.plan.seed)
    return [
        (f"step {eta:g}", (ratio, ratio, ratio), "‖f(X + ηU) − f(X)‖ / η")
        for eta, ratio in zip(found.etas, found.ratios, strict=True)
    ]


TOKEN_SEARCHES: dict[str, Callable[..., Swapped]] = {
    "gradient": guided_swaps,
    "duplicates": duplicated_tokens,
    "projection": projected_swaps,
    "random": random_swaps,
}


def _tokens(attack: Attack, place: Place, f: Map, X: Tensor) -> list[Finding]:
    plan = attack.plan
    layer = place.site.layer
    assert layer is not None
    ids = place.inputs.batch(place.n, place.samples)[0].tolist()
    target = layer_sigma(place.model, layer, seed=plan.seed)
    found: dict[str, Swapped] = {}
    for number, (name, search) in enumerate(TOKEN_SEARCHES.items()):
        expected = GUIDED_TEXTS * plan.swaps
        options = {"swaps": plan.swaps}
        if name == "random":
            # As many measurements as the guided search used, for a fair comparison.
            expected = found["gradient"].measured - 1 if "gradient" in found else expected
            options |= {"tries": max(1, expected), "seed": plan.seed + 1}

        def report(texts: int, number: int = number, expected: int = expected) -> None:
            part = min(texts / (1 + expected), 1.0)
            place.report((number + part) / len(TOKEN_SEARCHES))

        one, attack.interrupted = search_until(
            partial(search, **options),
            target,
            ids,
            until=attack.until(layer, number),
            part=AT_ONCE,
            report=report,
        )
        if one is not None:
            found[name] = one
        if attack.interrupted:
            break
    # Measured again, to full accuracy and from a random start independent of the search: it
    # selected its text with the starts it used, so a bound from the same start would not hold with
    # the stated probability.
    solver = Solver(seed=fresh_seed(plan.seed, "measure"))
    lines = []
    for name, one in found.items():
        site = place.model.survey(torch.tensor([one.ids])).site("attention", layer)
        sigma = as_batch(local_lipschitz(site.f, site.X, solver=solver))[0]
        words = [place.model.tokens([text[i] for i in one.positions]) for text in (ids, one.ids)]
        changed = [f"{old}→{new} ({i})" for i, old, new in zip(one.positions, *words, strict=True)]
        stopped = ", stopped early" if one.stopped else ""
        lines.append(
            (name, _interval(sigma), f"{', '.join(changed)}; {one.measured} texts{stopped}")
        )
    return lines


KINDS: dict[str, Callable[[Attack, Place, Map, Tensor], list[Finding]]] = {
    "construction": _construction,
    "ascent": _ascent,
    "direction": _direction,
    "tokens": _tokens,
}
