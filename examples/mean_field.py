"""Attention on measures in four pictures and a table: python examples/mean_field.py FOLDER

transition.png       from n tokens to a measure: sigma(n) reaches a plateau at n = exp(2 gamma R^2)
two_diracs.png       the two-Dirac measures between the proved lower bound and both upper bounds
masked.png           why the bound for unmasked attention fails in d_p, and the one that holds
splitting_map.png    where two tokens on the line split
splitting_table.md   which maps split, and by how much
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no window is needed
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import track

import lipscope as ls
from lipscope.linalg.estimate import as_single
from lipscope.mean_field.duplication import MapGain, splitting_map, splitting_table
from lipscope.mean_field.measures import DiscreteMeasure, derivative
from lipscope.mean_field.upper_bounds import averaging, d_p_bound, w2_bound, w2_bound_geshkovski2023
from lipscope.report import figures
from lipscope.report.palette import colour, series
from lipscope.theorems.geshkovski2023 import masked_wasserstein_upper


def draw_two_diracs(
    f: ls.SelfAttention, radii: Sequence[float], ax: Axes, family: str | None = None
) -> Axes:
    """||D_mu F|| of the two-Dirac measures over R, between its lower and upper bounds."""
    worst = [ls.mean_field.two_diracs(f, R, family) for R in radii]
    sigma = [
        as_single(ls.spectral_norm(derivative(f, w.measure), 1e-9, solver=ls.Solver(seed=0))).value
        for w in worst
    ]
    ax.plot(
        radii,
        [w2_bound_geshkovski2023(f, R) for R in radii],
        "--",
        color=colour("muted"),
        label="published: ‖V‖(1+3a)exp(2a)",
    )
    ax.plot(
        radii,
        [w2_bound(f, R) for R in radii],
        color=colour("s1"),
        label="sharper: ‖V‖(a+(1+a)exp(a))",
    )
    ax.plot(radii, sigma, "o", color=colour("ink"), markersize=3, label="‖D_μF‖ at p = exp(-2γR²)")
    ax.plot(
        radii,
        [w.guaranteed for w in worst],
        color=colour("s0"),
        label="proved from below: |Vu| (γ/2) R² exp(γR²)",
    )
    ax.set_yscale("log")
    ax.set_xlabel("R, radius")
    ax.set_ylabel("Lipschitz constant in W₂")
    ax.legend(fontsize="small", loc="upper left")
    return ax


def draw_averaging(exponents: Sequence[float], counts: Sequence[int], ax: Axes) -> Axes:
    """The d_p constants of causal averaging of n tokens, their limits, and the unmasked bound."""
    for i, p in enumerate(exponents):
        tint = colour(series(i, len(exponents)))
        constants = [averaging(n, p).constant for n in counts]
        limit = math.inf if p == 1 else 1.0 if math.isinf(p) else p / (p - 1)
        name = "∞" if math.isinf(p) else f"{p:g}"
        ax.plot(
            counts,
            constants,
            ".-",
            color=tint,
            label=f"p = {name}, limit {'∞' if p == 1 else f'{limit:.3g}'}",
        )
        # For p = 1 the constant is the harmonic sum, which has no limit.
        if math.isfinite(limit):
            ax.axhline(limit, color=tint, linewidth=0.8, linestyle=":")
    ax.axhline(
        1.0, color=colour("s1"), linestyle="--", label="bound without mask, (1+3a)exp(2a) at a = 0"
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_yticks([1, 2, 3, 5, 10], ["1", "2", "3", "5", "10"])
    ax.set_ylim(0.9, 6 * ax.dataLim.ymax)  # space for the legend
    ax.set_xlabel("n, number of tokens")
    ax.set_ylabel("constant of averaging over the past in d_p")
    ax.legend(fontsize="small", loc="upper left")
    return ax


def draw_masked_bounds(
    f: ls.SelfAttention, radii: Sequence[float], X: torch.Tensor, ax: Axes
) -> Axes:
    """The d_2 constant of causal f at tokens R X, over R: above the unmasked bound, below ours."""
    measures = [DiscreteMeasure.uniform(R * X, causal=True) for R in radii]
    sigma = [
        as_single(ls.spectral_norm(derivative(f, mu), 1e-6, solver=ls.Solver(seed=0))).value
        for mu in measures
    ]
    without = [w2_bound_geshkovski2023(replace(f, causal=False), R) for R in radii]
    hardy = [masked_wasserstein_upper(f.double(), ls.Ball(R, 1)) for R in radii]
    ax.plot(radii, without, "--", color=colour("s1"), label="bound without mask: ‖V‖(1+3a)exp(2a)")
    ax.plot(radii, hardy, color=colour("s2"), label="corrected: ‖V‖(a+2(1+2a)exp(2a))")
    ax.plot(
        radii,
        [d_p_bound(f, R, 2) for R in radii],
        color=colour("s0"),
        label="corrected, exponent halved",
    )
    ax.plot(
        radii, sigma, "o-", color=colour("ink"), markersize=3, label=f"‖D_μF‖ of {len(X)} tokens"
    )
    ax.set_yscale("log")
    ax.set_xlabel("R, radius")
    ax.set_ylabel("Lipschitz constant in d₂")
    ax.legend(fontsize="small", loc="upper left")
    return ax


def line(A: float, causal: bool = False) -> ls.SelfAttention:
    """Attention on tokens of size 1 with scores A x_i x_j and V = 1."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return ls.SelfAttention(A * one, one, one, causal=causal)


def transition() -> Figure:
    figure, ax = plt.subplots(figsize=(7, 4.6), layout="constrained")
    figures.draw_transitions(
        [
            ls.mean_field.transition(line(-1.0), R, 1e30, per_decade=8)
            for R in (1.0, 2.0, 3.0, 4.0, 5.0)
        ],
        ax,
    )
    ax.set_title("A = -1, V = 1: one token at R, a crowd at -R")
    return figure


def two_diracs() -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    radii = [0.1 * i for i in range(1, 41)]
    draw_two_diracs(line(-1.0), radii, left).set_title("A = -1: atoms at R and -R, γ = 1")
    draw_two_diracs(line(1.0), radii, right).set_title("A = 1: atoms at R and R/2, γ = 1/8")
    return figure


def masked() -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    counts = [round(10 ** (i / 4)) for i in range(21)]
    draw_averaging((1, 1.25, 1.5, 2, 4, math.inf), counts, left).set_title(
        "A = 0: causal attention is averaging"
    )
    tokens = torch.tensor([1.0] + [-1.0] * 399, dtype=torch.float64)[:, None]
    radii = [0.05 * i for i in range(1, 25)]
    draw_masked_bounds(line(-1.0, causal=True), radii, tokens, right)
    right.set_title("A = -1: tokens R, -R, -R, -R, ...")
    return figure


def maps() -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    at = torch.linspace(-6, 6, 241, dtype=torch.float64)
    for ax, causal in zip(axes, (False, True), strict=True):
        figures.draw_splitting_map(splitting_map(line(-1.0, causal), at), ax)
        ax.set_title(
            "A = -1, V = 1, masked: token 1 comes first"
            if causal
            else "A = -1, V = 1, without mask"
        )
    return figure


def table(two: list[MapGain], three: list[MapGain]) -> str:
    """Largest gains found in the plane, V = I, radius 16, two and three tokens, any weights."""
    lines = [
        "| map | 2 tokens, equal weights | 2, free weights | 3, equal | 3, free |",
        "|---|---|---|---|---|",
    ]
    for few, more in zip(two, three, strict=True):
        gains = (few.equal, few.free, more.equal, more.free)
        lines.append(" | ".join([f"| {few.name}", *(f"{gain:.4f}" for gain in gains)]) + " |")
    return "\n".join(lines) + "\n"


PICTURES = {
    "transition": transition,
    "two_diracs": two_diracs,
    "masked": masked,
    "splitting_map": maps,
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in track([*PICTURES, "2 tokens", "3 tokens"], description="drawing"):
        if name in PICTURES:
            PICTURES[name]().savefig(folder / f"{name}.png", dpi=110)
        else:
            rows.append(splitting_table(int(name[0])))
    (folder / "splitting_table.md").write_text(table(*rows), encoding="utf-8")
    print(f"in {folder}: {', '.join(f'{name}.png' for name in PICTURES)}, splitting_table.md")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/mean_field.py FOLDER")
    main(Path(sys.argv[1]))
