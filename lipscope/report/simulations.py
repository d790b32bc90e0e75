"""Simulated flows: figures of the tokens and of what was found, files, and the summary."""

from __future__ import annotations

import csv
import json
import math
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lipscope import __version__
from lipscope._files import check_folder, whole_file
from lipscope._types import UserError
from lipscope.dynamics.clusters import Clusters
from lipscope.dynamics.depth_growth import DepthGrowth
from lipscope.dynamics.particles import Flow
from lipscope.dynamics.simulation import Moments, Simulation
from lipscope.report.figures import new_axes
from lipscope.report.palette import colour
from lipscope.study.export import finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLUSTER = ("centres", "masses", "radii", "formed", "margins", "extreme")
GROWTH = ("times", "sigma", "product", "gronwall", "local")
FIGURE = "figure.png"
NUMBERS = "simulation.json"
SERIES = "series.csv"

SIZE = (10, 4.6)
"""Inches of the two panels."""

PATHS = 400
"""Maximum number of paths drawn."""

LARGEST = 1e200
"""Above this, the ticks and margins of an axis overflow."""

BELOW: dict[str, Any] = {"bbox_to_anchor": (0.5, -0.14), "fontsize": "small", "frameon": False}
BELOW |= {"loc": "upper center", "ncols": 2}
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


def _panels(simulation: Simulation, figure: Figure) -> Figure:
    left, right = figure.subplots(1, 2)
    found = simulation.found
    if isinstance(found, Moments):
        _cloud(left, simulation, found)
        _spread(right, simulation, found)
    else:
        plot_flow(simulation.flow, left, simulation.preset.renormalise)
        if isinstance(found, Clusters):
            _centres(left, simulation, found)
            _counts(right, simulation, found)
        else:
            plot_depth_growth(found, right)
    figure.suptitle(
        f"{simulation.name}: n = {simulation.n}, d = {simulation.dim}, seed {simulation.seed}",
        fontsize="medium",
    )
    return figure


def plot_flow(flow: Flow, ax: Axes | None, renormalised: bool) -> Axes:
    """Draw the initial tokens of any flow and their paths."""
    ax = new_axes(ax)
    z = (flow.renormalised if renormalised else flow.positions).detach().cpu().numpy()
    times, (n, dim) = flow.times.cpu().numpy(), z.shape[1:]
    # Spread over the sequence, because in a causal flow the position decides the fate of a token.
    chosen = np.linspace(0, n - 1, min(n, PATHS)).round().astype(int)
    tint: Any = BLUE
    if flow.f.causal:  # where order matters, colours show the position in the sequence
        from matplotlib import colormaps

        tint = colormaps["viridis"](np.linspace(0, 0.95, n))
    for i in chosen:
        own = tint if isinstance(tint, str) else tint[i]
        along = (times, z[:, i, 0]) if dim == 1 else (z[:, i, 0], z[:, i, 1])
        ax.plot(*along, color=own, linewidth=0.6, alpha=0.45)
    if dim > 1:
        ax.scatter(z[0, :, 0], z[0, :, 1], s=6, c=tint, alpha=0.7, label="tokens at t = 0")
    _label_axes(ax, dim, renormalised)
    return ax


def _label_axes(ax: Axes, dim: int, renormalised: bool) -> None:
    letter = "z = exp(-tV) x" if renormalised else "x"
    if dim == 1:
        ax.set_xlabel("depth t")
        ax.set_ylabel(letter)
        return
    first = " (first two of them)" if dim > 2 else ""
    ax.set_xlabel(f"{letter}, coordinate 1{first}")
    ax.set_ylabel("coordinate 2")
    ax.set_aspect("equal", adjustable="datalim")


def _centres(ax: Axes, simulation: Simulation, found: Clusters) -> None:
    """Centres of clusters or groups, filled where they are vertices of their convex hull."""
    what = "limit points" if found.clear else "centres of groups"
    centres = found.centres.numpy()
    extreme = found.extreme.numpy()
    style: dict[str, Any] = {"s": 60, "edgecolors": ORANGE, "zorder": 3}
    at = centres
    if simulation.dim == 1:
        at = np.insert(centres, 0, simulation.flow.times[-1].item(), axis=1)
    for which, face, name in ((extreme, ORANGE, "vertices"), (~extreme, "white", "not vertices")):
        if which.any():
            text = f"{what}: {which.sum()} {name}"
            ax.scatter(at[which, 0], at[which, 1], c=face, label=text, **style)
    if simulation.dim == 2 and extreme.sum() > 2:
        corners = centres[extreme]
        # Corners of a convex polygon in the order of their angles around its centre.
        around = np.argsort(np.arctan2(*(corners - corners.mean(axis=0)).T[::-1]))
        hull = corners[[*around, around[0]]]
        ax.plot(hull[:, 0], hull[:, 1], color=ORANGE, linewidth=1, linestyle="--")
    if simulation.preset.causal and simulation.dim > 1:
        x, y = simulation.shown[0, 0, :2]
        tint = colour("s5")
        ax.scatter(x, y, marker="x", s=90, c=tint, zorder=4, label="first token, at rest")
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
    x = simulation.shown[-1]
    if simulation.dim == 1:
        room = 1e-6 * x.abs().max().item()
        ends = (x.min().item(), x.max().item())
        if ends[1] - ends[0] < room:  # tokens that have all but met leave no space for bins
            ends = (ends[0] - room, ends[1] + room)
        ax.hist(x[:, 0].numpy(), bins=40, range=ends, density=True, color=BLUE, alpha=0.5)
        ax.set_xlabel("x")
        ax.set_ylabel("density of particles")
        return
    last = len(simulation.flow.times) - 1
    time = simulation.flow.times[last]
    closed = found.closed
    ax.scatter(x[:, 0], x[:, 1], s=4, c=BLUE, alpha=0.4, label="particles")
    nothing = np.empty((2, 0))
    own = nothing if simulation.n == 1 else _ellipse(x.mean(0), x.T.cov())
    ax.plot(*own, color=BLUE, linewidth=1, label="their mean and covariance, 2 sd")
    same = last < len(closed.times) and closed.times[last] == time
    exact = _ellipse(closed.means[last], closed.covariances[last]) if same else nothing
    ax.plot(*exact, color=ORANGE, linestyle="--", label="closed equation, 2 sd")
    _label_axes(ax, simulation.dim, simulation.preset.renormalise)
    ax.legend(**(BELOW | {"bbox_to_anchor": (0.5, -0.24)}))
    ax.set_adjustable("box")  # keep the limits; equal scales change the shape
    low = x.amin(dim=0)
    high = x.amax(dim=0)
    pad = 0.05 * (high - low).clamp_min(1e-9 * max(1.0, x.abs().max().item()))
    ax.set_xlim((low - pad)[0].item(), (high + pad)[0].item())
    ax.set_ylim((low - pad)[1].item(), (high + pad)[1].item())
    ax.set_title(f"t = {time.item():.3g}", fontsize="medium")


def _ellipse(mean: Tensor, covariance: Tensor) -> np.ndarray:
    """The curve [2, points] at two standard deviations, in the first two coordinates."""
    angle = np.linspace(0, 2 * math.pi, 100)
    # A covariance that rounding made slightly indefinite still has an ellipse.
    values, vectors = np.linalg.eigh(covariance[:2, :2].cpu().numpy())
    axes = vectors * np.sqrt(np.clip(values, 0, None))
    circle = np.stack([np.cos(angle), np.sin(angle)])
    curve: np.ndarray = 2 * axes @ circle + mean[:2].cpu().numpy()[:, None]
    return curve


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
        name = f"coordinate {i + 1}, closed equation"
        _curve(ax, closed.times, ours[:, i], color=tint, label=name)
        if simulation.n > 1:
            style = {"marker": "o", "linestyle": "", "markersize": 3, "color": tint}
            times = simulation.flow.times[::4]
            _curve(ax, times, theirs[::4, i], **style, label="particles")
    if found.blow_up is not None:
        name = f"blow-up at t = {found.blow_up:.4g}"
        ax.axvline(found.blow_up, color=GREY, linestyle=":", label=name)
    ax.set_ylim(0, top)
    ax.set_xlabel("depth t")
    ax.set_ylabel("standard deviation of the tokens")
    ax.legend(fontsize="small", loc="upper left")


def _curve(ax: Axes, times: Tensor, values: Tensor, **style: Any) -> None:
    """Plot a curve up to the largest value that can be drawn."""
    drawn = values.abs() < LARGEST
    ax.plot(times[drawn], values[drawn], **style)


def plot_depth_growth(found: DepthGrowth, ax: Axes | None) -> Axes:
    """Draw the growth of a small change along depth, and its bounds."""
    ax = new_axes(ax)
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
    return ax


def write_simulation(simulation: Simulation, out: Path) -> list[Path]:
    """Write a figure, numbers as JSON, and series along depth as CSV to `out`."""
    check_simulation_folder(out)
    numbers = numbers_of(simulation)
    figure, record, series = paths = [out / name for name in (FIGURE, NUMBERS, SERIES)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Results of an earlier run must not remain beside the numbers of this one.
        figure.unlink(missing_ok=True)
        series.unlink(missing_ok=True)
        # First, because this file marks the folder as ours: an interrupted run can be repeated.
        with whole_file(record) as path:
            path.write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n")
        with whole_file(series) as path, path.open("w", newline="") as file:
            csv.writer(file).writerows(_series(simulation))
        with whole_file(figure) as path:
            draw(simulation).savefig(path, dpi=110)
    except OSError as error:
        raise UserError(
            f"cannot write to {out} ({error.strerror or error}); give another --out"
        ) from error
    return paths


def check_simulation_folder(out: Path) -> None:
    """Refuse a folder that is not writable or holds something else, before any computation."""
    check_folder(out, "a simulation", (NUMBERS,))


def summary(simulation: Simulation) -> list[tuple[str, str]]:
    """The rows of the summary table, as (name, text)."""
    found = simulation.found
    flow = simulation.flow
    tokens = f"{simulation.n} of dimension {simulation.dim}, seed {simulation.seed}"
    lines = [
        ("preset", f"{simulation.name}: {simulation.preset.about}"),
        ("tokens", f"{tokens}, {simulation.device}"),
        ("flow", flow.summary),
    ]
    if isinstance(found, Clusters):
        lines += [("clusters", found.summary)]
        # More shares than these do not fit a line of the terminal; all are in the JSON file.
        if len(found) <= 12:
            lines += [("mass", ", ".join(f"{100 * m:.3g} %" for m in found.masses.tolist()))]
    elif isinstance(found, Moments):
        end = len(flow.times) - 1
        lines += [("moments", found.closed.summary)]
        if found.closed.ok and flow.ok and simulation.n > 1:
            ours = found.closed.covariances[end].trace().item()
            theirs = flow.positions[end].var(dim=0).sum().item()
            variance = f"{ours:.5g} by the closed equation, {theirs:.5g} of the particles"
            lines += [("variance", variance)]
        none = f"none before t = {found.searched:.4g}"
        lines += [("blow-up", none if found.blow_up is None else f"t = {found.blow_up:.9g}")]
    else:
        lines += [("growth", found.summary)]
    return lines


def numbers_of(simulation: Simulation) -> dict[str, Any]:
    """Settings and results as plain data; infinite numbers become None."""
    flow = simulation.flow
    found = simulation.found
    packages = {name: version(name) for name in ("torch", "torchdiffeq")}
    numbers: dict[str, Any] = {
        "preset": simulation.name,
        "n": simulation.n,
        "dim": simulation.dim,
        "time": simulation.time,
        "seed": simulation.seed,
        "device": simulation.device,
        "dtype": str(flow.positions.dtype).removeprefix("torch."),
        "versions": {"lipscope": __version__, "python": platform.python_version(), **packages},
        "status": simulation.summary,
        "reached": flow.times[-1].item(),
        "steps": flow.steps,
        "evaluations": flow.evaluations,
        "unresolved": flow.unresolved,
    }
    if isinstance(found, Clusters):
        parts = {name: getattr(found, name).tolist() for name in CLUSTER}
        numbers["clusters"] = {"width": found.width} | parts
    elif isinstance(found, Moments):
        x = flow.positions[-1]
        own = x.T.cov().reshape(x.shape[1], -1).tolist() if len(x) > 1 else None
        numbers["gaussian"] = {
            "blow_up": found.blow_up,
            "searched": found.searched,
            "reached": found.closed.times[-1].item(),
            "mean": found.closed.means[-1].tolist(),
            "covariance": found.closed.covariances[-1].tolist(),
            "particle_mean": x.mean(0).tolist(),
            "particle_covariance": own,
        }
    else:
        parts = {name: getattr(found, name).tolist() for name in GROWTH}
        numbers["growth"] = {"overflow": found.overflow} | parts
    # JSON has neither infinity nor NaN; a blow-up makes both.
    return finite(numbers)


def _series(simulation: Simulation) -> list[list[Any]]:
    """A header, and a row per time."""
    flow = simulation.flow
    found = simulation.found
    if isinstance(found, Clusters):
        groups = zip(flow.times.tolist(), found.counts.tolist(), strict=True)
        return [["t", "groups"], *map(list, groups)]
    if isinstance(found, Moments):
        d = range(simulation.dim)
        head = ["t", *(f"mean_{i}" for i in d), *(f"covariance_{i}_{j}" for i in d for j in d)]
        means = found.closed.means
        parts = [found.closed.times[:, None].to(means), means, found.closed.covariances.flatten(1)]
        return [head, *torch.cat(parts, dim=1).tolist()]
    columns = [getattr(found, name) for name in GROWTH]
    return [["t", *GROWTH[1:]], *torch.stack(columns, dim=1).tolist()]
