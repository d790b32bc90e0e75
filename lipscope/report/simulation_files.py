"""The files of a simulation (animation, figure, numbers) and its summary on the terminal."""

from __future__ import annotations

import csv
import json
import math
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lipscope import __version__
from lipscope._files import check_folder, whole_file
from lipscope._types import UserError
from lipscope.dynamics.clusters import Clusters
from lipscope.dynamics.depth_growth import DepthGrowth
from lipscope.dynamics.integration import Progress
from lipscope.dynamics.simulation import Moments, Simulation
from lipscope.report.animation import animate
from lipscope.report.flow_figures import draw

CLUSTER = ("centres", "masses", "radii", "formed", "margins", "extreme")
GROWTH = ("times", "sigma", "product", "gronwall", "local")
ANIMATION = "animation.gif"
FIGURE = "figure.png"
NUMBERS = "simulation.json"
SERIES = "series.csv"


def write_simulation(
    simulation: Simulation, out: Path, progress: Progress | None = None
) -> list[Path]:
    """Write animation, figure, numbers as JSON, and series along depth as CSV to `out`."""
    check_simulation_folder(out)
    numbers = numbers_of(simulation)
    paths = [out / name for name in (ANIMATION, FIGURE, NUMBERS, SERIES)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in paths:
            # Pictures of an earlier run must not remain beside the numbers of this one.
            if path.name != NUMBERS:
                path.unlink(missing_ok=True)
        # First, because this file marks the folder as ours: an interrupted run can be repeated.
        with whole_file(paths[2]) as path:
            path.write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n")
        with whole_file(paths[3]) as path:
            _write_series(simulation, path)
        with whole_file(paths[1]) as path:
            draw(simulation).savefig(path, dpi=110)
        with whole_file(paths[0]) as path:
            animate(simulation, path, progress)
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
    lines = [
        ("preset", f"{simulation.name}: {simulation.preset.about}"),
        (
            "tokens",
            f"{simulation.n} of dimension {simulation.dim}, seed {simulation.seed}, "
            f"{simulation.device}",
        ),
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
            lines += [
                ("variance", f"{ours:.5g} by the closed equation, {theirs:.5g} of the particles")
            ]
        blow_up = (
            f"none before t = {found.searched:.4g}"
            if found.blow_up is None
            else f"t = {found.blow_up:.9g}"
        )
        lines += [("blow-up", blow_up)]
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
        numbers["clusters"] = {"width": found.width} | _named(found, CLUSTER)
    elif isinstance(found, Moments):
        x = flow.positions[-1]
        numbers["gaussian"] = {
            "blow_up": found.blow_up,
            "searched": found.searched,
            "reached": found.closed.times[-1].item(),
            "mean": _plain(found.closed.means[-1]),
            "covariance": _plain(found.closed.covariances[-1]),
            "particle_mean": _plain(x.mean(0)),
            "particle_covariance": _plain(x.T.cov().reshape(x.shape[1], -1))
            if len(x) > 1
            else None,
        }
    else:
        numbers["growth"] = {"overflow": found.overflow} | _named(found, GROWTH)
    return numbers


def _named(found: Clusters | DepthGrowth, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _plain(getattr(found, name)) for name in names}


def _plain(x: torch.Tensor) -> Any:
    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(v) for v in value]
        # JSON has neither infinity nor NaN; a blow-up makes both.
        return value if isinstance(value, bool | int) or math.isfinite(value) else None

    return finite(x.tolist())


def _write_series(simulation: Simulation, path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(_series(simulation))


def _series(simulation: Simulation) -> list[list[Any]]:
    """A header, and a row per time."""
    flow = simulation.flow
    found = simulation.found
    if isinstance(found, Clusters):
        return [
            ["t", "groups"],
            *([t, c] for t, c in zip(flow.times.tolist(), found.counts.tolist(), strict=True)),
        ]
    if isinstance(found, Moments):
        d = range(simulation.dim)
        head = ["t", *(f"mean_{i}" for i in d), *(f"covariance_{i}_{j}" for i in d for j in d)]
        lines = torch.cat(
            [
                found.closed.times[:, None].to(found.closed.means),
                found.closed.means,
                found.closed.covariances.flatten(1),
            ],
            dim=1,
        )
        return [head, *lines.tolist()]
    return [
        ["t", *GROWTH[1:]],
        *torch.stack([getattr(found, name) for name in GROWTH], dim=1).tolist(),
    ]
