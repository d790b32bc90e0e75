"""How far sigma is from the worst case: bounds and the worst input found, as chart and table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from lipscope.report import charts
from lipscope.report.charts import Dots, Marks
from lipscope.report.content import Surrounded, bound_name
from lipscope.report.document import chart, swatch, table
from lipscope.report.formats import digits, interval, layer_name, shown
from lipscope.study.records import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPES = (("o", "○"), ("s", "□"), ("v", "▽"), ("^", "△"), ("D", "◇"))
"""Open markers of bounds, for matplotlib and as characters; filled ones are measured values."""


def bounds_part(found: Sequence[Surrounded]) -> str:
    """sigma of each map, the worst input found and the bounds; the table is the legend."""
    groups = _groups(found)
    rows = [_map_name(item.sigma) for item in found]
    left = min(150.0, max(len(text) for text in rows) * 7.2 + 14)

    def draw(width: int, marks: Marks) -> Figure:
        figure, ax = charts.figure_of(width, 28 * len(rows) + 58, left=left, bottom=46)
        charts.dots(ax, rows, [dots for dots, _, _ in groups], marks)
        ax.set_xlabel("σ and its bounds")
        if width < 600:
            ax.tick_params(labelsize=11)
        return figure

    label = "σ of each map beside the worst input found and its bounds, on a log axis."
    lines = []
    for dots, sign, kind in groups:
        # Relative to sigma of the same map, so that maps of different size can be summarised.
        ratios = [value / found[row].sigma.value for row, value, _ in dots.points]
        spread = f"{digits(median(ratios))} {interval(min(ratios), max(ratios))}"
        lines.append([swatch(dots.colour, sign, dots.name), kind, spread])
    head = ["value", "kind", "value / σ, median [range]"]
    return chart("bounds", label, draw) + table(head, lines, "Bounds by tightness", raw=True)


def _groups(found: Sequence[Surrounded]) -> list[tuple[Dots, str, str]]:
    """The series of the chart, each with its sign and kind: values, then bounds by tightness."""
    sigma = Dots("σ at this text", "s0", "D", True, _points(found, [[i.sigma] for i in found]))
    worst = [[i.worst] if i.worst else [] for i in found]
    groups = [
        (sigma, "◆", "measured"),
        (Dots("worst input found", "s1", "*", True, _points(found, worst)), "★", "found"),
    ]
    named: dict[tuple[str, str], list[list[Row]]] = {}
    for k, item in enumerate(found):
        for bounds, where in ((item.here, "at this text"), (item.ball, "in the ball")):
            for row in bounds:
                key = bound_name(row), f"{row.kind} bound {where}"
                named.setdefault(key, [[] for _ in found])[k].append(row)
    series = [(name, kind, _points(found, rows)) for (name, kind), rows in named.items()]
    series.sort(key=lambda item: (item[1], _typical(found, item[2])))
    for k, (name, kind, points) in enumerate(series):
        shape, sign = SHAPES[k % len(SHAPES)]
        # The first two colours belong to the values; a shape comes again in another colour.
        dots = Dots(name, f"s{2 + (k + k // len(SHAPES)) % 5}", shape, False, points)
        groups.append((dots, sign, kind))
    return [group for group in groups if group[0].points]


def _typical(found: Sequence[Surrounded], points: Sequence[tuple[int, float, str]]) -> float:
    ratios = [value / found[row].sigma.value for row, value, _ in points]
    return median(ratios) if ratios else math.inf


def _points(
    found: Sequence[Surrounded], rows: Sequence[Sequence[Row]]
) -> list[tuple[int, float, str]]:
    """(row of the chart, value, title) of everything that has a place on a log axis."""
    points = []
    for i, (item, here) in enumerate(zip(found, rows, strict=True)):
        for row in here:
            if not (0 < row.value < math.inf and item.sigma.value > 0):
                continue
            what = "σ at this text" if row is item.sigma else bound_name(row)
            times = "" if row is item.sigma else f"\n{digits(row.value / item.sigma.value)} × σ"
            title = f"{_map_name(item.sigma)}, n = {row.n:,}\n{what}: {digits(row.value, 4)}{times}"
            points.append((i, row.value, title))
    return points


def _map_name(row: Row) -> str:
    what = shown(row.scope, 20) if row.head is None else f"head {row.head}"
    return f"{layer_name(row.layer)}, {what}"
