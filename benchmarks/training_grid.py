"""Test loss of character models by attention and depth, and where training breaks; every cell kept once it is done.

    python -m benchmarks.training_grid TEXT --file benchmarks/results/training_h200.json    # goes on where it stopped
    python -m benchmarks.training_grid TEXT --file small.json --size small --match norm      # for a CPU

A cell is one architecture; its seeds and learning rates are trained together. Training "breaks" when the test loss at
the end is not finite, or above what the frequencies of characters alone cost, or more than 0.5 nats above its own best.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.stacked_training import Schedule, Stack
from lipscope._types import UserError
from lipscope.nn.characters import CharacterText, read_characters
from lipscope.nn.language_model import Architecture, CharacterTransformer
from lipscope.nn.layer_constants import layer_constants

VARIANTS = {
    "dot": {"attention": "dot"},
    "l2": {"attention": "l2"},
    "contractive": {"attention": "contractive"},
    "invertible": {"attention": "contractive", "invertible": True},
}


@dataclass(frozen=True)
class Plan:
    """The sizes of an experiment: every cell gets the same steps, windows and width."""

    depths: tuple[int, ...]
    rates: tuple[float, ...]
    variants: tuple[str, ...]
    norm: bool = True
    width: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 64
    steps: int = 800
    seeds: int = 3
    warmup: int = 100
    decay: bool = True
    clip: float | None = 1.0
    every: int = 50
    tested: int = 1_000_000

    def rate(self, step: int) -> float:
        rising = min(1.0, (step + 1) / (self.warmup + 1))
        return rising * (0.55 + 0.45 * math.cos(math.pi * step / self.steps) if self.decay else 1.0)


GRID = Plan(depths=(2, 6, 12), rates=(1e-3, 3e-3), variants=tuple(VARIANTS))
HARD = Plan(
    depths=(12, 24),
    rates=(1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1),
    variants=tuple(VARIANTS),
    norm=False,
    batch=16,
    steps=200,
    warmup=0,
    decay=False,
    clip=None,
    every=25,
)
PLANS = {"grid": GRID, "no norm": HARD, "norm": replace(HARD, variants=("dot", "l2"), norm=True)}
"""Equal budgets with what one usually takes for granted; then no warm-up, no decay, no clipping, and no norm."""

SIZES: dict[str, dict[str, int]] = {
    "full": {},
    "small": {"width": 32, "heads": 2, "context": 32, "batch": 8, "seeds": 2, "tested": 256},
    "tiny": {"width": 16, "heads": 2, "context": 16, "batch": 4, "seeds": 2, "tested": 8, "steps": 6, "every": 3},
}
"""The experiment, the same in minutes on a CPU, and in seconds to see that it runs."""


def run_cell(plan: Plan, variant: str, depth: int, text: CharacterText, device: str) -> dict[str, Any]:
    """Train every seed at every learning rate together; losses by rate, then seed."""
    architecture = Architecture(
        len(text.alphabet),
        depth=depth,
        width=plan.width,
        heads=plan.heads,
        context=plan.context,
        norm=plan.norm,
        **VARIANTS[variant],  # type: ignore[arg-type]
    )
    members = [(rate, seed) for rate in plan.rates for seed in range(plan.seeds)]
    start = time.perf_counter()
    stack = Stack(architecture, [seed for _, seed in members], [rate for rate, _ in members], device)
    curve: list[dict[str, Any]] = []

    def note(step: int, learned: torch.Tensor) -> None:
        curve.append({"step": step, "training": learned.tolist(), "test": stack.test_losses(text, 64).tolist()})

    stack.train(text, Schedule(plan.steps, plan.batch, plan.rate, plan.clip), plan.every, note)
    trained = time.perf_counter() - start
    final = stack.test_losses(text, plan.tested).tolist()
    tested = time.perf_counter() - start
    ids = text.test_windows(1, plan.context)[0][0].to(stack.theta.device)
    measured = [m for m, (_, seed) in enumerate(members) if seed == 0 and math.isfinite(final[m])]
    models = {m: stack.model(m) for m in measured}
    sigma = {m: layer_constants(model, ids) for m, model in models.items()}
    inverted = measured if architecture.invertible and plan.norm else []
    inverse = {m: inverse_error(models[m], ids) for m in inverted}
    return {
        "members": members,
        "parameters": sum(torch.Size(s).numel() for s in stack._shapes.values()),
        "final": final,
        "curve": curve,
        "sigma": sigma,
        "inverse_error": inverse,
        "seconds_training": trained,
        "seconds_testing": tested - trained,
        "seconds_sigma": time.perf_counter() - start - tested,
        "gibibytes": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }


@torch.no_grad()
def inverse_error(model: CharacterTransformer, ids: torch.Tensor) -> float:
    """How far the embedded characters are from those found back from the trunk's output, relative, in float32."""
    X = model.embed(ids)
    try:
        found = model.trunk_inverse(model.trunk(X))
    except UserError as error:
        print(error, flush=True)
        return math.nan
    return float((found - X).norm() / X.norm())


def broke(final: float | None, curve: list[float | None], unigram: float) -> bool:
    """What was called breaking before anything was run; None is what was not finite."""
    best = min((x for x in curve if x is not None), default=math.inf)
    return final is None or final > unigram or final > best + 0.5


def keep(path: Path, content: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(strict(content), allow_nan=False))
    os.replace(draft, path)


def strict(x: Any) -> Any:
    """null for what is not finite, and float32's own seven digits."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--match", default="", help="only cells whose name has this pattern")
    parser.add_argument("--steps", type=int, help="another number of steps, to try things out")
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after so many")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plans = {name: replace(plan, **SIZES[options.size]) for name, plan in PLANS.items()}  # type: ignore[arg-type]
    plans = {name: replace(plan, steps=options.steps or plan.steps) for name, plan in plans.items()}
    text = read_characters(options.text, GRID.context)
    content = {"settings": strict(settings(text, plans, device)), "cells": {}}
    if options.file.exists():
        found = json.loads(options.file.read_text())
        if found["settings"] != content["settings"]:
            raise SystemExit(f"{options.file} holds an experiment with other settings; give another --file")
        content = found
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
            spent = ", ".join(f"{part} {cell[f'seconds_{part}']:.1f} s" for part in ("training", "testing", "sigma"))
            print(f"{key}: {spent}, {cell['gibibytes']} GiB; test", *map("{:.3f}".format, cell["final"]), flush=True)


if __name__ == "__main__":
    main()
