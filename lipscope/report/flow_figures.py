"""Figures of a simulated flow: the paths of the tokens, and what was found in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lipscope.dynamics.clusters import Clusters
from lipscope.dynamics.depth_growth import DepthGrowth
from lipscope.dynamics.particles import Flow
from lipscope.dynamics.simulation import Moments, Simulation
from lipscope.report.figures import new_axes
from lipscope.report.palette import colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (10, 4.6)
"""Inches of the two panels."""

PATHS = 400
"""Maximum number of paths drawn."""

LARGEST = 1e200
"""Above this, the ticks and margins of an axis overflow."""

Move = Callable[[int], None]
NOTHING = np.empty(0)
BELOW: dict[str, Any] = {
    "fontsize": "small",
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.14),
    "ncols": 2,
    "frameon": False,
}
BLUE = colour("s0")
ORANGE = colour("s1")
GREY = colour("muted")


def draw(simulation: Simulation) -> Figure:
    """Two panels: the tokens, and what was looked for along depth."""
    from matplotlib.figure import Figure

    return _panels(simulation, Figure(figsize=SIZE, layout="constrained"))


def plot_simulation(simulation: Simulation) -> list[Axes]:
    """The same in a figure that notebooks show; returns its Axes."""
    import matplotlib.pyplot as plt

    return _panels(simulation, plt.figure(figsize=SIZE, layout="constrained")).axes


def plot_flow(flow: Flow, ax: Axes | None, renormalised: bool) -> Axes:
    """The paths of the tokens of any flow."""
    ax = new_axes(ax)
    _paths(ax, flow, renormalised)
    return ax


def plot_depth_growth(found: DepthGrowth, ax: Axes | None) -> Axes:
    """The growth of a small change along depth, and its bounds."""
    ax = new_axes(ax)
    _growth(ax, found)
    return ax


def _panels(simulation: Simulation, figure: Figure) -> Figure:
    left, right = figure.subplots(1, 2)
    found = simulation.found
    if isinstance(found, Moments):
        _cloud(left, simulation, found)
        _spread(right, simulation, found)
    else:
        _paths(left, simulation.flow, simulation.preset.renormalise)
        if isinstance(found, Clusters):
            _centres(left, simulation, found)
            _counts(right, simulation, found)
        else:
            _growth(right, found)
    figure.suptitle(
        f"{simulation.name}: n = {simulation.n}, d = {simulation.dim}, seed {simulation.seed}",
        fontsize="medium",
    )
    return figure


def label_axes(ax: Axes, dim: int, renormalised: bool) -> None:
    """Label the axes with the coordinates shown."""
    letter = "z = exp(-tV) x" if renormalised else "x"
    if dim == 1:
        ax.set_xlabel("depth t")
        ax.set_ylabel(letter)
        return
    first = " (first two of them)" if dim > 2 else ""
    ax.set_xlabel(f"{letter}, coordinate 1{first}")
    ax.set_ylabel("coordinate 2")
    ax.set_aspect("equal", adjustable="datalim")


def frame_axes(ax: Axes, z: Tensor) -> None:
    """Axis limits that contain every token of z [..., d], with a margin."""
    ax.set_adjustable("box")  # keep the limits; equal scales change the shape
    flat = z.reshape(-1, z.shape[-1])
    low = flat.amin(dim=0)
    high = flat.amax(dim=0)
    pad = 0.05 * (high - low).clamp_min(1e-9 * max(1.0, flat.abs().max().item()))
    ax.set_xlim((low - pad)[0].item(), (high + pad)[0].item())
    if z.shape[-1] > 1:
        ax.set_ylim((low - pad)[1].item(), (high + pad)[1].item())


def colours(flow: Flow) -> Any:
    """Colours by position in the sequence where order matters, else a single one."""
    if not flow.f.causal:
        return BLUE
    from matplotlib import colormaps

    return colormaps["viridis"](np.linspace(0, 0.95, flow.positions.shape[1]))


def ellipse(mean: Tensor, covariance: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The curve at two standard deviations, in the first two coordinates."""
    angle = np.linspace(0, 2 * math.pi, 100)
    # A covariance that rounding made slightly indefinite still has an ellipse.
    values, vectors = np.linalg.eigh(covariance[:2, :2].cpu().numpy())
    axes = vectors * np.sqrt(np.clip(values, 0, None))
    x, y = 2 * axes @ np.stack([np.cos(angle), np.sin(angle)]) + mean[:2].cpu().numpy()[:, None]
    return x, y


def _paths(ax: Axes, flow: Flow, renormalised: bool) -> None:
    """The initial tokens and their paths."""
    z = (flow.renormalised if renormalised else flow.positions).detach().cpu().numpy()
    times, (n, dim) = flow.times.cpu().numpy(), z.shape[1:]
    # Spread over the sequence, because in a causal flow the position decides the fate of a token.
    chosen = np.linspace(0, n - 1, min(n, PATHS)).round().astype(int)
    tint = colours(flow)
    for i in chosen:
        own = tint if isinstance(tint, str) else tint[i]
        along = (times, z[:, i, 0]) if dim == 1 else (z[:, i, 0], z[:, i, 1])
        ax.plot(*along, color=own, linewidth=0.6, alpha=0.45)
    if dim > 1:
        ax.scatter(z[0, :, 0], z[0, :, 1], s=6, c=tint, alpha=0.7, label="tokens at t = 0")
    label_axes(ax, dim, renormalised)


def _centres(ax: Axes, simulation: Simulation, found: Clusters) -> None:
    """Centres of clusters or groups, filled where they are vertices of their convex hull."""
    what = "limit points" if found.clear else "centres of groups"
    centres = found.centres.numpy()
    extreme = found.extreme.numpy()
    end = simulation.flow.times[-1].item()
    for which, face, name in ((extreme, ORANGE, "vertices"), (~extreme, "white", "not vertices")):
        if not which.any():
            continue
        points = centres[which]
        x, y = (
            (np.full(len(points), end), points[:, 0])
            if simulation.dim == 1
            else (points[:, 0], points[:, 1])
        )
        ax.scatter(
            x, y, s=60, c=face, edgecolors=ORANGE, zorder=3, label=f"{what}: {which.sum()} {name}"
        )
    if simulation.dim == 2 and extreme.sum() > 2:
        corners = centres[extreme]
        # Corners of a convex polygon in the order of their angles around its centre.
        around = np.argsort(np.arctan2(*(corners - corners.mean(axis=0)).T[::-1]))
        hull = corners[[*around, around[0]]]
        ax.plot(hull[:, 0], hull[:, 1], color=ORANGE, linewidth=1, linestyle="--")
    if simulation.preset.causal and simulation.dim > 1:
        first = simulation.shown[0, 0]
        ax.scatter(
            first[0],
            first[1],
            marker="x",
            s=90,
            c=colour("s5"),
            zorder=4,
            label="first token, at rest",
        )
    ax.legend(**BELOW)


def _counts(ax: Axes, simulation: Simulation, found: Clusters) -> None:
    ax.step(simulation.flow.times, found.counts, where="post", color=BLUE)
    ax.set_yscale("log")
    ax.set_ylim(0.8, 1.3 * simulation.n)
    if math.isfinite(found.time):
        ax.axvline(found.time, color=GREY, linestyle=":", label=f"formed by t = {found.time:.3g}")
        ax.legend(fontsize="small")
    ax.set_xlabel("depth t")
    ax.set_ylabel(f"groups of tokens closer than {found.width:.2g}")
    ax.set_title(found.title, fontsize="medium")


def _cloud(ax: Axes, simulation: Simulation, found: Moments) -> None:
    """Final particles, with their own ellipse and that of the closed equation."""
    if simulation.dim > 1:
        last = len(simulation.flow.times) - 1
        moving_cloud(ax, simulation, found)(last)
        frame_axes(ax, simulation.shown[last])
        ax.set_title(f"t = {simulation.flow.times[last].item():.3g}", fontsize="medium")
        return
    x = simulation.shown[-1, :, 0]
    low = x.min().item()
    high = x.max().item()
    room = 1e-6 * x.abs().max().item()
    if high - low < room:  # tokens that have all but met leave no space for bins between them
        low = low - room
        high = high + room
    ax.hist(x.numpy(), bins=40, range=(low, high), density=True, color=BLUE, alpha=0.5)
    ax.set_xlabel("x")
    ax.set_ylabel("density of particles")


def moving_cloud(ax: Axes, simulation: Simulation, found: Moments) -> Move:
    """Particles and both ellipses; the returned function moves them to a frame."""
    x = simulation.shown
    closed = found.closed
    dots = ax.scatter(x[0, :, 0], x[0, :, 1], s=4, c=BLUE, alpha=0.4, label="particles")
    (own,) = ax.plot([], [], color=BLUE, linewidth=1, label="their mean and covariance, 2 sd")
    (exact,) = ax.plot([], [], color=ORANGE, linestyle="--", label="closed equation, 2 sd")
    label_axes(ax, simulation.dim, simulation.preset.renormalise)
    ax.legend(**(BELOW | {"bbox_to_anchor": (0.5, -0.24)}))

    def move(frame: int) -> None:
        dots.set_offsets(x[frame, :, :2].numpy())
        if simulation.n > 1:
            own.set_data(*ellipse(x[frame].mean(0), x[frame].T.cov()))
        same = frame < len(closed.times) and closed.times[frame] == simulation.flow.times[frame]
        x_there, y_there = (
            ellipse(closed.means[frame], closed.covariances[frame]) if same else (NOTHING, NOTHING)
        )
        exact.set_data(x_there, y_there)

    return move


def _spread(ax: Axes, simulation: Simulation, found: Moments) -> None:
    """Standard deviations along depth, by particles and by the closed equation."""
    closed = found.beyond
    x = simulation.flow.positions.cpu()
    ours = closed.covariances.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt().cpu()
    # One token has no spread to compare with.
    theirs = x.std(dim=1) if simulation.n > 1 else torch.full_like(x[:, 0], torch.nan)
    # The axis follows the particles: the closed equation may blow up long before its end.
    largest = theirs[theirs < LARGEST]
    top = 3 * (largest if len(largest) else ours[0]).max().item()
    for i in range(min(simulation.dim, 2)):
        tint = (BLUE, ORANGE)[i]
        _curve(
            ax, closed.times, ours[:, i], color=tint, label=f"coordinate {i + 1}, closed equation"
        )
        if simulation.n > 1:
            times = simulation.flow.times[::4]
            values = theirs[::4, i]
            _curve(
                ax,
                times,
                values,
                marker="o",
                linestyle="",
                markersize=3,
                color=tint,
                label="particles",
            )
    if found.blow_up is not None:
        ax.axvline(
            found.blow_up, color=GREY, linestyle=":", label=f"blow-up at t = {found.blow_up:.4g}"
        )
    ax.set_ylim(0, top)
    ax.set_xlabel("depth t")
    ax.set_ylabel("standard deviation of the tokens")
    ax.legend(fontsize="small", loc="upper left")


def _curve(ax: Axes, times: Tensor, values: Tensor, **style: Any) -> None:
    """Plot a curve up to the largest value that can be drawn."""
    drawn = values.abs() < LARGEST
    ax.plot(times[drawn], values[drawn], **style)


def _growth(ax: Axes, found: DepthGrowth) -> None:
    curves: tuple[tuple[Tensor, str, str, str], ...] = (
        (found.gronwall, "exp of the integral of ‖D f‖", ":", GREY),
        (found.product, "product of the layers' constants", "--", ORANGE),
        (found.sigma, "σ, the whole network", "-", BLUE),
    )
    for values, name, style, tint in curves:
        _curve(ax, found.times, values, linestyle=style, color=tint, label=name)
    ax.set_yscale("log")
    ax.set_xlabel("depth t")
    ax.set_ylabel("largest growth of a small change")
    ax.legend(fontsize="small", loc="upper left")
