"""One cell of an experiment on training: an architecture at every seed and learning rate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lipscope._types import UserError
from lipscope.papers.character_models import Variant
from lipscope.papers.charlm.characters import CharacterText
from lipscope.papers.charlm.language_model import Architecture, CharacterTransformer
from lipscope.papers.charlm.training import layer_constants
from lipscope.papers.stacked_training import History, Schedule, Stack

OPENING = 10
"""Number of first steps whose losses are all recorded."""

HOPELESS = 10.0
"""A test loss above which sigma is not measured."""


@dataclass(frozen=True)
class Plan:
    """The sizes of an experiment: every cell gets the same steps, windows and width."""

    depths: tuple[int, ...]
    rates: tuple[float, ...]
    variants: tuple[str, ...]
    norm: str = "pre"
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
        """The factor of the learning rate at a step."""
        rising = min(1.0, (step + 1) / (self.warmup + 1))
        return rising * (0.55 + 0.45 * math.cos(math.pi * step / self.steps) if self.decay else 1.0)

    def architecture(self, vocabulary: int, variant: Variant, depth: int) -> Architecture:
        """The architecture of a cell."""
        return Architecture(
            vocabulary=vocabulary,
            attention=variant.attention,
            depth=depth,
            width=self.width,
            heads=self.heads,
            context=self.context,
            invertible=variant.invertible,
            norm=self.norm,
        )


def run_cell(
    plan: Plan,
    variant: Variant,
    depth: int,
    text: CharacterText,
    device: str,
    constants: bool = True,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Train every seed at every learning rate together; losses by rate, then seed.

    constants: whether to measure sigma of every layer, and the error of the inverse, at the end
    progress:  called with the share of the steps that are done
    """
    architecture = plan.architecture(len(text.alphabet), variant, depth)
    members = [(rate, seed) for rate in plan.rates for seed in range(plan.seeds)]
    start = time.perf_counter()
    stack = Stack(
        architecture,
        [seed for _, seed in members],
        [rate for rate, _ in members],
        device,
        variant.model,
    )
    curve: list[dict[str, Any]] = []

    def note(step: int, learned: torch.Tensor) -> None:
        progress(step / plan.steps)
        test = stack.test_losses(text, min(64, plan.tested))
        curve.append({"step": step, "training": learned.tolist(), "test": test.tolist()})

    history = stack.train(
        text, Schedule(plan.steps, plan.batch, plan.rate, plan.clip), plan.every, note
    )
    trained = time.perf_counter() - start
    final = stack.test_losses(text, plan.tested).tolist()
    tested = time.perf_counter() - start
    measured = [m for m, (_, seed) in enumerate(members) if seed == 0 and final[m] < HOPELESS]
    return {
        "members": members,
        "parameters": stack.parameters,
        "final": final,
        "curve": curve,
        **first_steps(history),
        **(_constants(stack, measured, text) if constants else {}),
        "seconds_training": trained,
        "seconds_testing": tested - trained,
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
    except UserError:
        return math.nan
    return float((found - X).norm() / X.norm())


def strict(x: Any) -> Any:
    """Numbers for JSON: null if not finite, else the seven digits of float32."""
    if isinstance(x, dict):
        return {str(key): strict(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [strict(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.7g}") if math.isfinite(x) else None
    return x
