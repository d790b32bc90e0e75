"""Training a character model: every step is a function of what a checkpoint holds, so a kill changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lipscope._types import UserError
from lipscope.charlm.characters import CharacterText
from lipscope.charlm.checkpoint import (
    FILE,
    optimizer_tensors,
    read_checkpoint,
    restore_optimizer,
    write_tensors,
)
from lipscope.charlm.language_model import (
    Architecture,
    CharacterTransformer,
    MakeAttention,
    check_whole,
    make_attention,
    norm_in_words,
)
from lipscope.charlm.layer_constants import layer_constants
from lipscope.linalg.device import memory_of

TEST_WINDOWS = 64
"""Held-out windows on which the test loss is taken."""


@dataclass(frozen=True)
class Recipe:
    """How to train: AdamW, a linear warm-up, then a cosine down to a tenth of the learning rate."""

    steps: int = 600
    batch: int = 16
    lr: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    every: int = 50

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("warmup", 0), ("seed", 0), ("every", 1)):
            check_whole(name, getattr(self, name), least)
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be a positive number, got {getattr(self, name)!r}")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(
                f"weight_decay must be 0 or a positive number, got {self.weight_decay!r}"
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = min(1.0, (step + 1) / (self.warmup + 1))
        falling = 0.55 + 0.45 * math.cos(math.pi * step / self.steps)
        return self.lr * rising * falling


@dataclass(frozen=True)
class CurvePoint:
    """What a training showed after `step` steps: losses in nats a character, and sigma of each attention layer.

    learned is the mean loss of the batches since the last reading, NaN before the first step.
    """

    step: int
    learned: float
    test: float
    constants: tuple[float, ...]


class Training:
    """A model with its optimiser, its source of randomness and its curve, between two steps."""

    def __init__(
        self,
        text: CharacterText,
        architecture: Architecture,
        recipe: Recipe,
        device: torch.device,
        attention: MakeAttention = make_attention,
    ) -> None:
        if len(text.alphabet) != architecture.vocabulary:
            raise UserError(
                f"the text has {len(text.alphabet)} characters and the model {architecture.vocabulary}"
            )
        _check_memory(architecture, recipe, device)
        self.text, self.architecture, self.recipe, self.device = text, architecture, recipe, device
        self.generator = torch.Generator().manual_seed(recipe.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = CharacterTransformer(architecture, attention).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=recipe.lr,
            betas=(0.9, 0.98),
            weight_decay=recipe.weight_decay,
        )
        self.step = 0
        self.curve: list[CurvePoint] = []
        self._losses: list[Tensor] = []

    def advance(self) -> None:
        """One step of the optimiser."""
        inputs, targets = self.text.draw(
            self.recipe.batch, self.architecture.context, self.generator
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        loss = _loss(self.model, inputs.to(self.device), targets.to(self.device))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self._losses.append(loss.detach())
        self.step += 1

    def read(self) -> CurvePoint:
        """Losses and constants now; they leave no trace in the training."""
        learned = float(torch.stack(self._losses).mean()) if self._losses else math.nan
        self._losses = []
        inputs, targets = (
            t.to(self.device)
            for t in self.text.test_windows(TEST_WINDOWS, self.architecture.context)
        )
        with torch.no_grad():
            test = sum(
                float(_loss(self.model, x, y)) * len(x)
                for x, y in zip(inputs.split(16), targets.split(16), strict=True)
            )
        if not math.isfinite(test) or (self.step and not math.isfinite(learned)):
            raise UserError(
                f"the loss is no longer finite after {self.step} steps: training has diverged. "
                f"Try lr below {self.recipe.lr:g} or warmup above {self.recipe.warmup}, in another directory"
            )
        constants = layer_constants(self.model, inputs[0])
        self.curve.append(CurvePoint(self.step, learned, test / len(inputs), tuple(constants)))
        return self.curve[-1]

    @property
    def settings(self) -> dict[str, Any]:
        """What decides every number of this training."""
        return {"text": self.text.digest, **asdict(self.architecture), **asdict(self.recipe)}

    def save(self, directory: Path) -> None:
        """Model, optimiser, randomness, step and curve in one file, at once."""
        names = [name for name, _ in self.model.named_parameters()]
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {
            f"optimizer.{k}": v for k, v in optimizer_tensors(self.optimizer, names).items()
        }
        tensors["generator"] = self.generator.get_state()
        facts = {
            "step": self.step,
            "settings": self.settings,
            "curve": [asdict(r) for r in self.curve],
        }
        write_tensors(directory / FILE, tensors, facts)

    def restore(self, directory: Path) -> bool:
        """Goes on where the directory's checkpoint stands; False where there is none."""
        found = read_checkpoint(directory)
        if found is None:
            return False
        tensors, facts = found
        there = facts["settings"]
        _check_same(
            {**there, "norm": norm_in_words(there.get("norm", "unknown"))}, self.settings, directory
        )
        self.model.load_state_dict(_under("model.", tensors))
        names = [name for name, _ in self.model.named_parameters()]
        restore_optimizer(self.optimizer, names, _under("optimizer.", tensors))
        self.generator.set_state(tensors["generator"])
        self.step, self._losses = facts["step"], []
        self.curve = [
            CurvePoint(**{**r, "constants": tuple(r["constants"])}) for r in facts["curve"]
        ]
        return True


def train(
    training: Training,
    directory: Path,
    progress: Callable[[float, float], None] = lambda done, total: None,
    kept: Callable[[Training], None] = lambda training: None,
) -> None:
    """Runs a training to its end, or what is left of it; every `every` steps it is read, saved, and `kept` is told."""
    total = training.recipe.steps
    try:
        if not training.restore(directory):
            training.read()
            training.save(directory)
        kept(training)
        progress(training.step, total)
        while training.step < total:
            training.advance()
            progress(training.step, total)
            if training.step % training.recipe.every == 0 or training.step == total:
                training.read()
                training.save(directory)
                kept(training)
    except KeyboardInterrupt as stop:
        stop.add_note(_farewell(directory, total))
        raise


def _farewell(directory: Path, total: int) -> str:
    """What is on disk, and how to go on."""
    found = read_checkpoint(directory)
    if found is None:
        return f"Stopped; nothing is kept in {directory} yet. The same command begins again."
    return f"Stopped; step {found[1]['step']} of {total} is kept in {directory}. The same command goes on from there."


def _check_memory(a: Architecture, recipe: Recipe, device: torch.device) -> None:
    """Refuse what cannot fit before it is made: weights, gradients and Adam's two moments, and one block's tokens."""
    weights = a.depth * 12 * a.width**2 + (2 * a.vocabulary + a.context) * a.width
    tokens = recipe.batch * a.context * (a.vocabulary + 6 * a.width * a.depth)
    needed, total = 4 * (4 * weights + tokens), memory_of(device)
    if needed > total:
        raise UserError(
            f"this training needs more than {needed / 2**30:.3g} GiB and {device} has {total / 2**30:.3g}; "
            f"try a smaller width ({a.width}), depth ({a.depth}), context ({a.context}) or batch ({recipe.batch})"
        )


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _check_same(there: dict[str, Any], asked: dict[str, Any], directory: Path) -> None:
    """A checkpoint is gone on with only where everything that decides its numbers is the same."""
    for name, value in asked.items():
        if there.get(name) != value:
            was = "another text" if name == "text" else f"{name} {there.get(name)}"
            raise UserError(
                f"{directory} holds a training with {was}"
                + ("" if name == "text" else f", not {value}")
                + "; give the same options to go on with it, or another --out"
            )
