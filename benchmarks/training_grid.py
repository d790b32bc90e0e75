"""Test loss of character models by attention and depth, and where training breaks; resumable.

    python -m benchmarks.training_grid TEXT --file benchmarks/results/training_h200.json  # resumes
    python -m benchmarks.training_grid TEXT --file small.json --size small --match "pre norm"  # CPU
    python -m benchmarks.training_grid TEXT --file FILE --match "^balls/" --seconds 420  # 9 minutes

A cell is one architecture; its seeds and learning rates are trained together. Training "breaks"
when the test loss at the end is not finite, or above the unigram baseline, or more than 0.5 nats
above its own best; it is "stuck" when it did not break and ends less than 0.1 below that baseline.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import lipscope as ls
from benchmarks.training_plans import GRID, PLANS, SIZES, VARIANTS
from lipscope.papers.charlm.characters import CharacterText, read_characters
from lipscope.papers.charlm.language_model import CharacterTransformer, Variant
from lipscope.papers.charlm.training import layer_constants
from lipscope.papers.trainings import History, Plan, Stack, strict, train_cell

OPENING = 10
"""Number of first steps whose losses are all recorded."""

HOPELESS = 10.0
"""A test loss above which sigma is not measured."""


def keep(path: Path, content: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(strict(content), allow_nan=False))
    os.replace(draft, path)


def settings(text: CharacterText, plans: dict[str, Plan], device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {
        "text_sha256": text.digest,
        "unigram_loss": text.unigram_loss,
        "device": name,
        "torch": torch.__version__,
        "arithmetic": "float32, no TF32",
        "optimiser": "Adam, betas 0.9 and 0.98, no weight decay",
        "plans": {name: asdict(plan) for name, plan in plans.items()},
    }


def run_cell(
    plan: Plan, variant: Variant, depth: int, text: CharacterText, device: str
) -> dict[str, Any]:
    """Train a cell; measure sigma of every layer, and the error of the inverse, at the end."""
    start = time.perf_counter()
    stack, history, cell = train_cell(plan, variant, depth, text, device)
    tested = time.perf_counter() - start
    final = cell["final"]
    members = enumerate(cell["members"])
    measured = [m for m, (_, seed) in members if seed == 0 and final[m] < HOPELESS]
    return {
        **cell,
        **first_steps(history),
        **_constants(stack, measured, text),
        "seconds_testing": tested - cell["seconds_training"],
        "seconds_sigma": time.perf_counter() - start - tested,
        "gibibytes": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }


def _constants(stack: Stack, members: list[int], text: CharacterText) -> dict[str, Any]:
    """sigma of every layer of these members, and the error of the inverse where there is one."""
    a = stack.architecture
    ids = text.test_windows(1, a.context)[0][0].to(stack.theta.device)
    models = {m: stack.model(m) for m in members}
    inverse = {
        m: inverse_error(model, ids)
        for m, model in models.items()
        if a.invertible and a.norm != "none" and isinstance(model, CharacterTransformer)
    }
    return {
        "sigma": {m: layer_constants(model, ids) for m, model in models.items()},
        "inverse_error": inverse,
    }


def first_steps(history: History) -> dict[str, Any]:
    """The first steps of each member, and where its loss first rose 0.5 above its best.

    opening:  the losses of the first steps
    rise:     steps done when the training loss first was 0.5 above its best so far, or not finite
    gradient: the norm at the start, and its largest before that rise; weights: the same
    """
    losses = history.losses.double().nan_to_num(math.inf)
    rose = ~(losses <= losses.cummin(0).values + 0.5) | losses.isinf()
    rise = [int(column.nonzero()[0]) if column.any() else None for column in rose.T]
    before = torch.arange(len(losses))[:, None] < torch.tensor(
        [len(losses) if r is None else r for r in rise]
    )
    sizes = {"gradient": history.gradients, "weights": history.weights}
    return {
        "opening": history.losses[:OPENING].tolist(),
        "rise": rise,
        **{
            name: {"start": x[0].tolist(), "largest": x.where(before, 0.0).amax(0).tolist()}
            for name, x in sizes.items()
        },
    }


@torch.no_grad()
def inverse_error(model: CharacterTransformer, ids: torch.Tensor) -> float:
    """Relative error in float32 of the embedded characters recovered from the trunk's output.

    NaN if the iteration met values that are not finite.
    """
    X = model.embed(ids)
    try:
        found = model.trunk_inverse(model.trunk(X))
    except ls.UserError:
        return math.nan
    return float((found - X).norm() / X.norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--match", default="", help="only cells whose name has this pattern")
    parser.add_argument("--steps", type=int, help="another number of steps, to try things out")
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no cell after this many seconds"
    )
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plans = {name: replace(plan, **SIZES[options.size]) for name, plan in PLANS.items()}
    plans = {name: replace(plan, steps=options.steps or plan.steps) for name, plan in plans.items()}
    text = read_characters(options.text, GRID.context)
    content = {"settings": strict(settings(text, plans, device)), "cells": {}}
    if options.file.exists():
        found = json.loads(options.file.read_text())
        # Plans may be added to an experiment; what is there already must be what it was.
        older = {**content["settings"], "plans": {**found["settings"]["plans"]}}
        planned = content["settings"]["plans"]
        if found["settings"] != older or not older["plans"].items() <= planned.items():
            raise SystemExit(
                f"{options.file} holds an experiment with other settings; give another --file"
            )
        content = {**found, "settings": content["settings"]}
    content["bigram_loss"] = strict(text.bigram_loss)
    start = time.perf_counter()
    for name, plan in plans.items():
        for depth, variant in product(plan.depths, plan.variants):
            key = f"{name}/{variant}/{depth}"
            late = time.perf_counter() - start > options.seconds
            if key in content["cells"] or late or not re.search(options.match, key):
                continue
            cell = run_cell(plan, VARIANTS[variant], depth, text, device)
            content["cells"][key] = cell
            keep(options.file, content)
            spent = ", ".join(
                f"{part} {cell[f'seconds_{part}']:.1f} s"
                for part in ("training", "testing", "sigma")
            )
            print(
                f"{key}: {spent}, {cell['gibibytes']} GiB; test",
                *map("{:.3f}".format, cell["final"]),
                flush=True,
            )


if __name__ == "__main__":
    main()
