"""Many character models of one architecture trained at once, cell by cell, and how they ended.

Stacked weights are trained under one CUDA graph. The models are those of `lipscope train`, or
others of characters, under vmap. They share nothing but kernel launches: a member that diverges
does not affect the others. A cell is an architecture at every seed and learning rate.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

from lipscope.papers.charlm.characters import CharacterText
from lipscope.papers.charlm.language_model import Architecture, CharacterTransformer, Variant

BETAS = (0.9, 0.98)
EPS = 1e-8
ALIGNED = 64
"""Alignment of the start of every weight in a flat row, in numbers."""


@dataclass(frozen=True)
class Plan:
    """The sizes of an experiment: every cell gets the same steps, windows and width.

    Training is Adam for `steps` steps of `batch` windows; clip is the maximum gradient norm, or
    None. `note` hears of a training every `every` steps.
    """

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
        """What multiplies the learning rate of every member at a step."""
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


@dataclass(frozen=True, eq=False)
class History:
    """Before each step, [steps, members]: loss, gradient norm, norm of the weights."""

    losses: Tensor
    gradients: Tensor
    weights: Tensor


class Stack:
    """One flat row of weights per member; equal seeds give equal weights and batches."""

    def __init__(
        self,
        architecture: Architecture,
        seeds: list[int],
        rates: list[float],
        device: str,
        build: Callable[[Architecture], nn.Module] = CharacterTransformer,
    ) -> None:
        self.architecture = architecture
        self.seeds = seeds
        self.rates = torch.tensor(rates, device=device)[:, None]
        models = []
        with torch.random.fork_rng(devices=[]):
            for seed in seeds:
                torch.manual_seed(seed)
                models.append(build(architecture))
        self._shapes = {name: tuple(p.shape) for name, p in models[0].named_parameters()}
        self._sizes = [
            -(-torch.Size(shape).numel() // ALIGNED) * ALIGNED for shape in self._shapes.values()
        ]
        rows = torch.zeros(len(seeds), sum(self._sizes))
        for row, model in zip(rows, models, strict=True):
            for part, weight in zip(row.split(self._sizes), model.parameters(), strict=True):
                part[: weight.numel()] = weight.detach().flatten()
        self.theta = rows.to(device).requires_grad_(True)
        self._skeleton = copy.deepcopy(models[0]).to("meta")

    @property
    def parameters(self) -> int:
        """The number of weights of one member."""
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())

    def weights(self, theta: Tensor) -> dict[str, Tensor]:
        """theta [M, P] as named tensors [M, ...], or one row [P] as those of one model."""
        parts = theta.split(self._sizes, dim=-1)
        named = zip(self._shapes.items(), parts, strict=True)
        return {
            name: part[..., : torch.Size(shape).numel()].unflatten(-1, shape)
            if shape
            else part[..., 0]
            for (name, shape), part in named
        }

    def losses(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of each member on its own windows [M, B, n], or on shared ones [B, n]."""

        def one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            logits = functional_call(self._skeleton, weights, (x,))
            return cross_entropy(logits.flatten(0, -2), y.flatten())

        where = 0 if inputs.ndim == 3 else None
        return vmap(one, in_dims=(0, where, where))(self.weights(theta), inputs, targets)

    def model(self, member: int) -> nn.Module:
        """One member as an ordinary model."""
        model: nn.Module = copy.deepcopy(self._skeleton).to_empty(device=self.theta.device)
        model.load_state_dict(self.weights(self.theta.detach()[member]))
        return model

    @torch.no_grad()
    def test_losses(self, text: CharacterText, most: int) -> Tensor:
        """The loss of each member on held-out windows."""
        windows = [
            t.to(self.theta.device) for t in text.test_windows(most, self.architecture.context)
        ]
        pieces = [
            self.losses(self.theta, x, y) * len(x)
            for x, y in zip(*(t.split(32) for t in windows), strict=True)
        ]
        return torch.stack(pieces).sum(0) / len(windows[0])

    def train(
        self,
        text: CharacterText,
        plan: Plan,
        note: Callable[[int, Tensor], None] = lambda step, losses: None,
    ) -> History:
        """Train all members; `note` gets the step and the mean losses since the last note."""
        step = _Step(self, text, plan)
        places = len(text.learned) - self.architecture.context
        draws = {
            s: torch.randint(
                places, (plan.steps, plan.batch), generator=torch.Generator().manual_seed(s)
            )
            for s in set(self.seeds)
        }
        # Starts of the windows of each step, [steps, M, B], and factors of its learning rate.
        starts = torch.stack([draws[seed] for seed in self.seeds], dim=1).to(self.theta.device)
        factors = torch.tensor([plan.rate(i) for i in range(plan.steps)]).to(self.theta.device)
        seen = torch.zeros(3, plan.steps, len(self.seeds), device=self.theta.device)
        for i in range(plan.steps):
            step.starts.copy_(starts[i])
            step.factor.copy_(factors[i])
            step.run()
            seen[:, i].copy_(step.seen)
            if (i + 1) % plan.every == 0 or i + 1 == plan.steps:
                note(i + 1, seen[0, max(0, i + 1 - plan.every) : i + 1].mean(0))
        return History(*seen.cpu())


class _Step:
    """One step of Adam for all members, captured as a CUDA graph on a GPU."""

    def __init__(self, stack: Stack, text: CharacterText, plan: Plan) -> None:
        theta = stack.theta
        self.stack = stack
        self.plan = plan
        self.text = text.learned.to(theta.device)
        self.window = torch.arange(stack.architecture.context, device=theta.device)
        self.starts = torch.zeros(
            len(stack.seeds), plan.batch, dtype=torch.long, device=theta.device
        )
        self.factor = torch.zeros((), device=theta.device)
        self.count = torch.zeros((), device=theta.device)
        self.seen = torch.zeros(3, len(stack.seeds), device=theta.device)
        self.first = torch.zeros_like(theta)
        self.second = torch.zeros_like(theta)
        self.run: Callable[[], None] = self._advance
        if theta.is_cuda:
            self._capture()

    def _advance(self) -> None:
        theta = self.stack.theta
        rows = self.starts[..., None] + self.window
        losses = self.stack.losses(theta, self.text[rows], self.text[rows + 1])
        (gradient,) = torch.autograd.grad(losses.sum(), theta)
        with torch.no_grad():
            length = gradient.norm(dim=1)
            self.seen.copy_(torch.stack([losses, length, theta.norm(dim=1)]))
            if self.plan.clip is not None:
                gradient = gradient * (self.plan.clip / (length + 1e-6)).clamp(max=1.0)[:, None]
            self.count += 1
            b1, b2 = BETAS
            self.first.lerp_(gradient, 1 - b1)
            self.second.lerp_(gradient.square(), 1 - b2)
            mean = self.first / (1 - torch.pow(b1, self.count))
            spread = (self.second / (1 - torch.pow(b2, self.count))).sqrt() + EPS
            theta -= self.stack.rates * self.factor * mean / spread

    def _capture(self) -> None:
        """Warm up on a side stream, restore everything, and record one step."""
        state = (self.stack.theta, self.first, self.second, self.count)
        before = [t.detach().clone() for t in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._advance()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        with torch.no_grad():
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
        self.run = graph.replay


def train_cell(
    plan: Plan,
    variant: Variant,
    depth: int,
    text: CharacterText,
    device: str,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[Stack, History, dict[str, Any]]:
    """Train every seed at every learning rate together; losses by rate, then seed.

    `progress` is called with the share of the steps that are done.
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

    def note(step: int, learned: Tensor) -> None:
        progress(step / plan.steps)
        test = stack.test_losses(text, min(64, plan.tested))
        curve.append({"step": step, "training": learned.tolist(), "test": test.tolist()})

    history = stack.train(text, plan, note)
    seconds = time.perf_counter() - start
    cell = {
        "members": members,
        "parameters": stack.parameters,
        "final": stack.test_losses(text, plan.tested).tolist(),
        "curve": curve,
        "seconds_training": seconds,
    }
    return stack, history, cell


def strict(x: Any) -> Any:
    """Numbers for JSON: null if not finite, else the seven digits of float32."""
    if isinstance(x, dict):
        return {str(key): strict(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [strict(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.7g}") if math.isfinite(x) else None
    return x


def broke(final: float | None, curve: list[float | None], unigram: float) -> bool:
    """The criterion of breaking, fixed before the first run; None stands for a non-finite loss."""
    best = min((x for x in curve if x is not None), default=math.inf)
    return final is None or final > unigram or final > best + 0.5


def stuck(final: float, unigram: float) -> bool:
    """Whether a training that did not break is hardly better than character frequencies."""
    return final > unigram - 0.1


@dataclass(frozen=True)
class Outcome:
    """The seeds of one learning rate: test losses, and how many broke or got stuck."""

    learned: list[float]
    broken: int
    stuck: int

    @property
    def fine(self) -> bool:
        return self.broken == self.stuck == 0

    def __str__(self) -> str:
        words = [f"{mean(self.learned):.3f}"] if self.learned else []
        for count, word in ((self.broken, "broke"), (self.stuck, "stuck")):
            whole = count == len(self.learned) + self.broken + self.stuck
            words += [word if whole else f"{count} {word}"] if count else []
        return ", ".join(words)


def outcomes(cell: dict[str, Any], unigram: float) -> dict[float, Outcome]:
    """The outcome at every learning rate of a cell."""
    found = {}
    for rate, members in by_rate(cell).items():
        finals = [
            (cell["final"][m], [point["test"][m] for point in cell["curve"]]) for m in members
        ]
        unbroken = [final for final, curve in finals if not broke(final, curve, unigram)]
        learned = [final for final in unbroken if not stuck(final, unigram)]
        found[rate] = Outcome(learned, len(members) - len(unbroken), len(unbroken) - len(learned))
    return found


def by_rate(cell: dict[str, Any]) -> dict[float, list[int]]:
    """The members of a cell, by learning rate."""
    rates: dict[float, list[int]] = {}
    for member, (rate, _) in enumerate(cell["members"]):
        rates.setdefault(rate, []).append(member)
    return rates


def best_rate(cell: dict[str, Any]) -> tuple[float, list[int]]:
    """The learning rate with the lowest mean test loss, and its members."""
    return min(
        by_rate(cell).items(), key=lambda item: mean(cell["final"][m] or 1e9 for m in item[1])
    )


def cells_of(results: dict[str, Any], plan: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The cells of a plan that have been run, by variant and depth."""
    settings = results["settings"]["plans"][plan]
    places = [(variant, depth) for variant in settings["variants"] for depth in settings["depths"]]
    names = {(variant, depth): f"{plan}/{variant}/{depth}" for variant, depth in places}
    return {
        place: results["cells"][name] for place, name in names.items() if name in results["cells"]
    }
