"""Figures of attention on measures, the subject of `mean_field`, on matplotlib Axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lipscope._types import Ball
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.estimate import as_single
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.mean_field.attention_on_measures import derivative
from lipscope.mean_field.dirac_families import Transition, two_diracs
from lipscope.mean_field.duplication import SplittingMap
from lipscope.mean_field.measures import DiscreteMeasure
from lipscope.mean_field.upper_bounds import averaging, d_p_bound, w2_bound, w2_bound_geshkovski2023
from lipscope.report.palette import colour, series
from lipscope.theorems.geshkovski2023 import masked_wasserstein_upper

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_transitions(found: Sequence[Transition], ax: Axes) -> Axes:
    """sigma(n) of the adversarial family for each radius R, with sqrt n and n = e^{2 gamma R^2}."""
    ends = [float(n) for n in max(found, key=lambda curve: curve.n[-1]).n]
    ax.plot(ends, [math.sqrt(n) for n in ends], "--", color=colour("muted"), label="√n")
    for i, curve in enumerate(found):
        tint = colour(series(i, len(found)))
        n = [float(count) for count in curve.n]
        ax.plot(
            n,
            curve.sigma.tolist(),
            color=tint,
            label=f"R = {curve.R:g}, plateau {curve.plateau:.3g}",
        )
        if curve.predicted <= n[-1]:
            ax.vlines(curve.predicted, 1, curve.plateau, color=tint, linewidth=0.8, linestyle=":")
            ax.plot([curve.predicted], [curve.plateau], "o", color=tint, markersize=5)
    ax.plot(
        [],
        [],
        "o:",
        color=colour("muted"),
        markersize=5,
        linewidth=0.8,
        label="n = exp(2γR²), predicted",
    )
    # sqrt n has no end: the axes follow the other curves.
    ax.set_xlim(2, ends[-1])
    ax.set_ylim(1, 10 * max(curve.sigma.max().item() for curve in found))
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("n, number of tokens")
    ax.set_ylabel("σ(n), local Lipschitz constant")
    ax.legend(fontsize="small", loc="upper left")
    return ax


def draw_splitting_map(found: SplittingMap, ax: Axes) -> Axes:
    """The gain from mass splitting as colour, over the positions of two tokens on the line."""
    at = found.positions.tolist()
    image = ax.pcolormesh(
        at, at, found.gain.T.tolist(), cmap="magma_r", vmin=1.0, shading="nearest", rasterized=True
    )
    ax.set_aspect("equal")
    ax.set_xlabel("position of token 1")
    ax.set_ylabel("position of token 2")
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
    bar.set_label("gain, with splitting / without (1: splitting does not help)")
    return ax


def draw_two_diracs(
    f: SelfAttention, radii: Sequence[float], ax: Axes, family: str | None = None
) -> Axes:
    """||D_mu F|| of the two-Dirac measures over R, between its lower and upper bounds."""
    worst = [two_diracs(f, R, family) for R in radii]
    sigma = [
        as_single(spectral_norm(derivative(f, w.measure), 1e-9, solver=Solver(seed=0))).value
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


def draw_masked_bounds(f: SelfAttention, radii: Sequence[float], X: torch.Tensor, ax: Axes) -> Axes:
    """The d_2 constant of causal f at tokens R X, over R: above the unmasked bound, below ours."""
    measures = [DiscreteMeasure.uniform(R * X, causal=True) for R in radii]
    sigma = [
        as_single(spectral_norm(derivative(f, mu), 1e-6, solver=Solver(seed=0))).value
        for mu in measures
    ]
    without = [w2_bound_geshkovski2023(replace(f, causal=False), R) for R in radii]
    hardy = [masked_wasserstein_upper(f.double(), Ball(R, 1)) for R in radii]
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
