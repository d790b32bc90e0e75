"""Figures of attacks: comparison at equal norm; sigma of real and adversarial inputs by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from lipscope._types import UserError
from lipscope.papers.attack_comparison import DIRECTION, GRADIENT, RANDOM, TOKENS, Trial
from lipscope.report.palette import colour, marker, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = {
    GRADIENT: (colour("s0"), "o-"),
    DIRECTION: (colour("s2"), "s-"),
    TOKENS: (colour("s1"), "D--"),
    RANDOM: (colour("muted"), "^:"),
}
"""Colour and marker of each attack; the markers distinguish them without colour."""


def contest_figure(trials: Sequence[Trial]) -> Figure:
    """Change of the output, and share of texts whose nearest neighbour changed, by norm."""
    import matplotlib.pyplot as plt

    if not trials:
        raise UserError("there are no trials to draw; run compare_attacks to get some")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    count = len({t.text for t in trials})
    for attack, (tint, mark) in LOOKS.items():
        here = {
            b: [t for t in trials if (t.attack, t.budget) == (attack, b)]
            for b in sorted({t.budget for t in trials})
        }
        here = {b: rows for b, rows in here.items() if rows}
        if not here:
            continue
        # Attacks reach a budget only nearly: they are compared at the norms they really have.
        norms = [median(t.norm for t in rows) for rows in here.values()]
        changes = [sorted(t.change for t in rows) for rows in here.values()]
        left.plot(norms, [median(c) for c in changes], mark, color=tint, markersize=4, label=attack)
        left.fill_between(
            norms,
            [c[0] for c in changes],
            [c[-1] for c in changes],
            color=tint,
            alpha=0.12,
            linewidth=0,
        )
        shares = [100 * sum(t.success for t in rows) / len(rows) for rows in here.values()]
        right.plot(norms, shares, mark, color=tint, markersize=4, label=attack)
    left.set(
        xscale="log", yscale="log", ylabel="‖F(X+E) − F(X)‖ / ‖F(X)‖", title="change of the output"
    )
    right.set(xscale="log", ylabel="texts, %", ylim=(-4, 104), title="nearest neighbour changed")
    for ax in (left, right):
        ax.set_xlabel(f"‖E‖, Frobenius norm in embeddings (median of {count} texts)")
        ax.grid(alpha=0.25, which="both" if ax is left else "major")
    left.legend(fontsize="small")
    return figure


def adversarial_growth_figure(curves: Mapping[str, Mapping[int, float]], title: str) -> Figure:
    """sigma against length on log axes, one curve per name."""
    import matplotlib.pyplot as plt

    if not curves:
        raise UserError("there are no curves to draw; pass {name: {n: sigma}}")
    figure, ax = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    lengths = sorted({n for curve in curves.values() for n in curve})
    for i, (name, curve) in enumerate(curves.items()):
        at = sorted(curve)
        ax.plot(
            at,
            [curve[n] for n in at],
            marker(i)[0] + "-",
            markersize=4,
            color=colour(series(i, len(curves))),
            label=name,
        )
    # The guide starts below all curves: its slope matters, not its height.
    lowest = min(min(curve.values()) for curve in curves.values())
    ax.plot(
        lengths,
        [0.8 * lowest * (n / lengths[0]) ** 0.5 for n in lengths],
        "--",
        color=colour("muted"),
        label="slope 1/2",
    )
    ax.set(xscale="log", yscale="log", xlabel="n, tokens", ylabel="σ, local Lipschitz constant")
    ax.set_title(title, parse_math=False)
    ax.set_xticks(lengths, list(map(str, lengths)))
    ax.minorticks_off()
    ax.grid(alpha=0.25)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure
