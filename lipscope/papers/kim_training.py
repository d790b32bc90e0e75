"""Claims K4, K5, K7 and K8: character models by attention, depth and learning rate.

The paper trains on Penn Treebank; its widths, batches and numbers of steps were not at hand, so
the plans below are lipscope's own, and every verdict is about them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise, product
from statistics import mean
from typing import Any

import torch

from lipscope.papers.charlm.language_model import VARIANTS, described
from lipscope.papers.claims import Claim, NotAvailable, Numbers, Quoted, Verdict, judged
from lipscope.papers.page import Line, Picture
from lipscope.papers.setting import Setting, penn_treebank
from lipscope.papers.trainings import (
    Plan,
    best_rate,
    by_rate,
    cells_of,
    outcomes,
    strict,
    train_cell,
)

COMPARED = ("dot", "L2 tied", "contractive")
"""The kinds of attention that the paper trains at a fixed rate."""

CLOSE = 0.05
"""Losses are called close within this share; the paper says "very similar" and shows no number
that was at hand."""

USUAL = Plan(
    depths=(2, 6),
    rates=(1e-3, 3e-3),
    variants=tuple(VARIANTS),
    norm="post",
    batch=32,
    steps=600,
    seeds=2,
)
"""Warm-up, decay and clipping: what each kind of attention can learn."""

FIXED = replace(
    USUAL,
    depths=(2, 6, 10, 12, 18),
    rates=(3e-4, 5e-4, 1e-3, 2e-3),
    variants=COMPARED,
    batch=16,
    steps=300,
    warmup=0,
    decay=False,
    clip=None,
    every=25,
)
"""A fixed rate from the first step: where training breaks."""

FIXED_PRE = replace(FIXED, depths=(6, 18), rates=(1e-2, 3e-2, 1e-1), norm="pre")
"""The same with the norms before the branches, where larger rates can be used."""

SMALL: dict[str, Any] = {"width": 16, "heads": 2, "context": 16, "batch": 8, "seeds": 1}
PLANS = {"usual": USUAL, "fixed rate": FIXED, "fixed rate, pre-norm": FIXED_PRE}
QUICK_PLANS = {
    "usual": replace(USUAL, **SMALL, depths=(1, 3), rates=(1e-2,), steps=100, tested=64),
    "fixed rate": replace(
        FIXED, **SMALL, depths=(6, 18), rates=(3e-3, 6e-3), steps=60, every=10, tested=64
    ),
}


def trained(start: str, setting: Setting) -> Numbers:
    """The cells of the plans whose names start so, as `benchmarks.training_grid` stores them.

    A figure and the table beside it share their models.
    """
    return setting.shared(("trained", start), lambda: _trained(setting, start))


def _trained(setting: Setting, start: str) -> Numbers:
    known = QUICK_PLANS if setting.quick else PLANS
    plans = {name: plan for name, plan in known.items() if name.startswith(start)}
    text = penn_treebank(setting, max(plan.context for plan in plans.values()))
    if not setting.quick and not setting.device.startswith("cuda"):
        raise NotAvailable(
            "a GPU: give --device cuda (minutes on one GPU); --quick trains small models on a CPU"
        )
    # Deep models take longer: progress counts blocks.
    total = sum(len(plan.variants) * sum(plan.depths) for plan in plans.values())
    before = 0
    cells = {}

    def progress(depth: int, share: float) -> None:
        setting.progress(before + share * depth, total)

    for name, plan in plans.items():
        for variant, depth in product(plan.variants, plan.depths):
            said = partial(progress, depth)
            cell = train_cell(plan, VARIANTS[variant], depth, text, setting.device, said)[2]
            cells[f"{name}/{variant}/{depth}"] = strict(cell)
            before += depth
    return {
        "settings": {
            "unigram_loss": text.unigram_loss,
            "plans": {name: asdict(plan) for name, plan in plans.items()},
            "torch": torch.__version__,
        },
        "bigram_loss": text.bigram_loss,
        "cells": cells,
    }


def best_losses(numbers: Numbers) -> dict[str, dict[int, list[float]]]:
    """The lowest test loss of every seed along training, at the best rate, by variant and depth.

    Along training, because a short text is learned by heart in the end.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for (variant, depth), cell in cells_of(numbers, "usual").items():
        curves = zip(*(point["test"] for point in cell["curve"]), strict=True)
        lowest = [min((x for x in curve if x is not None), default=math.inf) for curve in curves]
        by_seed = [[lowest[m] for m in members] for members in by_rate(cell).values()]
        found.setdefault(variant, {})[depth] = min(by_seed, key=mean)
    return found


def judge_order(numbers: Numbers, quoted: Quoted) -> Verdict:
    best = best_losses(numbers)
    means = {
        variant: {depth: mean(losses) for depth, losses in row.items()}
        for variant, row in best.items()
    }
    shallow, deep = (choose(means["dot"]) for choose in (min, max))
    placed = pairwise((name, means[name][deep]) for name in COMPARED)
    gained = means["contractive"][shallow] - means["contractive"][deep]
    missed = [f"{b} is ahead of {a}" for (a, x), (b, y) in placed if y < x]
    if not gained > 0:
        missed.append("contractive L2 gains nothing with depth")
    spread = max(max(row[deep]) - min(row[deep]) for row in best.values())
    several = len(best["dot"][deep]) > 1
    reason = (
        f"test loss at depth {deep}: "
        + ", ".join(f"{described(name)} {row[deep]:.3f}" for name, row in means.items())
        + (f"; seeds differ by up to {spread:.3f}" if several else "; one seed")
        + f"; contractive L2 gains {gained:.3f} from depth {shallow} to {deep}"
        + "".join(f"; {words}" for words in missed)
    )
    return judged(not missed, f"{reason} (nats per character, {_size(numbers, 'usual')})")


def judge_close(numbers: Numbers, quoted: Quoted) -> Verdict:
    best = {variant: min(row.values(), key=mean) for variant, row in best_losses(numbers).items()}
    dot = best["dot"]
    behind = {name: mean(best[name]) / mean(dot) - 1 for name in ("L2 untied", "L2 tied")}
    interval = min(best["L2 tied"]) / max(dot) - 1, max(best["L2 tied"]) / min(dot) - 1
    reason = (
        f"best over depths: dot product {mean(dot):.3f}, L2 tied {behind['L2 tied']:+.1%}, untied "
        f"(not Lipschitz) {behind['L2 untied']:+.1%}, contractive "
        f"{mean(best['contractive']) / mean(dot) - 1:+.1%}; close means within {CLOSE:.0%} "
        f"({_size(numbers, 'usual')})"
    )
    return judged(behind["L2 tied"] <= CLOSE, reason, interval)


def _size(numbers: Numbers, plan: str) -> str:
    p = numbers["settings"]["plans"][plan]
    return f"width {p['width']}, {p['steps']} steps of {p['batch']} windows of {p['context']}"


def stable_rates(numbers: Numbers, plan: str) -> dict[str, dict[int, list[float]]]:
    """The rates at which every seed learned, by variant and depth."""
    unigram = numbers["settings"]["unigram_loss"]
    found: dict[str, dict[int, list[float]]] = {}
    for (variant, depth), cell in cells_of(numbers, plan).items():
        rates = [rate for rate, end in outcomes(cell, unigram).items() if end.fine]
        found.setdefault(variant, {})[depth] = rates
    return found


def separating_rates(numbers: Numbers, plan: str, shallow: float, deep: float) -> list[float]:
    """Rates at which dot product trains up to `shallow` and not to `deep`, the others to `deep`."""
    fine = stable_rates(numbers, plan)

    def trains(variant: str, rate: float, least: float, most: float) -> bool:
        return all(rate in rates for d, rates in fine[variant].items() if least < d <= most)

    return [
        rate
        for rate in numbers["settings"]["plans"][plan]["rates"]
        if trains("dot", rate, 0, shallow)
        and not trains("dot", rate, shallow, deep)
        and all(trains(name, rate, 0, deep) for name in COMPARED[1:])
    ]


def judge_stability(numbers: Numbers, quoted: Quoted) -> Verdict:
    shallow = quoted["dot product trains to depth"]
    deep = quoted["L2 trains to depth"]
    parts = []
    for plan in numbers["settings"]["plans"]:
        rates = separating_rates(numbers, plan, shallow, deep)
        fine = stable_rates(numbers, plan)
        last = "; ".join(
            f"depth {depth}: "
            + ", ".join(f"{name} {max(fine[name][depth], default='none')}" for name in COMPARED)
            for depth in numbers["settings"]["plans"][plan]["depths"]
        )
        tried = ", ".join(f"{rate:g}" for rate in numbers["settings"]["plans"][plan]["rates"])
        seen = f"at {', '.join(f'{r:g}' for r in rates)}" if rates else "at none"
        parts.append(
            f"{plan}: dot product fails between depths {shallow:g} and {deep:g} where both others "
            f"train to {deep:g}, {seen} of the rates {tried}; largest rate at which every "
            f"seed learned, {last}"
        )
    holds = bool(separating_rates(numbers, "fixed rate", shallow, deep))
    return judged(
        holds, f"{'. '.join(parts)} ({_size(numbers, 'fixed rate')}; post-norm unless it says pre)"
    )


def judge_best_fixed(numbers: Numbers, quoted: Quoted) -> Verdict:
    unigram = numbers["settings"]["unigram_loss"]
    best: dict[str, tuple[float, int]] = {}
    for (variant, depth), cell in cells_of(numbers, "fixed rate").items():
        ends = [mean(e.learned) for e in outcomes(cell, unigram).values() if e.fine]
        if ends:
            best[variant] = min(best.get(variant, (math.inf, 0)), (min(ends), depth))
    missing = [name for name in COMPARED if name not in best]
    if missing:
        return judged(False, f"no rate and depth at which every seed of {missing[0]} learned")
    losses = [loss for loss, _ in best.values()]
    spread = max(losses) / min(losses) - 1
    reason = (
        "best test loss at a fixed rate: "
        + ", ".join(f"{name} {loss:.3f} at depth {depth}" for name, (loss, depth) in best.items())
        + f"; they differ by {spread:.1%}, close means within {CLOSE:.0%} "
        f"({_size(numbers, 'fixed rate')})"
    )
    return judged(spread <= CLOSE, reason, (0.0, spread))


def plot_curves(numbers: Numbers) -> Picture:
    """Test loss over steps at the largest depth, and the table of all depths."""
    deep = max(numbers["settings"]["plans"]["usual"]["depths"])
    lines = []
    for (variant, depth), cell in cells_of(numbers, "usual").items():
        points = [
            (point["step"], mean(values))
            for point in cell["curve"]
            if None not in (values := [point["test"][m] for m in best_rate(cell)[1]])
        ]
        if depth == deep and points:
            x, y = zip(*points, strict=True)
            lines.append(Line(described(variant), x, y))
    table = losses_table(numbers)
    return replace(
        table,
        title=f"Test loss along training at depth {deep}, and its lowest by depth",
        x="step",
        y="test loss, nats per character",
        lines=lines,
        log="",
    )


def losses_table(numbers: Numbers) -> Picture:
    depths = numbers["settings"]["plans"]["usual"]["depths"]
    return Picture(
        title="Lowest test loss along training at the best rate, nats per character, by depth",
        columns=["model", *(f"depth {depth}" for depth in depths)],
        rows=[
            [described(name), *(f"{mean(row[depth]):.3f}" for depth in depths)]
            for name, row in best_losses(numbers).items()
        ],
    )


def plot_stability(numbers: Numbers) -> Picture:
    """The largest rate at which every seed learned, by depth; the table has every rate."""
    plan = numbers["settings"]["plans"]["fixed rate"]
    unigram = numbers["settings"]["unigram_loss"]
    fine = stable_rates(numbers, "fixed rate")
    lines = []
    for name in COMPARED:
        points = [(depth, max(rates)) for depth, rates in fine[name].items() if rates]
        if points:
            x, y = zip(*points, strict=True)
            lines.append(Line(name, x, y))
    cells = cells_of(numbers, "fixed rate")
    return Picture(
        title="Largest fixed learning rate at which every seed learned, post-norm",
        x="depth",
        y="learning rate",
        lines=lines,
        log="y",
        columns=["attention, depth", *(f"rate {rate:g}" for rate in plan["rates"])],
        rows=[
            [f"{variant}, {depth}", *map(str, outcomes(cell, unigram).values())]
            for (variant, depth), cell in cells.items()
        ],
    )


run_usual = partial(trained, "usual")
run_fixed = partial(trained, "fixed rate")

CLAIMS = [
    Claim("K4", run_usual, judge_order, plot_curves, needs="Penn Treebank, gpu"),
    Claim("K5", run_usual, judge_close, losses_table, needs="Penn Treebank, gpu"),
    Claim("K7", run_fixed, judge_stability, plot_stability, needs="Penn Treebank, gpu"),
    Claim("K8", run_fixed, judge_best_fixed, plot_stability, needs="Penn Treebank, gpu"),
]
