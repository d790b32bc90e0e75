"""Simulate a preset: its flow, and what is looked for in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._checks import abbreviate, usable_device
from lipscope._display import Displayed, with_bar
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.dynamics.clusters import Clusters, find_clusters
from lipscope.dynamics.depth_growth import DepthGrowth, growth_along_depth
from lipscope.dynamics.gaussian import GaussianFlow, gaussian_flow
from lipscope.dynamics.integration import Progress, check_count, check_time
from lipscope.dynamics.particles import Flow, flow
from lipscope.dynamics.presets import PRESETS, Preset, gaussian_law, layer_of, tokens_of

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
    path, found = LOOKS[chosen.look](chosen, f, X, time, progress)
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
    # Drawn up to BEFORE of the way: at the blow-up itself the covariance is infinite.
    beyond = (
        closed if far.blow_up is None else gaussian_flow(f, law[0], law[1], BEFORE * far.blow_up)
    )
    moments = Moments(
        closed=closed, beyond=beyond, blow_up=far.blow_up, searched=far.times[-1].item()
    )
    return _flow(preset, f, X, time, progress), moments


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
