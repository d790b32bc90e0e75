"""Figures of results for papers and notebooks: matplotlib Axes in, Axes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lipscope._types import UserError
from lipscope.report import charts
from lipscope.report.comparison import labels
from lipscope.report.content import LengthCurve, heat, length_curves
from lipscope.report.formats import exponent_range, layer_name, shown, shown_token
from lipscope.report.palette import colour, series
from lipscope.report.study_charts import curve_of, main_scope
from lipscope.study.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lipscope.mean_field.dirac_families import Transition
    from lipscope.mean_field.duplication import SplittingMap
    from lipscope.train.monitor import Reading

SIZE = 10.0

_DRAWN: WeakKeyDictionary[Axes, list[tuple[Study, list[LengthCurve]]]] = WeakKeyDictionary()
"""The studies whose growth stands on some Axes: the next one gets other colours and all get names.
"""


def heatmap(study: Study, ax: Axes | None = None, n: int | None = None) -> Axes:
    """Median sigma over samples, layers by heads, at length n; by default the largest."""
    found = heat(_measured(study))
    if n is not None and n not in found.lengths:
        raise UserError(f"nothing was measured at n = {n}; choose one of {found.lengths}")
    at = len(found.lengths) - 1 if n is None else found.lengths.index(n)
    ax = new_axes(ax)
    grid = found.grids[at]
    charts.style(ax, SIZE)
    few = len(grid.columns) <= 14 and len(grid.rows) <= 24
    charts.heat_map(ax, grid, {}, texts=few, size=7.0)
    if any(text.isdigit() for text in grid.columns):
        ax.set_xlabel("head")
    ax.set_title(
        f"{shown(study.info.about.model, 60)}, n = {found.lengths[at]:,}", parse_math=False
    )
    scale = found.scale
    charts.colour_bar(ax, "c", scale.low, scale.high, scale.log, "σ, median over samples")
    return ax


def growth(study: Study, ax: Axes | None = None, scope: str | None = None) -> Axes:
    """sigma against length on log axes: medians with ranges, the fit of each layer, and guides.

    Studies drawn on the same Axes get colours of their own, and a legend that says what differs.
    """
    scopes = list(dict.fromkeys(name for name, _ in _measured(study).maps))
    scope = scope or main_scope(scopes)
    if scope not in scopes:
        raise UserError(f"scope {scope} was not measured; choose one of {scopes}")
    ax = new_axes(ax)
    found = [curve for curve in length_curves(study) if curve.scope == scope]
    drawn = _DRAWN.setdefault(ax, [])
    drawn.append((study, found))
    # Names, guides and limits depend on all studies of the Axes: they are drawn again.
    ax.clear()
    charts.style(ax, SIZE)
    ax.set_yscale("log")
    lengths = sorted({n for _, part in drawn for curve in part for n in curve.spreads})
    charts.length_ticks(ax, lengths)
    names = labels([one for one, _ in drawn]) if len(drawn) > 1 else [""]
    values: list[float] = []
    for k, (name, (_, part)) in enumerate(zip(names, drawn, strict=True)):
        for i, curve in enumerate(part):
            # One study: a colour per layer. Several: a colour per study, a marker per layer.
            tint = series(i, len(part)) if len(drawn) == 1 else series(k, len(drawn))
            law = curve.law
            fit = f", α = {exponent_range(law.alpha, law.low, law.high)}" if law else ""
            text = f"{name}: {layer_name(curve.layer)}{fit}".removeprefix(": ")
            shape = curve_of(curve, i, text, tint)
            charts.curves(ax, [shape], {})
            values += [y for side in shape.spread or () for y in side]
    charts.finish_growth(ax, lengths, values, SIZE)
    ax.set_ylabel(f"σ, {shown(scope, 30)}", parse_math=False)
    legend = ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.12, 1.0))
    for entry in legend.get_texts():
        entry.set_parse_math(False)
    return ax


def tokens(
    study: Study, ax: Axes | None = None, layer: int | None = None, scope: str | None = None
) -> Axes:
    """The tokens of the sample of largest sigma: input norms upwards, output norms downwards."""
    peak = _measured(study).peak()
    layer = peak.layer if layer is None else layer
    found = study.tokens(layer, scope)
    ax = new_axes(ax)
    charts.style(ax, SIZE)
    charts.mirrored_bars(
        ax,
        up=[token.right for token in found],
        down=[token.left for token in found],
        names=[shown_token(token.token, 14) for token in found],
    )
    ax.set_xlabel("position of the token")
    ax.set_ylabel("norm:  ← output    input →")
    ax.set_title(layer_name(layer))
    return ax


def _measured(study: Study) -> Study:
    if not study.sigma:
        raise UserError(
            "this study has no values to draw: its rows failed or were never measured; "
            "run lipscope measure on it again"
        )
    return study


def new_axes(ax: Axes | None) -> Axes:
    """Return the Axes given, or new ones of a figure that notebooks show."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UserError(
            "figures need matplotlib; install it with: pip install matplotlib"
        ) from error
    return plt.subplots()[1]


def draw_readings(readings: Sequence[Reading], ax: Axes | None) -> Axes:
    """The constants that a monitor has measured, one curve per layer."""
    ax = new_axes(ax)
    found: dict[str, tuple[list[int], list[float]]] = {}
    for reading in readings:
        steps, sigmas = found.setdefault(reading.layer, ([], []))
        steps.append(reading.step)
        sigmas.append(reading.sigma)
    if not found:
        raise UserError("the monitor has no readings to draw; measure at least one step")
    charts.style(ax, 10)
    constants_by_step(ax, found)
    ax.set_ylabel("σ, local Lipschitz constant (lower bound)")
    return ax


def constants_by_step(ax: Axes, found: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> None:
    """Curves of constants by step, on log axes if they differ much; a gap where there is none."""
    for i, (name, (steps, sigmas)) in enumerate(found.items()):
        tint = colour(series(i, len(found)))
        mark = "." if len(steps) == 1 else None
        ax.plot(steps, sigmas, label=name, color=tint, marker=mark)
    ax.set_xlabel("step")
    values = [x for _, sigmas in found.values() for x in sigmas if 0 < x < math.inf]
    if values and max(values) > 4 * min(values):
        ax.set_yscale("log")
        charts.log_ticks(ax.yaxis, values)
    ax.legend(fontsize="small", ncols=1 + len(found) // 8)


def draw_transitions(found: Sequence[Transition], ax: Axes) -> Axes:
    """sigma(n) of the adversarial family for each radius R, with sqrt n and n = e^{2 gamma R^2}."""
    ends = [float(n) for n in max(found, key=lambda curve: curve.n[-1]).n]
    ax.plot(ends, [math.sqrt(n) for n in ends], "--", color=colour("muted"), label="√n")
    for i, curve in enumerate(found):
        tint = colour(series(i, len(found)))
        n = [float(count) for count in curve.n]
        name = f"R = {curve.R:g}, plateau {curve.plateau:.3g}"
        ax.plot(n, curve.sigma.tolist(), color=tint, label=name)
        if curve.predicted <= n[-1]:
            ax.vlines(curve.predicted, 1, curve.plateau, color=tint, linewidth=0.8, linestyle=":")
            ax.plot([curve.predicted], [curve.plateau], "o", color=tint, markersize=5)
    grey = colour("muted")
    name = "n = exp(2γR²), predicted"
    ax.plot([], [], "o:", color=grey, markersize=5, linewidth=0.8, label=name)
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
