"""A preset, simulated: its flow, and what was looked for in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.dynamics.clusters import Clusters, find_clusters
from lipscope.dynamics.depth_growth import DepthGrowth, growth_along_depth
from lipscope.dynamics.gaussian import GaussianFlow, gaussian_flow
from lipscope.dynamics.integration import Progress, check_count, instants
from lipscope.dynamics.particles import Flow, flow
from lipscope.dynamics.presets import PRESETS, Preset, gaussian_law, layer_of, tokens_of
from lipscope.linalg.device import usable_device

HORIZON = 100.0
"""How many times the time asked for the moments of a Gaussian are followed, to find their blow-up."""

BEFORE = 0.99
"""The fraction of the way to a blow-up that is drawn."""

TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Moments:
    """A Gaussian along depth by its closed equation, to the time asked for, and as far as its blow-up.

    blow_up:  its time, looked for up to HORIZON times the time asked for; `beyond` goes there, or nowhere else.
    searched: the time up to which it was looked for.
    """

    closed: GaussianFlow
    beyond: GaussianFlow
    blow_up: float | None
    searched: float


@dataclass(frozen=True, eq=False)
class Simulation:
    """What `lipscope simulate` draws: the particles, what was found in them, and all it takes to do it again."""

    name: str
    preset: Preset
    n: int
    dim: int
    time: float
    seed: int
    device: str
    flow: Flow
    found: Clusters | Moments | DepthGrowth

    @property
    def shown(self) -> Tensor:
        """The positions to draw [T, n, d]: renormalised where the preset says so."""
        return (self.flow.renormalised if self.preset.renormalise else self.flow.positions).cpu()

    @property
    def status(self) -> str:
        """How the flow ended and what was found, in a sentence each."""
        found = (
            f"the moments: {self.found.closed.status}"
            if isinstance(self.found, Moments)
            else self.found.status
        )
        return f"the particles: {self.flow.status}. {found[0].upper()}{found[1:]}."


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
    """A preset's flow in float64, with its own numbers of tokens, dimensions and time unless told otherwise."""
    if preset not in PRESETS:
        raise UserError(f"there is no preset {preset!r}; the presets are {', '.join(PRESETS)}")
    chosen = PRESETS[preset]
    n, dim = (chosen.n if n is None else n), (chosen.dim if dim is None else dim)
    check_count("n, the number of tokens,", n)
    check_count("dim, the size of a token,", dim)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UserError(f"seed must be a whole number, not negative and below 2^63, got {seed!r}")
    time = chosen.time if time is None else time
    instants(time, 2)  # refuses a time before anything is drawn
    place = usable_device(device)
    f, X = layer_of(chosen, dim).to(place), tokens_of(chosen, n, dim, seed).to(place)
    path, found = LOOKS[chosen.look](chosen, f, X, time, progress)
    return Simulation(preset, chosen, n, dim, time, seed, str(place), path, found)


def _flow(
    preset: Preset, f: SelfAttention, X: Tensor, time: float, progress: Progress | None
) -> Flow:
    return flow(f, X, time, tol=TOLERANCE, renormalise=preset.renormalise, progress=progress)


def _look_for_clusters(
    preset: Preset, f: SelfAttention, X: Tensor, time: float, progress: Progress | None
) -> tuple[Flow, Clusters]:
    path = _flow(preset, f, X, time, progress)
    return path, find_clusters(path, renormalised=preset.renormalise)


def _look_at_moments(
    preset: Preset, f: SelfAttention, X: Tensor, time: float, progress: Progress | None
) -> tuple[Flow, Moments]:
    law = [x.to(X) for x in gaussian_law(X.shape[1], preset.size)]
    horizon = min(HORIZON * time, sys.float_info.max)
    closed, far = (gaussian_flow(f, law[0], law[1], end) for end in (time, horizon))
    beyond = (
        closed if far.blow_up is None else gaussian_flow(f, law[0], law[1], BEFORE * far.blow_up)
    )
    return _flow(preset, f, X, time, progress), Moments(
        closed, beyond, far.blow_up, far.times[-1].item()
    )


def _look_at_growth(
    preset: Preset, f: SelfAttention, X: Tensor, time: float, progress: Progress | None
) -> tuple[Flow, DepthGrowth]:
    found = growth_along_depth(f, X, time, progress=progress)
    return found.flow, found


Look = Callable[
    [Preset, SelfAttention, Tensor, float, Progress | None],
    tuple[Flow, Clusters | Moments | DepthGrowth],
]
LOOKS: dict[str, Look] = {
    "clusters": _look_for_clusters,
    "moments": _look_at_moments,
    "growth": _look_at_growth,
}
