"""The figures of docs/training.md: loss over steps, sigma by layer, and where training breaks."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import TYPE_CHECKING, Any

from lipscope.papers.trainings import (
    best_rate,
    cells_of,
    outcomes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "dot": "dot product",
    "l2": "L2",
    "contractive": "contractive L2, 0.9",
    "invertible": "contractive L2, 0.9, invertible blocks",
    "dot, l2 values": "dot scores, L2 values",
    "l2, dot values": "L2 scores, dot values",
    "sharper contractive": "contractive L2, 0.9, sharper bound",
    "ball": "L2 in a ball",
    "contractive ball": "contractive L2 in a ball, 0.9",
    "invertible ball": "contractive L2 in a ball, 0.9, invertible blocks",
}

STYLES = ("solid", "dashed", "dotted")
COLOURS = {name: f"C{i}" for i, name in enumerate(NAMES)}
ACROSS = ("axes fraction", "data")
LOSS = "test loss (nats per character)"
TITLES = {"why": "no norm: scores or values?"}
ROOF, ROW = 3.45, 0.07
"""Broken trainings are marked above this loss, one row per curve, labelled by depth."""


def breaking_plans(results: dict[str, Any]) -> dict[str, Any]:
    """The plans without the usual safeguards against breaking."""
    return {name: plan for name, plan in results["settings"]["plans"].items() if not plan["decay"]}


def draw_grid(results: dict[str, Any]) -> Figure:
    """Test loss over steps for every cell of the grid and of the balls, and sigma by layer."""
    from matplotlib.figure import Figure

    plan = results["settings"]["plans"]["grid"]
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    loss, sigma = figure.subplots(1, 2)
    cells = cells_of(results, "grid") | cells_of(results, "balls")
    for (variant, depth), cell in cells.items():
        look = {"color": COLOURS[variant], "linestyle": STYLES[::-1][plan["depths"].index(depth)]}
        _, members = best_rate(cell)
        curve = [mean(point["test"][m] for m in members) for point in cell["curve"]]
        loss.plot([p["step"] for p in cell["curve"]], curve, **look)
        values = cell["sigma"][str(members[0])]
        sigma.plot(range(len(values)), values, marker=".", **look)
    _levels(loss, results)
    loss.set(xlabel="step", ylabel=LOSS, ylim=(1.5, 3.5))
    sigma.set(xlabel="layer", ylabel="local Lipschitz constant of attention", yscale="log")
    depths = [f"depth {depth}" for depth in plan["depths"]]
    _legend(
        figure, [variant for variant, _ in cells], dict(zip(depths, STYLES[::-1], strict=False))
    )
    return figure


def draw_breaking(results: dict[str, Any]) -> Figure:
    """Final loss against learning rate, a panel per plan; crosses for seeds that failed."""
    from matplotlib.figure import Figure

    plans = breaking_plans(results)
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    panels = list(figure.subplots(2, -(-len(plans) // 2), sharey=True).flat)
    for name, panel in zip(plans, panels, strict=False):
        _draw_plan(panel, results, name)
    for spare in panels[len(plans) :]:
        spare.remove()
    shown = [variant for name in plans for variant, _ in cells_of(results, name)]
    words = ("smallest depth of a panel", "next", "largest of three")
    _legend(figure, shown, dict(zip(words, STYLES, strict=True)))
    return figure


def _legend(figure: Figure, variants: Iterable[str], styles: dict[str, Any]) -> None:
    """One legend for all panels: colours are attentions, line styles depths."""
    from matplotlib.lines import Line2D

    colours = [Line2D([], [], color=COLOURS[v], label=NAMES[v]) for v in dict.fromkeys(variants)]
    lines = [
        Line2D([], [], color="black", linestyle=style, label=words)
        for words, style in styles.items()
    ]
    figure.legend(handles=[*colours, *lines], loc="outside lower center", ncols=4, fontsize="small")


def _draw_plan(panel: Axes, results: dict[str, Any], name: str) -> None:
    plan, unigram = results["settings"]["plans"][name], results["settings"]["unigram_loss"]
    for row, ((variant, depth), cell) in enumerate(cells_of(results, name).items()):
        colour, style = COLOURS[variant], STYLES[plan["depths"].index(depth)]
        ends = outcomes(cell, unigram)
        means = {rate: mean(end.learned) for rate, end in ends.items() if end.learned}
        panel.plot(
            list(means),
            list(means.values()),
            color=colour,
            linestyle=style,
            marker=".",
        )
        lost = {rate: end.broken + end.stuck for rate, end in ends.items() if not end.fine}
        height = ROOF + ROW * row
        panel.scatter(
            list(lost),
            [height] * len(lost),
            [18 * count for count in lost.values()],
            colour,
            marker="x",
        )
        panel.annotate(
            f"{depth}", (1.01, height), xycoords=ACROSS, color=colour, va="center", size="x-small"
        )
    _levels(panel, results)
    title = TITLES.get(name, name)
    panel.set(
        title=title, xscale="log", xlabel="learning rate", ylabel=LOSS, ylim=(1.6, ROOF + 0.6)
    )
    ticks = [f"{rate:g}" for rate in plan["rates"]]
    panel.set_xticks(plan["rates"], ticks, fontsize="small", rotation=60)
    panel.minorticks_off()


def _levels(panel: Axes, results: dict[str, Any]) -> None:
    """The unigram and bigram baselines."""
    for level, words in (
        (results["settings"]["unigram_loss"], "frequencies"),
        (results["bigram_loss"], "pairs"),
    ):
        panel.axhline(level, color="gray", linewidth=0.8)
        panel.annotate(
            words,
            (1, level),
            xycoords=ACROSS,
            color="gray",
            ha="right",
            va="top",
            fontsize="small",
        )
