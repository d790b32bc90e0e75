"""The charts of every page and figure: heat maps, curves and dots on matplotlib Axes.

Each function draws data that are ready (texts, levels of colour, titles) on given Axes, in colours
of the palette. A page turns the figure into SVG with `svg.inline_svg`, for which a function notes
in `marks` what each artist stands for; a notebook shows the figure as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lipscope.report.formats import digits, power
from lipscope.report.palette import LEVELS, colour, text_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FONT = 13.0
GUIDES = ((0.25, ":"), (0.5, "--"))
GUIDE_START = 0.85
"""Powers of n to compare with and their line styles (Castin et al. 2024); both start at this share
of the smallest value.
"""

NAME_HEIGHT = 0.45
"""Space for names beyond the longest bar, in units of its axis."""


@dataclass(frozen=True)
class Mark:
    """What a page knows about an artist: a title for each of its shapes, a class, its series."""

    titles: Sequence[str] = ()
    kind: str = ""
    series: int | None = None
    coloured: bool = False


Marks = dict[str, Mark]


@dataclass(frozen=True)
class Cell:
    """A cell of a heat map: what it says, the level of its colour, and its title."""

    text: str
    level: int
    title: str


@dataclass(frozen=True)
class Grid:
    """The cells of a heat map; `ramp` is "c" for amounts and "v" for ratios around 1."""

    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[Cell | None]]
    ramp: str = "c"

    def frame(self) -> list[list[list[str] | None]]:
        """What the script changes in the cells of a heat map that was drawn with another grid."""
        return [
            [None if c is None else [c.text, f"{self.ramp}{c.level}", c.title] for c in line]
            for line in self.cells
        ]


@dataclass(frozen=True)
class Curve:
    """Points with an optional spread, and the power law C x^alpha fitted to them."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    marker: str = ""
    spread: tuple[Sequence[float], Sequence[float]] | None = None
    law: tuple[float, float] | None = None
    titles: Sequence[str] = ()
    line: str = "-"


@dataclass(frozen=True)
class Dots:
    """A series of a dot plot: (row, value, title) of each dot."""

    name: str
    colour: str
    marker: str
    filled: bool
    points: Sequence[tuple[int, float, str]] = field(default_factory=tuple)


def figure_of(
    width: float, height: float, *, left: float, bottom: float, right: float = 12, top: float = 12
) -> tuple[Figure, Axes]:
    """A figure of width x height CSS pixels whose margins are given in pixels."""
    from matplotlib.figure import Figure

    # 72 dots per inch: a point of matplotlib is then one pixel of the page. Fixed margins, because
    # a layout engine costs more time than the drawing.
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    ax = figure.add_axes(box)
    style(ax)
    return figure, ax


def style(ax: Axes, size: float = FONT) -> None:
    """Quiet axes: no box, thin lines, text in the colours of the page."""
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colour("muted"))
    ax.tick_params(which="both", color=colour("muted"), labelcolor=colour("ink"), labelsize=size)
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set_color(colour("ink"))
        axis.label.set_fontsize(size)


def heat_map(ax: Axes, grid: Grid, marks: Marks, texts: bool = True, size: float = FONT) -> None:
    """A table of coloured cells, rows from top to bottom; an empty column is a gap."""
    from matplotlib.patches import Rectangle

    for i, line in enumerate(grid.cells):
        for j, cell in enumerate(line):
            if cell is None:
                continue
            spot = f"{i}-{j}"
            step = f"{grid.ramp}{cell.level}"
            face = colour(step)
            shape = Rectangle((j, i), 0.96, 0.94, facecolor=face, edgecolor="none")
            ax.add_patch(shape).set_gid(f"cell-{spot}")
            marks[f"cell-{spot}"] = Mark((cell.title,), f"cell {step}", coloured=True)
            if texts:
                style: dict[str, Any] = {"ha": "center", "va": "center", "parse_math": False}
                text = ax.text(
                    j + 0.48, i + 0.49, cell.text, size=size, color=text_on(face), **style
                )
                text.set_gid(f"text-{spot}")
                marks[f"text-{spot}"] = Mark(kind=f"on {step}", coloured=True)
    ax.set_xlim(0, len(grid.columns))
    ax.set_ylim(len(grid.rows), 0)
    _names(ax.xaxis, grid.columns, 0.48)
    _names(ax.yaxis, grid.rows, 0.47)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _names(axis: Axis, names: Sequence[str], centre: float, most: int = 40) -> None:
    """Names of rows or columns, every few of them if there are many."""
    # Sixty layers at 12 pixels each have no space for sixty names.
    every = math.ceil(len(names) / most)
    chosen = range(0, len(names), every)
    axis.set_ticks([i + centre for i in chosen], [names[i] for i in chosen])
    axis.set_tick_params(length=0)
    plain_text(axis)


def plain_text(axis: Axis) -> None:
    """Names may contain dollar signs, which matplotlib would read as mathematics."""
    for tick in axis.get_major_ticks():
        tick.label1.set_parse_math(False)


def curves(ax: Axes, found: Sequence[Curve], marks: Marks) -> None:
    """Curves with points, spreads and fitted laws; the caller chooses the scales first."""
    for i, curve in enumerate(found):
        tint = colour(curve.colour)
        x = list(curve.x)
        y = list(curve.y)
        if curve.spread is not None:
            low, high = curve.spread
            ax.vlines(x, low, high, color=tint, linewidth=1.2, gid=f"spread-{i}")
            marks[f"spread-{i}"] = Mark(kind="series", series=i)
        along = y if curve.law is None else [curve.law[0] * n ** curve.law[1] for n in x]
        ax.plot(x, along, curve.line, color=tint, linewidth=1.6, gid=f"line-{i}")
        marks[f"line-{i}"] = Mark(kind="series", series=i)
        # Points are drawn apart from the line, so that each shape of the artist is one point.
        if curve.marker:
            ax.plot(x, y, curve.marker, color=tint, markersize=6.5, gid=f"points-{i}")
            marks[f"points-{i}"] = Mark(curve.titles, "series", i)
        ax.plot([], [], curve.line + curve.marker, color=tint, label=curve.name)


def finish_growth(
    ax: Axes, lengths: Sequence[int], values: Sequence[float], size: float = FONT
) -> None:
    """Guides, ticks and names of a chart of sigma against length, once its curves are drawn."""
    known = [y for y in values if 0 < y < math.inf]
    if known:
        grey = colour("muted")
        start = GUIDE_START * min(known)
        ends = [lengths[0], lengths[-1]]
        style: dict[str, Any] = {"va": "center", "size": size, "color": grey}
        for exponent, line in GUIDES:
            y = [start * (n / ends[0]) ** exponent for n in ends]
            known += y
            if len(lengths) > 1:
                ax.plot(ends, y, line, color=grey, linewidth=1.4, gid=f"guide-{exponent}")
                # Powers of n are named at their right end, outside the axes.
                name = power(exponent, 2 if exponent == 0.25 else 1)
                ax.annotate(name, (ends[1], y[1]), (5, 0), textcoords="offset points", **style)
        log_ticks(ax.yaxis, known)
    ax.set_xlabel("n, tokens")


def mirrored_bars(
    ax: Axes, up: Sequence[float], down: Sequence[float], names: Sequence[str], most: int = 10
) -> None:
    """Norms of tokens as bars, one list upwards and one downwards, the strongest with names."""
    # The square root: beside a token that carries nearly all, the others stay visible.
    limits = []
    for values, sign, tint in ((up, 1, "s0"), (down, -1, "s1")):
        heights = [sign * math.sqrt(x) for x in values]
        limits.append(sign * (max(map(abs, heights)) + NAME_HEIGHT))
        ax.bar(range(len(values)), heights, width=0.9, color=colour(tint))
        for i in _apart(values, most, len(values) / 28):
            ax.annotate(
                names[i],
                (i, heights[i]),
                (0, 3 * sign),
                textcoords="offset points",
                ha="center",
                va="bottom" if sign > 0 else "top",
                rotation=90,
                size=8,
                color=colour("ink"),
                parse_math=False,
            )
    ax.axhline(0, color=colour("muted"), linewidth=0.8)
    marks = (0.01, 0.1, 0.3, 1.0)
    at = [-math.sqrt(x) for x in marks[::-1]] + [0.0] + [math.sqrt(x) for x in marks]
    ax.set_yticks(at, [f"{round(y * y, 4):g}" for y in at])
    ax.set_xlim(-0.04 * len(up) - 0.6, 1.04 * len(up) - 0.4)
    ax.set_ylim(limits[1], limits[0])


def _apart(values: Sequence[float], most: int, distance: float) -> list[int]:
    """The positions of the largest values, at least a distance from each other."""
    chosen: list[int] = []
    for i in sorted(range(len(values)), key=lambda i: -values[i]):
        if len(chosen) < most and all(abs(i - j) >= distance for j in chosen):
            chosen.append(i)
    return chosen


def dots(ax: Axes, rows: Sequence[str], found: Sequence[Dots], marks: Marks) -> None:
    """Values on a log axis, one row per name, rows from top to bottom."""
    ax.set_xscale("log")
    ax.hlines(range(len(rows)), 0, 1, transform=ax.get_yaxis_transform(), color=colour("line"))
    for i, series in enumerate(found):
        tint = colour(series.colour)
        ax.plot(
            [value for _, value, _ in series.points],
            [row for row, _, _ in series.points],
            series.marker,
            color=tint,
            markerfacecolor=tint if series.filled else "none",
            markeredgewidth=1.8,
            markersize=8,
            label=series.name,
            gid=f"dots-{i}",
        )
        marks[f"dots-{i}"] = Mark([title for _, _, title in series.points], "series", i)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(range(len(rows)), list(rows))
    plain_text(ax.yaxis)
    log_ticks(ax.xaxis, [value for series in found for _, value, _ in series.points])
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def log_ticks(axis: Axis, values: Sequence[float], margin: float = 1.12) -> None:
    """Limits around positive values, and ticks with plain numbers on a log axis."""
    from matplotlib.ticker import MaxNLocator

    known = [x for x in values if 0 < x < math.inf]
    if not known:
        return
    low = min(known) / margin
    high = max(known) * margin
    decades = math.log10(high / low)
    # Few decades have room for 1, 2 and 5; many for powers of ten, or only every few of them.
    steps = (1, 2, 5) if decades < 3 else (1,)
    every = max(1, math.ceil(decades / 9))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    at = [s * 10.0**p for p in powers if p % every == 0 for s in steps]
    at = [x for x in at if low <= x <= high]
    if len(at) < 3:
        # Less than a decade: round numbers at equal distances say more than one or two powers.
        at = [x for x in MaxNLocator(5).tick_values(low, high) if low <= x <= high]
    axis.set_view_interval(low, high, ignore=True)
    axis.set_ticks(at, [f"{x:,g}" if 1e-4 <= x < 1e6 else digits(x, 2) for x in at])
    axis.set_ticks([], minor=True)


def length_ticks(ax: Axes, lengths: Sequence[int], size: float = FONT) -> None:
    """A log axis of lengths, with those that were measured as ticks, as far as there is room."""
    if not lengths:
        return
    ax.set_xscale("log", base=2)
    chosen = list(lengths)
    # Every second one, counted from the end: the greatest length is always named.
    while len(chosen) > 9:
        chosen = chosen[::-1][::2][::-1]
    ax.set_xticks(chosen, [f"{n:,}" for n in chosen])
    ax.set_xticks([], minor=True)
    pad = (lengths[-1] / lengths[0]) ** 0.04 if len(lengths) > 1 else 1.5
    ax.set_xlim(lengths[0] / pad, lengths[-1] * pad)


def colour_bar(ax: Axes, ramp: str, low: float, high: float, log: bool, label: str) -> Any:
    """A colour bar beside Axes whose cells were coloured by levels of a ramp."""
    from matplotlib import cm, colors

    shades = colors.ListedColormap([colour(f"{ramp}{i}") for i in range(LEVELS)])
    # A single value has no range: widen it, for a bar cannot have length 0.
    norm = (colors.LogNorm if log else colors.Normalize)(low, high if high > low else 2 * low + 1)
    return ax.figure.colorbar(cm.ScalarMappable(norm, shades), ax=ax, label=label)
