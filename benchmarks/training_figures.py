"""The figures of docs/training.md: loss over steps, sigma by layer, and where training breaks."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, Any

from lipscope.reproduce.training_outcomes import (
    NAMES,
    best_rate,
    breaking_plans,
    cells_of,
    outcomes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("solid", "dashed", "dotted")
COLOURS = {name: f"C{i}" for i, name in enumerate(NAMES)}
ACROSS = ("axes fraction", "data")
LOSS = "test loss (nats per character)"
TITLES = {"why": "no norm: scores or values?"}
ROOF, ROW = 3.45, 0.07
"""Broken trainings are marked above this loss, one row per curve, labelled by depth."""


def draw_grid(results: dict[str, Any]) -> Figure:
    """Test loss over steps for every cell of the grid, and sigma by layer."""
    from matplotlib.figure import Figure

    plan = results["settings"]["plans"]["grid"]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    loss, sigma = figure.subplots(1, 2)
    for (variant, depth), cell in cells_of(results, "grid").items():
        look = {"color": COLOURS[variant], "linestyle": STYLES[::-1][plan["depths"].index(depth)]}
        _, members = best_rate(cell)
        curve = [mean(point["test"][m] for m in members) for point in cell["curve"]]
        loss.plot(
            [p["step"] for p in cell["curve"]],
            curve,
            label=f"{NAMES[variant]}, depth {depth}",
            **look,
        )
        values = cell["sigma"][str(members[0])]
        sigma.plot(range(len(values)), values, marker=".", **look)
    _levels(loss, results)
    loss.set(xlabel="step", ylabel=LOSS, ylim=(1.5, 3.5))
    sigma.set(xlabel="layer", ylabel="local Lipschitz constant of attention", yscale="log")
    figure.legend(*loss.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    return figure


def draw_breaking(results: dict[str, Any]) -> Figure:
    """Final loss against learning rate, a panel per plan; crosses for seeds that failed."""
    from matplotlib.figure import Figure

    plans = breaking_plans(results)
    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = list(figure.subplots(2, -(-len(plans) // 2), sharey=True).flat)
    for name, panel in zip(plans, panels, strict=False):
        _draw_plan(panel, results, name)
    for spare in panels[len(plans) :]:
        spare.remove()
    return figure


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
            label=_label(variant, depth),
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
    panel.set_xticks(plan["rates"], [f"{rate:g}" for rate in plan["rates"]], fontsize="small")
    panel.minorticks_off()
    if panel.lines[2:]:
        panel.legend(fontsize="x-small", loc="lower left", ncols=2, handlelength=3)


def _label(variant: str, depth: int) -> str:
    return f"{NAMES[variant].replace('contractive L2, 0.9, ', '').replace(', 0.9', '')}, {depth}"


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
