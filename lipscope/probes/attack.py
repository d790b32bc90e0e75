"""Attack the layers of a model: the inputs found, next to sigma at the text."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._checks import check_positive
from lipscope._files import for_terminal
from lipscope._notebook_bar import with_bar
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
from lipscope.study.reading import Text, read
from lipscope.study.records import Row
from lipscope.study.run import Progress, Verb, measure_as
from lipscope.study.store import Store
from lipscope.study.study import Study
from lipscope.study.work import survey, threads_for

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


@dataclass
class Clock:
    """The time of an attack that is divided into equal steps, one per search.

    interrupted: whether Ctrl-C came
    """

    steps: int
    seconds: float = math.inf
    progress: Progress = lambda done, total: None
    done: int = 0
    interrupted: bool = False
    start: float = field(default_factory=time.monotonic)

    @property
    def until(self) -> float:
        """When the current step ends."""
        return self.start + self.seconds * (self.done + 1) / self.steps

    def report(self, part: int, of: int = 1) -> None:
        """Tell how much of the current step is done."""
        self.progress(self.done + min(part / of, 1.0), self.steps)


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
class Scene:
    """One layer to attack: the map and its input at the text."""

    model: Model
    plan: AttackPlan
    layer: int
    ids: list[int]
    f: Map
    X: Tensor
    clock: Clock

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
                f"layer {self.layer} of {self.model.card.name} is not plain self-attention; "
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
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> AttackedModel:
    """Attack the attention of a model, layer by layer.

    Args:
        model: A :class:`Model`, or anything :func:`load` takes.
        text: A string, a file (``Path``), a list of strings or token ids.
        plan: The kind of attack and its settings.
        out: Directory of a study to add the results to. Default: keep them in memory.
        progress: Called with the number of searches done, of which a layer has one or, for the
            kind "tokens", four, and their total. Default: a bar in notebooks, nothing elsewhere.

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
    clock = Clock(1, plan.seconds or math.inf, progress or (lambda done, total: None))
    model = model if isinstance(model, Model) else load(model)
    options = {"--kind": plan.kind, "--length": plan.length, "--swaps": plan.swaps}
    if plan.seconds is not None:
        options["--seconds"] = plan.seconds
    study = measure_as(
        Verb("attack", f"{PROBE}{plan.kind}, ", options),
        model,
        text,
        (plan.length,),
        1,
        plan.layers,
        None,
        ("attention",),
        seed=plan.seed,
        out=out,
    )
    inputs = read(model, text, lengths=(plan.length,), seed=plan.seed)
    seen = survey(model, inputs, plan.length, (0,))
    ids = inputs.batch(plan.length, (0,))[0].tolist()
    # measure has released the lock of the directory; it is taken again to add rows.
    store = study.store if out is None else Store.create(Path(out), study.info)
    lines: list[Line] = []
    layers = range(model.layers) if plan.layers is None else plan.layers
    searches = len(TOKEN_SEARCHES) if plan.kind == "tokens" else 1
    clock.steps = searches * len(layers)
    try:
        for number, layer in enumerate(layers):
            clock.done = searches * number
            clock.report(0)
            site = seen.site("attention", layer)
            f = site.f
            X = site.X[0]
            # Searches need accurate singular vectors: float64, whatever the model is measured in.
            if isinstance(f, SelfAttention):
                f = for_one_sequence(f).double()
                X = X.double()
            with threads_for(tokens=1):
                scene = Scene(model=model, plan=plan, layer=layer, ids=ids, f=f, X=X, clock=clock)
                found = KINDS[plan.kind](scene)
            (sigma,) = (
                r for r in study.largest("attention", layer) if (r.n, r.sample) == (plan.length, 0)
            )
            store.write(_row(sigma, plan.kind, line) for line in found)
            lines += found
            if clock.interrupted:
                break
    finally:
        if out is not None:
            store.close()
    return AttackedModel(Study(store) if out is None else Study.open(Path(out)), lines)


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


def _row(sigma: Row, kind: str, line: Line) -> Row:
    # A finite difference is not a solve: it has no certificate, and as "ratio" it is left out of
    # the study's joint confidence.
    return sigma._replace(
        probe=PROBE + f"{kind}, {line.name}",
        kind="local" if kind != "direction" else "ratio",
        value=line.value,
        lower=line.lower,
        upper=line.upper,
        residual=math.nan,
        status="evaluated",
        seconds=math.nan,
    )


def _construction(scene: Scene) -> list[Line]:
    found = explicit_inputs(scene.plain(), scene.ball, seed=scene.plan.seed)
    # Sorted by value, best first: reversed, the best head of each construction is written last.
    best = {one.name.split(", head ")[0]: one for one in reversed(found)}
    where = f"ball of radius {scene.ball.R:.4g}"
    return [
        scene.line(name, one.sigma, ", ".join([where, *one.name.split(", ")[-1:]]))
        for name, one in sorted(best.items(), key=lambda item: -item[1].value)
    ]


def _ascent(scene: Scene) -> list[Line]:
    f = scene.plain()
    climb = Climb(QUICK.steps, QUICK.restarts, scene.plan.seed)
    ball = scene.ball
    near = Around(scene.X, NEAR * scene.ball.R)
    return [
        scene.line(
            "in the ball",
            ascend(f, ball, climb, starts=[scene.X]).sigma,
            f"ball of radius {ball.R:.4g}",
        ),
        scene.line(
            "near the text", ascend(f, near, climb).sigma, f"within {near.r:.4g} of the text"
        ),
    ]


def _direction(scene: Scene) -> list[Line]:
    found = singular_response(scene.f, scene.X, seed=scene.plan.seed)
    return [
        Line(
            layer=scene.layer,
            n=len(scene.X),
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


def _tokens(scene: Scene) -> list[Line]:
    plan = scene.plan
    clock = scene.clock
    target = layer_sigma(scene.model, scene.layer, seed=plan.seed)
    found: dict[str, Swapped] = {}
    for name, search in TOKEN_SEARCHES.items():
        expected = GUIDED_TEXTS * plan.swaps
        options = {"swaps": plan.swaps}
        if name == "random":
            # As many measurements as the guided search used, for a fair comparison.
            expected = found["gradient"].measured - 1 if "gradient" in found else expected
            options |= {"tries": max(1, expected), "seed": plan.seed + 1}
        one, clock.interrupted = search_until(
            partial(search, **options),
            target,
            scene.ids,
            until=clock.until,
            part=AT_ONCE,
            report=partial(clock.report, of=1 + expected),
        )
        if one is not None:
            found[name] = one
        if clock.interrupted:
            break
        clock.done += 1
    return [
        scene.line(name, _measured(scene, one), _in_words(scene.model, scene.ids, one))
        for name, one in found.items()
    ]


def _measured(scene: Scene, one: Swapped) -> Estimate:
    """Measure again, to full accuracy and from a random start independent of the search.

    The search selected its text with the starts it used, so a bound from the same start would not
    hold with the stated probability.
    """
    site = scene.model.survey(torch.tensor([one.ids])).site("attention", scene.layer)
    solver = Solver(seed=fresh_seed(scene.plan.seed, "measure"))
    return as_batch(local_lipschitz(site.f, site.X, solver=solver))[0]


def _in_words(model: Model, ids: Sequence[int], one: Swapped) -> str:
    changed = [(model.tokens([ids[i]])[0], model.tokens([one.ids[i]])[0], i) for i in one.positions]
    return ", ".join(f"{old}→{new} ({i})" for old, new, i in changed) + (
        f"; {one.measured} texts{', stopped early' if one.stopped else ''}"
    )


KINDS: dict[str, Callable[[Scene], list[Line]]] = {
    "construction": _construction,
    "ascent": _ascent,
    "direction": _direction,
    "tokens": _tokens,
}
