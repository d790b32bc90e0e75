"""The attacks on a model, layer by layer: what was found, beside sigma at the text, as a table and as rows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from lipscope._files import for_terminal
from lipscope._types import Around, Ball, UserError
from lipscope.attack.ascent import Climb, ascend
from lipscope.attack.constructions import explicit_inputs
from lipscope.attack.direction import singular_response
from lipscope.attack.tokens import (
    Swapped,
    duplicated_tokens,
    guided_swaps,
    projected_swaps,
    random_swaps,
)
from lipscope.attention.layer import SelfAttention
from lipscope.audit.heads import QUICK, for_one_sequence
from lipscope.audit.token_target import layer_sigma
from lipscope.linalg.estimate import Estimate, many
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver, fresh_seed
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.models.sites import Map
from lipscope.study.reading import Choice, Text, read
from lipscope.study.records import Row
from lipscope.study.run import measure
from lipscope.study.store import Store
from lipscope.study.study import Study
from lipscope.study.work import survey, threads_for
from lipscope.study.writer import Progress

PROBE = "attack: "
NEAR = 0.1
"""Radius of the neighbourhood of the text that ascent looks at, as a share of its largest token."""


@dataclass(frozen=True)
class Plan:
    """Which attack on which layers, on how many tokens of the text, and how many of them it may replace."""

    kind: str
    length: int = 32
    swaps: int = 3
    layers: Sequence[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(
                f"there is no attack {self.kind!r}; the kinds are {', '.join(KINDS)} and compare."
            )
        if self.kind == "tokens" and not 1 <= self.swaps <= self.length:
            raise UserError(
                f"cannot replace {self.swaps} tokens in a text of {self.length}: swaps must be 1 to {self.length}."
            )


class Line(NamedTuple):
    """One result: its sigma, or a change per unit of step; and in words where it is."""

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
    plan: Plan
    layer: int
    ids: list[int]
    f: Map
    X: Tensor

    @property
    def ball(self) -> Ball:
        return Ball(self.X.norm(dim=1).max().item() * (1 + 1e-12), len(self.X))

    def line(self, name: str, e: Estimate, detail: str = "") -> Line:
        return Line(self.layer, len(self.X), name, e.value, e.lower, e.upper, detail)

    def plain(self) -> SelfAttention:
        if not isinstance(self.f, SelfAttention):
            raise UserError(
                f"layer {self.layer} of {self.model.card.name} is not plain self-attention; "
                "attack it by --kind direction or tokens."
            )
        return self.f


def attack_model(
    model: Any,
    text: Text,
    plan: Plan,
    *,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> tuple[Study, list[Line]]:
    """Attacks the attention of each layer asked for; with `out` the results join the study there."""
    model = model if isinstance(model, Model) else load(model)
    study = measure(
        model, text, (plan.length,), 1, plan.layers, None, ("attention",), seed=plan.seed, out=out
    )
    inputs = read(
        model, text, None, Choice((plan.length,), 1, plan.seed, special_tokens=False)
    ).inputs
    seen = survey(model, inputs, plan.length, (0,))
    ids = inputs.batch(plan.length, (0,))[0].tolist()
    store = study._store if out is None else Store.create(Path(out), study.info)
    lines: list[Line] = []
    layers = range(model.layers) if plan.layers is None else plan.layers
    try:
        for done, layer in enumerate(layers):
            if progress is not None:
                progress(done, len(layers))
            site = seen.site("attention", layer)
            f, X = site.f, site.X[0]
            if isinstance(f, SelfAttention):
                f, X = for_one_sequence(f).double(), X.double()
            with threads_for(tokens=1):
                found = KINDS[plan.kind](Scene(model, plan, layer, ids, f, X))
            (sigma,) = (
                r for r in study.largest("attention", layer) if (r.n, r.sample) == (plan.length, 0)
            )
            store.write(_row(sigma, plan.kind, line) for line in found)
            lines += found
    finally:
        if out is not None:
            store.close()
    return (Study(store) if out is None else Study.open(Path(out))), lines


def attack_table(study: Study, lines: Sequence[Line]) -> Table:
    """Each result beside sigma of its layer at the text."""
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
    best = {one.name.split(", head ")[0]: one for one in reversed(found)}
    where = f"ball of radius {scene.ball.R:.4g}"
    return [
        scene.line(name, one.sigma, ", ".join([where, *one.name.split(", ")[-1:]]))
        for name, one in sorted(best.items(), key=lambda item: -item[1].value)
    ]


def _ascent(scene: Scene) -> list[Line]:
    f, climb = scene.plain(), Climb(QUICK.steps, QUICK.restarts, scene.plan.seed)
    ball, near = scene.ball, Around(scene.X, NEAR * scene.ball.R)
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
            scene.layer,
            len(scene.X),
            f"step {eta:g}",
            ratio,
            ratio,
            ratio,
            "‖f(X + ηU) − f(X)‖ / η",
        )
        for eta, ratio in zip(found.etas, found.ratios, strict=True)
    ]


def _tokens(scene: Scene) -> list[Line]:
    target, ids, swaps = (
        layer_sigma(scene.model, scene.layer, seed=scene.plan.seed),
        scene.ids,
        scene.plan.swaps,
    )
    guided = guided_swaps(target, ids, swaps)
    found = [guided, duplicated_tokens(target, ids, swaps), projected_swaps(target, ids, swaps)]
    found.append(
        random_swaps(target, ids, swaps, tries=guided.measured - 1, seed=scene.plan.seed + 1)
    )
    return [
        scene.line(one.method, _measured(scene, one), _in_words(scene.model, ids, one))
        for one in found
    ]


def _measured(scene: Scene, one: Swapped) -> Estimate:
    """The number once more, to full accuracy and from a start that the search did not know."""
    site = scene.model.survey(torch.tensor([one.ids])).site("attention", scene.layer)
    solver = Solver(seed=fresh_seed(scene.plan.seed, "measure"))
    return many(local_lipschitz(site.f, site.X, solver=solver))[0]


def _in_words(model: Model, ids: Sequence[int], one: Swapped) -> str:
    changed = [(model.tokens([ids[i]])[0], model.tokens([one.ids[i]])[0], i) for i in one.positions]
    return ", ".join(f"{old}→{new} ({i})" for old, new, i in changed) + f"; {one.measured} texts"


KINDS: dict[str, Callable[[Scene], list[Line]]] = {
    "construction": _construction,
    "ascent": _ascent,
    "direction": _direction,
    "tokens": _tokens,
}
