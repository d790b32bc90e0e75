"""Training a character model; every step depends only on the checkpoint, so runs can resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lipscope import UserError
from lipscope._ambient import entry_point, float32_by_default
from lipscope._checks import usable_device
from lipscope._display import with_bar
from lipscope._files import claim_folder
from lipscope.linalg.golub_kahan import memory_of
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver
from lipscope.nn.contractive import CONTRACTIVE
from lipscope.papers.charlm.characters import CharacterText, read_characters
from lipscope.papers.charlm.files import (
    FILE,
    LOCK,
    optimizer_tensors,
    read_checkpoint,
    restore_optimizer,
    save_character_model,
    write_tensors,
)
from lipscope.papers.charlm.language_model import (
    Architecture,
    CharacterTransformer,
    MakeAttention,
    check_count,
    make_attention,
    norm_in_words,
)
from lipscope.train.watched_modules import ModuleWatch

TEST_WINDOWS = 64
"""Number of held-out windows in the test loss."""

TOL = 1e-3
"""Relative residual of the constants on the curve: a handful of products per layer."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters: AdamW, linear warm-up, then cosine decay to a tenth of the learning rate."""

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
            check_count(name, getattr(self, name), least)
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be a positive number, got {getattr(self, name)!r}")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(
                f"weight_decay must be 0 or a positive number, got {self.weight_decay!r}"
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        # step + 1: the first step already moves the weights, and warmup = 0 means no warm-up.
        rising = min(1.0, (step + 1) / (self.warmup + 1))
        falling = 0.55 + 0.45 * math.cos(math.pi * step / self.steps)
        return self.lr * rising * falling


@dataclass(frozen=True)
class CurvePoint:
    """The state after `step` steps: losses in nats per character, and sigma of each layer.

    learned is the mean loss of the batches since the last evaluation, NaN before the first step.
    """

    step: int
    learned: float
    test: float
    constants: tuple[float, ...]


class Training:
    """A model with its optimizer, random generator and training curve, between two steps."""

    def __init__(
        self,
        text: CharacterText,
        architecture: Architecture,
        recipe: Recipe,
        device: torch.device,
        attention: MakeAttention = make_attention,
    ) -> None:
        # Refuse what cannot fit before anything is allocated. These are lower bounds: weights,
        # gradients and Adam's two moments; the activations of the blocks.
        a = architecture
        weights = a.depth * 12 * a.width**2 + (2 * a.vocabulary + a.context) * a.width
        tokens = recipe.batch * a.context * (a.vocabulary + 6 * a.width * a.depth)
        needed = 4 * (4 * weights + tokens)
        total = memory_of(device)
        if needed > total:
            raise UserError(
                f"this training needs more than {needed / 2**30:.3g} GiB and {device} has "
                f"{total / 2**30:.3g}; try a smaller width ({a.width}), depth ({a.depth}), "
                f"context ({a.context}) or batch ({recipe.batch})"
            )
        self.text = text
        self.architecture = architecture
        self.recipe = recipe
        self.device = device
        self.generator = torch.Generator().manual_seed(recipe.seed)
        # Layers draw their weights from the global generator: seed it, and leave it as it was.
        with torch.random.fork_rng(devices=[]), float32_by_default():
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
        """Take one optimizer step."""
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
        # A tensor, not a float: reading it here would wait for the device in every step.
        self._losses.append(loss.detach())
        self.step += 1

    def read(self) -> CurvePoint:
        """Evaluate losses and constants, without any effect on the training."""
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
                f"Try lr below {self.recipe.lr:g} or warmup above {self.recipe.warmup}, "
                "in another directory"
            )
        constants = layer_constants(self.model, inputs[0])
        self.curve.append(
            CurvePoint(
                step=self.step,
                learned=learned,
                test=test / len(inputs),
                constants=tuple(constants),
            )
        )
        return self.curve[-1]

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the numbers of this training depend on."""
        return {"text": self.text.digest, **asdict(self.architecture), **asdict(self.recipe)}

    def save(self, directory: Path) -> None:
        """Write model, optimizer, generator, step and curve to one file, atomically."""
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
        """Load the checkpoint of a directory; False if there is none."""
        found = read_checkpoint(directory)
        if found is None:
            return False
        tensors, facts = found
        there = facts["settings"]
        there["norm"] = norm_in_words(there.get("norm", "unknown"))
        for name, value in self.settings.items():
            if there.get(name) != value:  # the numbers would be of neither
                what = f"{name} {there.get(name)}, not {value}"
                raise UserError(
                    f"{directory} holds a training with "
                    f"{'another text' if name == 'text' else what}; "
                    "give the same options to resume it, or another --out"
                )
        # The settings agree, so every tensor has its place: strict loading is a check of that.
        self.model.load_state_dict(_under("model.", tensors))
        names = [name for name, _ in self.model.named_parameters()]
        restore_optimizer(self.optimizer, names, _under("optimizer.", tensors))
        self.generator.set_state(tensors["generator"])
        self.step = facts["step"]
        self._losses = []
        self.curve = [
            CurvePoint(**{**r, "constants": tuple(r["constants"])}) for r in facts["curve"]
        ]
        return True


@entry_point
@torch.enable_grad()
@with_bar("training")
def train_character_model(
    text: str | Path,
    *,
    out: str | Path,
    attention: str = "l2",
    depth: int = 4,
    width: int = 64,
    heads: int = 4,
    context: int = 64,
    norm: str = "pre",
    invertible: bool = False,
    constant: float | None = None,
    steps: int = 2000,
    batch: int = 16,
    lr: float = 3e-3,
    warmup: int = 50,
    weight_decay: float = 0.01,
    clip: float = 1.0,
    seed: int = 0,
    every: int = 200,
    device: str = "cpu",
    progress: Callable[[float, float], None] = lambda done, total: None,
    kept: Callable[[Training], None] = lambda training: None,
) -> Training:
    """Train a character language model and save it where `lipscope measure` can load it.

    Interrupted runs resume where they left off when called again with the same arguments.

    Args:
        text: The text itself, or the path of a UTF-8 file; its last tenth is held out.
        out: Directory for the model and the checkpoint: new, empty, or of an earlier training.
        attention: A name in `lipscope.nn.ATTENTIONS`, such as dot, l2 or contractive-ball.
        depth: Number of blocks.
        width: Embedding dimension, a multiple of heads.
        heads: Heads per layer.
        context: Maximum sequence length, in characters.
        norm: Placement of LayerNorm: pre, post or none.
        invertible: Use invertible blocks; they need contractive attention.
        constant: Lipschitz constant of contractive branches, 0.9 by default.
        steps: Number of optimizer steps.
        batch: Sequences per step.
        lr: Peak learning rate of AdamW.
        warmup: Steps of linear warm-up.
        weight_decay: AdamW weight decay.
        clip: Maximum gradient norm.
        seed: Seed of weights and batches.
        every: Steps between evaluations and checkpoints.
        device: For example "cpu", "cuda" or "cuda:1".
        progress: Called with (steps done, steps in all) after every step. Default: a bar in
            notebooks, nothing elsewhere.
        kept: Called with the training whenever it has been saved.

    Returns:
        The finished training: its `model`, and its `curve` of losses and layer constants.

    Raises:
        UserError: If an option, the text or the directory cannot be used, or training diverges.

    Example:
        >>> import tempfile
        >>> from lipscope.papers.charlm import train_character_model
        >>> prose = "she sells sea shells by the sea shore. " * 20
        >>> with tempfile.TemporaryDirectory() as out:
        ...     training = train_character_model(
        ...         prose, out=out, depth=1, width=8, heads=2, context=8, steps=2, every=1
        ...     )
        >>> [point.step for point in training.curve]
        [0, 1, 2]
    """
    recipe = Recipe(
        steps=steps,
        batch=batch,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        every=every,
    )
    # The vocabulary is unknown until the text is read; the other options are checked before that.
    shape = Architecture(
        vocabulary=2,
        attention=attention,
        depth=depth,
        width=width,
        heads=heads,
        context=context,
        invertible=invertible,
        norm=norm,
    )
    if constant is not None:
        shape = replace(shape, constant=constant)
        if attention not in CONTRACTIVE:
            names = " or ".join(CONTRACTIVE)
            raise UserError(
                f"constant is for {names} attention, {attention} attention takes none; "
                f"leave it out, or choose attention {names}"
            )
    # Before the directory is claimed: a text that cannot be used must leave no trace of a training.
    learned = read_characters(text, context)
    shape = replace(shape, vocabulary=len(learned.alphabet))
    training = Training(learned, shape, recipe, usable_device(device))
    directory = Path(out)

    def save(now: Training) -> None:
        save_character_model(directory, now.model, now.text.alphabet)
        kept(now)

    lock = claim_folder(directory, "a training", (FILE,), LOCK)
    try:
        train(training, directory, progress, save)
    finally:
        lock.release()
    return training


def layer_constants(model: nn.Module, ids: Tensor) -> list[float]:
    """sigma of each attention layer, first to last, at its input in `model(ids)`; ids is [n]."""
    watch = ModuleWatch(model)
    watch.arm()
    try:
        with torch.no_grad():
            model(ids[None])
        seen = [sight for name in watch.names if (sight := watch.measured_map(name)) is not None]
    finally:
        watch.release()
    # A fixed seed: an interrupted training must end with the same curve.
    return [
        float(local_lipschitz(f, X, tol=TOL, solver=Solver(seed=0)).value)
        if X.isfinite().all()
        else math.nan
        for f, X in seen
    ]


def train(
    training: Training,
    directory: Path,
    progress: Callable[[float, float], None] = lambda done, total: None,
    kept: Callable[[Training], None] = lambda training: None,
) -> None:
    """Run the remaining steps; every `every` steps evaluate, save, and call `kept`."""
    total = training.recipe.steps
    try:
        # A checkpoint always follows an evaluation, so that the curve in it is complete.
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
        # The note tells the user how much is saved: everything up to the last checkpoint.
        found = read_checkpoint(directory)
        kept_step = f"step {found[1]['step']} of {total}" if found else "nothing"
        stop.add_note(
            f"Stopped; {kept_step} is saved in {directory}. Run the same command to resume."
        )
        raise


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
