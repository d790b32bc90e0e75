"""A flow as an animated GIF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lipscope.dynamics.integration import Progress
from lipscope.dynamics.simulation import Moments, Simulation
from lipscope.report.flow_figures import Move, colours, frame_axes, label_axes, moving_cloud

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FPS = 12


def animate(simulation: Simulation, path: Path, progress: Progress | None = None) -> None:
    """Write the tokens of a flow, frame by frame, as a GIF with fixed axes."""
    from matplotlib.animation import PillowWriter
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 4.6))
    ax = figure.subplots()
    times = simulation.flow.times
    if isinstance(simulation.found, Moments) and simulation.dim > 1:
        move = moving_cloud(ax, simulation, simulation.found)
    else:
        move = _moving_tokens(ax, simulation)
    frame_axes(ax, simulation.shown)
    ax.ticklabel_format(useOffset=False)
    figure.subplots_adjust(left=0.17, bottom=0.22)
    # Every frame has the same size, so the layout is found once, by drawing nothing.
    figure.draw_without_rendering()
    hidden = -ax.yaxis.label.get_window_extent().x0 / figure.bbox.width
    figure.subplots_adjust(left=0.17 + max(0.0, hidden + 0.02))  # long numbers push the label out
    writer = PillowWriter(fps=FPS)
    with writer.saving(figure, str(path), dpi=72):
        for frame in range(len(times)):
            move(frame)
            ax.set_title(f"{simulation.name}, t = {times[frame].item():.3g}", fontsize="medium")
            writer.grab_frame()
            if progress:
                progress(frame + 1, len(times))


def _moving_tokens(ax: Axes, simulation: Simulation) -> Move:
    """Tokens in the plane; in one dimension, one above the other in order."""
    z = simulation.shown.numpy()
    if simulation.dim == 1:
        z = np.stack([z[..., 0], np.broadcast_to(np.arange(simulation.n), z.shape[:2])], axis=-1)
        ax.set_xlabel("z = exp(-tV) x" if simulation.preset.renormalise else "x")
        ax.set_ylabel("token")
    else:
        label_axes(ax, simulation.dim, simulation.preset.renormalise)
    dots = ax.scatter(z[0, :, 0], z[0, :, 1], s=8, c=colours(simulation.flow), alpha=0.7)
    return lambda frame: dots.set_offsets(z[frame, :, :2])
