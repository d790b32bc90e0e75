"""The presets of `simulate`, as data: initial tokens, attention, and what to look for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot


@dataclass(frozen=True)
class Preset:
    """One head with scores x_j' A x_i, A = score I, and V = drive times a rotation by `turn`.

    law, size:   distribution of the initial tokens, a name in LAWS, and its scale
    look:        what to look for, a name in simulation.LOOKS
    renormalise: show z = e^{-tV} x instead of x
    """

    about: str
    look: str
    law: str
    n: int
    dim: int
    time: float
    size: float = 1.0
    score: float = 1.0
    drive: float = 1.0
    turn: float = 0.0
    causal: bool = False
    renormalise: bool = True


PRESETS = {
    "clusters": Preset(
        about="tokens gather at the vertices of a polytope (V = A = I)",
        look="clusters",
        law="disc",
        n=200,
        dim=2,
        time=10.0,
        size=2.0,
    ),
    "gaussian": Preset(
        about="a Gaussian stays Gaussian until its covariance blows up: moments and particles",
        look="moments",
        law="gaussian",
        n=1000,
        dim=2,
        time=0.6,
        score=0.5,
        turn=math.pi / 6,
        renormalise=False,
    ),
    "masked": Preset(
        about="under a causal mask the first token moves alone, and leaders need not be vertices",
        look="clusters",
        law="disc",
        n=200,
        dim=2,
        time=10.0,
        size=2.0,
        causal=True,
    ),
    "growth": Preset(
        about="the whole network amplifies a change less than the product of its layers",
        look="growth",
        law="gaussian",
        n=24,
        dim=2,
        time=2.0,
        renormalise=False,
    ),
}


def layer_of(preset: Preset, dim: int) -> SelfAttention:
    """Return the attention of a preset in float64 for tokens of size dim."""
    identity = torch.eye(dim, dtype=torch.float64)
    V = preset.drive * identity
    if dim > 1:
        cos = math.cos(preset.turn)
        sin = math.sin(preset.turn)
        V[:2, :2] = preset.drive * torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
    return SelfAttention(
        identity, identity, V, causal=preset.causal, kernel=Dot(scale=preset.score)
    )


def tokens_of(preset: Preset, n: int, dim: int, seed: int) -> Tensor:
    """n tokens drawn from the law of a preset; a seed gives the same tokens on every device."""
    return LAWS[preset.law](n, dim, preset.size, torch.Generator().manual_seed(seed))


def gaussian_law(dim: int, size: float) -> tuple[Tensor, Tensor]:
    """Mean, size / 2 along the first axis, and covariance, with variances size^2 to size^2 / 4."""
    mean = torch.zeros(dim, dtype=torch.float64)
    mean[0] = size / 2
    return mean, size**2 * torch.linspace(1, 0.25, dim, dtype=torch.float64).diag()


def _disc(n: int, dim: int, size: float, g: torch.Generator) -> Tensor:
    """Uniform in the ball of radius `size`."""
    direction = torch.randn(n, dim, generator=g, dtype=torch.float64)
    radius = torch.rand(n, 1, generator=g, dtype=torch.float64) ** (1 / dim)
    return size * radius * direction / direction.norm(dim=1, keepdim=True)


def _gaussian(n: int, dim: int, size: float, g: torch.Generator) -> Tensor:
    mean, covariance = gaussian_law(dim, size)
    return (
        mean
        + torch.randn(n, dim, generator=g, dtype=torch.float64)
        @ torch.linalg.cholesky(covariance).T
    )


LAWS: dict[str, Callable[[int, int, float, torch.Generator], Tensor]] = {
    "disc": _disc,
    "gaussian": _gaussian,
}
