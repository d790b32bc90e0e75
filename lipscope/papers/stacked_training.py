"""Many models of one architecture trained at once: stacked weights under one CUDA graph.

The models are those of `lipscope train`, or others of characters, under vmap. They share nothing
but kernel launches: a member that diverges does not affect the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

from lipscope.papers.charlm.characters import CharacterText
from lipscope.papers.charlm.language_model import Architecture, CharacterTransformer

BETAS = (0.9, 0.98)
EPS = 1e-8
ALIGNED = 64
"""Alignment of the start of every weight in a flat row, in numbers."""


@dataclass(frozen=True)
class Schedule:
    """Adam for `steps` steps of `batch` windows; clip is the maximum gradient norm, or None.

    rate(step) multiplies the learning rate of every member.
    """

    steps: int
    batch: int
    rate: Callable[[int], float]
    clip: float | None


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
        self._build = build
        self.rates = torch.tensor(rates, device=device)[:, None]
        with torch.random.fork_rng(devices=[]):
            models = [self._fresh(seed) for seed in seeds]
        shapes = {name: tuple(p.shape) for name, p in models[0].named_parameters()}
        self._shapes = shapes
        self._sizes = [
            -(-torch.Size(shape).numel() // ALIGNED) * ALIGNED for shape in shapes.values()
        ]
        rows = [self._flatten(dict(model.named_parameters())) for model in models]
        self.theta = torch.stack(rows).to(device).requires_grad_(True)
        self._skeleton = copy.deepcopy(models[0]).to("meta")

    def _fresh(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self._build(self.architecture)

    @property
    def parameters(self) -> int:
        """The number of weights of one member."""
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())

    def _flatten(self, weights: dict[str, Tensor]) -> Tensor:
        row = torch.zeros(sum(self._sizes))
        for part, name in zip(row.split(self._sizes), self._shapes, strict=True):
            part[: weights[name].numel()] = weights[name].detach().flatten()
        return row

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
        schedule: Schedule,
        every: int,
        note: Callable[[int, Tensor], None],
    ) -> History:
        """Run the schedule; `note` gets the step and the mean losses since the last note."""
        step = _Step(self, text, schedule)
        starts, factors = self._plan(text, schedule)
        seen = torch.zeros(3, schedule.steps, len(self.seeds), device=self.theta.device)
        for i in range(schedule.steps):
            step.starts.copy_(starts[i])
            step.factor.copy_(factors[i])
            step.run()
            seen[:, i].copy_(step.seen)
            if (i + 1) % every == 0 or i + 1 == schedule.steps:
                note(i + 1, seen[0, max(0, i + 1 - every) : i + 1].mean(0))
        return History(*seen.cpu())

    def _plan(self, text: CharacterText, schedule: Schedule) -> tuple[Tensor, Tensor]:
        """Starts of the windows of each step, [steps, M, B], and its learning rate factor."""
        places = len(text.learned) - self.architecture.context
        shape = schedule.steps, schedule.batch
        draws = {
            s: torch.randint(places, shape, generator=torch.Generator().manual_seed(s))
            for s in set(self.seeds)
        }
        starts = torch.stack([draws[seed] for seed in self.seeds], dim=1)
        factors = torch.tensor([schedule.rate(i) for i in range(schedule.steps)])
        return starts.to(self.theta.device), factors.to(self.theta.device)


class _Step:
    """One step of Adam for all members, captured as a CUDA graph on a GPU."""

    def __init__(self, stack: Stack, text: CharacterText, schedule: Schedule) -> None:
        theta = stack.theta
        self.stack = stack
        self.schedule = schedule
        self.text = text.learned.to(theta.device)
        self.window = torch.arange(stack.architecture.context, device=theta.device)
        self.starts = torch.zeros(
            len(stack.seeds), schedule.batch, dtype=torch.long, device=theta.device
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
            if self.schedule.clip is not None:
                gradient = gradient * (self.schedule.clip / (length + 1e-6)).clamp(max=1.0)[:, None]
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
