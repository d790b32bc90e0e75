"""Simulate a preset: a flow described by data, and what is looked for in it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._checks import abbreviate, usable_device
from lipscope._display import Displayed, with_bar
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot
from lipscope.dynamics.clusters import Clusters, find_clusters
from lipscope.dynamics.depth_growth import DepthGrowth, growth_along_depth
from lipscope.dynamics.gaussian import GaussianFlow, gaussian_flow
from lipscope.dynamics.integration import Progress, check_count, check_time
from lipscope.dynamics.particles import Flow, flow


@dataclass(frozen=True)
class Preset:
    """One head with scores x_j' A x_i, A = score I, and V = drive times a rotation by `turn`.

    law, size:   distribution of the initial tokens, "gaussian" or "disc", and its scale
    look:        what to look for: "clusters", "moments" or "growth"
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
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, dim, generator=g, dtype=torch.float64)
    if preset.law == "gaussian":
        mean, covariance = gaussian_law(dim, preset.size)
        return mean + normal @ torch.linalg.cholesky(covariance).T
    radius = torch.rand(n, 1, generator=g, dtype=torch.float64) ** (1 / dim)
    return preset.size * radius * normal / normal.norm(dim=1, keepdim=True)


def gaussian_law(dim: int, size: float) -> tuple[Tensor, Tensor]:
    """Mean, size / 2 along the first axis, and covariance, with variances size^2 to size^2 / 4."""
    mean = torch.zeros(dim, dtype=torch.float64)
    mean[0] = size / 2
    return mean, size**2 * torch.linspace(1, 0.25, dim, dtype=torch.float64).diag()


MOST_TOKENS = 20_000
"""Attention on as many tokens has a matrix of 3.2 GB."""

HORIZON = 100.0
"""The search for a blow-up of the moments ends at this multiple of the requested time."""

BEFORE = 0.99
"""The fraction of the time to a blow-up that is drawn."""

TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Moments(Displayed):
    """The moments of a Gaussian along depth, by their closed equation.

    closed:   up to the requested time
    beyond:   almost up to the blow-up, if there is one; otherwise the same as closed
    blow_up:  the time of the blow-up, if one was found
    searched: the time up to which it was searched for, at most HORIZON times the requested time
    """

    closed: GaussianFlow
    beyond: GaussianFlow
    blow_up: float | None
    searched: float


@dataclass(frozen=True, eq=False)
class Simulation(Displayed):
    """A simulated preset: the particles, what was found in them, and the settings to repeat it."""

    name: str
    preset: Preset
    n: int
    dim: int
    time: float
    seed: int
    device: str
    flow: Flow
    found: Clusters | Moments | DepthGrowth

    def plot(self) -> Any:
        """Plot the tokens along depth, and what was found in them; returns both Axes."""
        from lipscope.report.simulations import plot_simulation

        return plot_simulation(self)

    @property
    def shown(self) -> Tensor:
        """The positions to draw [T, n, d], renormalised if the preset asks for it."""
        return (self.flow.renormalised if self.preset.renormalise else self.flow.positions).cpu()

    @property
    def summary(self) -> str:
        """How the flow ended and what was found, one sentence each."""
        found = (
            f"the moments: {self.found.closed.summary}"
            if isinstance(self.found, Moments)
            else self.found.summary
        )
        return f"the particles: {self.flow.summary}. {found[0].upper()}{found[1:]}."


@entry_point
@with_bar("simulating")
def simulate(
    preset: str = "clusters",
    *,
    n: int | None = None,
    dim: int | None = None,
    time: float | None = None,
    device: str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> Simulation:
    """Simulate tokens flowing through infinitely many layers of attention, in float64.

    Args:
        preset: Name of the flow: clusters, gaussian, masked or growth.
        n: Number of tokens; by default the preset's.
        dim: Size of a token; by default the preset's.
        time: Depth to integrate to; by default the preset's.
        device: For example "cpu", "cuda" or "cuda:1".
        seed: Seed of the initial tokens.
        progress: Called with (done, total) as the integration proceeds. Default: a
            bar in notebooks, nothing elsewhere.

    Returns:
        The flow, and what was found in it: clusters, moments or growth along depth.

    Raises:
        UserError: If there is no such preset, or a number is out of range.

    Example:
        >>> import lipscope as ls
        >>> found = ls.simulate("clusters", n=12, time=1.0)
        >>> found.flow.positions.shape
        torch.Size([65, 12, 2])
        >>> found.flow.ok
        True
    """
    if preset not in PRESETS:
        raise UserError(f"there is no preset {preset!r}; the presets are {', '.join(PRESETS)}")
    chosen = PRESETS[preset]
    n = chosen.n if n is None else n
    dim = chosen.dim if dim is None else dim
    check_count("n, the number of tokens,", n)
    check_count("dim, the size of a token,", dim)
    if max(n, dim) > MOST_TOKENS:
        raise UserError(
            f"n and dim must be at most {MOST_TOKENS}, got {abbreviate(n)} and {abbreviate(dim)}: "
            "every step "
            "computes n x n attention weights, and a layer has dim x dim weights"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UserError(f"seed must be an integer from 0 to 2^63 - 1, got {seed!r}")
    time = chosen.time if time is None else time
    check_time(time, 2)
    place = usable_device(device)
    f = layer_of(chosen, dim).to(place)
    X = tokens_of(chosen, n, dim, seed).to(place)
    found: Clusters | Moments | DepthGrowth
    if chosen.look == "growth":
        found = growth_along_depth(f, X, time, progress=progress)
        path = found.flow
    else:
        shown = chosen.renormalise
        path = flow(f, X, time, tol=TOLERANCE, renormalise=shown, progress=progress)
        found = (
            find_clusters(path, renormalised=shown)
            if chosen.look == "clusters"
            else _moments(f, X, chosen.size, time)
        )
    return Simulation(
        name=preset,
        preset=chosen,
        n=n,
        dim=dim,
        time=time,
        seed=seed,
        device=str(place),
        flow=path,
        found=found,
    )


def _moments(f: SelfAttention, X: Tensor, size: float, time: float) -> Moments:
    mean, covariance = (x.to(X) for x in gaussian_law(X.shape[1], size))
    horizon = min(HORIZON * time, sys.float_info.max)
    closed, far = (gaussian_flow(f, mean, covariance, end) for end in (time, horizon))
    beyond = closed
    if far.blow_up is not None:
        # Drawn up to BEFORE of the way: at the blow-up itself the covariance is infinite.
        beyond = gaussian_flow(f, mean, covariance, BEFORE * far.blow_up)
    return Moments(closed=closed, beyond=beyond, blow_up=far.blow_up, searched=far.times[-1].item())
