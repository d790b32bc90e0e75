"""A flow as a moving picture."""

from __future__ import annotations

from pathlib import Path

from lipscope.dynamics.integration import Progress
from lipscope.dynamics.simulation import Simulation
from lipscope.report.flow_figures import frame_of

FPS = 12


def animate(simulation: Simulation, path: Path, progress: Progress | None = None) -> None:
    """The tokens frame by frame as a GIF; frames of a moment ago never stay, axes stand still."""
    from matplotlib.animation import PillowWriter
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.6), layout="constrained")
    ax, paint = figure.subplots(), frame_of(simulation)
    z, times = simulation.shown, simulation.flow.times
    low, high = z.amin(dim=(0, 1)), z.amax(dim=(0, 1))
    pad = 0.05 * (high - low).clamp_min(1e-9)
    writer = PillowWriter(fps=FPS)
    with writer.saving(figure, str(path), dpi=72):
        for frame in range(len(times)):
            ax.clear()
            paint(ax, simulation, frame)
            ax.set_xlim((low - pad)[0].item(), (high + pad)[0].item())
            if simulation.dim > 1:
                ax.set_ylim((low - pad)[1].item(), (high + pad)[1].item())
            ax.set_adjustable("box")
            ax.set_title(f"{simulation.name}, t = {times[frame].item():.2f}", fontsize="medium")
            writer.grab_frame()
            if progress:
                progress(frame + 1, len(times))
