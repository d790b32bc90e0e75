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

from benchmarks.stacked_training import History, Schedule, Stack
from benchmarks.training_plans import GRID, PLANS, SIZES, VARIANTS, Plan
from lipscope._types import UserError
from lipscope.charlm.characters import CharacterText, read_characters
from lipscope.charlm.language_model import CharacterTransformer
from lipscope.charlm.training import layer_constants

OPENING = 10
"""Number of first steps whose losses are all recorded."""

HOPELESS = 10.0
"""A test loss above which sigma is not measured."""


def run_cell(
    plan: Plan, variant: str, depth: int, text: CharacterText, device: str
) -> dict[str, Any]:
    """Train every seed at every learning rate together; losses by rate, then seed."""
    kind = VARIANTS[variant]
    architecture = plan.architecture(len(text.alphabet), kind, depth)
    members = [(rate, seed) for rate in plan.rates for seed in range(plan.seeds)]
    start = time.perf_counter()
    stack = Stack(
        architecture,
        [seed for _, seed in members],
        [rate for rate, _ in members],
        device,
        kind.make,
    )
    curve: list[dict[str, Any]] = []

    def note(step: int, learned: torch.Tensor) -> None:
        curve.append(
            {
                "step": step,
                "training": learned.tolist(),
                "test": stack.test_losses(text, 64).tolist(),
            }
        )

    history = stack.train(
        text, Schedule(plan.steps, plan.batch, plan.rate, plan.clip), plan.every, note
    )
    trained = time.perf_counter() - start
    final = stack.test_losses(text, plan.tested).tolist()
    tested = time.perf_counter() - start
    ids = text.test_windows(1, plan.context)[0][0].to(stack.theta.device)
    measured = [m for m, (_, seed) in enumerate(members) if seed == 0 and final[m] < HOPELESS]
    models = {m: stack.model(m) for m in measured}
    sigma = {m: layer_constants(model, ids) for m, model in models.items()}
    inverted = measured if architecture.invertible and plan.norm != "none" else []
    inverse = {m: inverse_error(models[m], ids) for m in inverted}
    return {
        "members": members,
        "parameters": sum(torch.Size(s).numel() for s in stack._shapes.values()),
        "final": final,
        "curve": curve,
        **described(history),
        "sigma": sigma,
        "inverse_error": inverse,
        "seconds_training": trained,
        "seconds_testing": tested - trained,
        "seconds_sigma": time.perf_counter() - start - tested,
        "gibibytes": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }


def described(history: History) -> dict[str, Any]:
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
    """Relative error in float32 of the embedded characters recovered from the trunk's output."""
    X = model.embed(ids)
    try:
        found = model.trunk_inverse(model.trunk(X))
    except UserError as error:
        print(error, flush=True)
        return math.nan
    return float((found - X).norm() / X.norm())


def keep(path: Path, content: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(strict(content), allow_nan=False))
    os.replace(draft, path)


def strict(x: Any) -> Any:
    """Numbers for JSON: null if not finite, else the seven digits of float32."""
    if isinstance(x, dict):
        return {str(key): strict(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [strict(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.7g}") if math.isfinite(x) else None
    return x


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
            cell = run_cell(plan, variant, depth, text, device)
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
