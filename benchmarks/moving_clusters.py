"""The clusters of `lipscope simulate --preset clusters` as a GIF.

python benchmarks/moving_clusters.py [clusters.gif]
"""

from __future__ import annotations

import sys

import matplotlib.pyplot as plt
from matplotlib.animation import FuncAnimation, PillowWriter

import lipscope as ls
from lipscope.report.palette import colour


def main(path: str = "clusters.gif") -> None:
    simulation = ls.simulate("clusters")
    z = simulation.flow.renormalised.numpy()
    figure, ax = plt.subplots(figsize=(5.4, 4.6), layout="constrained")
    dots = ax.scatter(z[0, :, 0], z[0, :, 1], s=8, c=colour("s0"), alpha=0.7)
    low = z.min(axis=(0, 1))
    high = z.max(axis=(0, 1))
    pad = 0.05 * (high - low)
    ax.set(xlim=(low[0] - pad[0], high[0] + pad[0]), ylim=(low[1] - pad[1], high[1] + pad[1]))
    ax.set(xlabel="z = exp(-tV) x, coordinate 1", ylabel="coordinate 2", aspect="equal")

    def move(frame: int) -> None:
        dots.set_offsets(z[frame])
        ax.set_title(f"clusters, t = {simulation.flow.times[frame]:.3g}", fontsize="medium")

    FuncAnimation(figure, move, len(z)).save(path, PillowWriter(fps=12), dpi=72)


if __name__ == "__main__":
    main(*sys.argv[1:2])
