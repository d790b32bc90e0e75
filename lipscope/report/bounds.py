"""sigma between its bounds and the worst input found: terminal table, chart and sentences."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lipscope._files import for_terminal
from lipscope._types import Point
from lipscope.probes.bounds import BOUND, LEFT_OUT, REGIME, WORST, Audit
from lipscope.report import charts
from lipscope.report.charts import Dots, Marks
from lipscope.report.content import Map
from lipscope.report.document import chart, swatch, table
from lipscope.report.formats import digits, interval, layer_name, shown, text_table
from lipscope.study.records import SIGMA, Row
from lipscope.study.study import Study
from lipscope.theorems.registry import REGISTRY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPES = (("o", "○"), ("s", "□"), ("v", "▽"), ("^", "△"), ("D", "◇"))
"""Open markers of bounds, for matplotlib and as characters; filled ones are measured values."""

Head = tuple[int | None, int | None, int, int]


def bound_summary(audit: Audit) -> RenderableType:
    """Build the table that `lipscope bounds` prints."""
    heads: dict[Head, dict[str, Row]] = defaultdict(dict)
    for row in audit.study.rows:
        if row.scope == "heads" and not row.failing:
            heads[row.layer or 0, row.head, row.n, row.sample][row.probe] = row
    heads = {key: rows for key, rows in sorted(heads.items()) if WORST in rows and SIGMA in rows}
    kinds = {row.probe: row.kind for rows in heads.values() for row in rows.values()}
    ratios = {
        name: [_ratio(rows, name) for rows in heads.values() if name in rows]
        for name in sorted(kinds)
        if name.startswith(BOUND)
    }
    # Upper bounds first, then by tightness.
    names = sorted(ratios, key=lambda name: (kinds[name] == "lower", median(ratios[name])))
    # Names of theorems are too long for columns; there are fewer of them than letters.
    letters = dict(zip(names, ascii_uppercase, strict=False))
    lines = []
    for name, letter in letters.items():
        above = [_over(rows[name], rows[WORST]) for rows in heads.values() if name in rows]
        worst = "-" if at_point(name) else f"{median(above):.3g}"
        found = ratios[name]
        spread = f"{median(found):.4g} [{min(found):.3g}, {max(found):.3g}]"
        lines.append((letter, name.removeprefix(BOUND), kinds[name], spread, worst))
    columns = ("", "bound", "kind", "tightness: median [range]", "bound / worst")
    needs: dict[str, list[str]] = defaultdict(list)
    for name, why in sorted(audit.not_offered.items()):
        needs[why].append(name)
    refused = [
        f"not applicable: {'; '.join(theorems)} (required: {why})"
        for why, theorems in needs.items()
    ]
    about = audit.study.info.about
    title = f"{for_terminal(about.model)} on {for_terminal(about.text)}: bounds, head by head\n"
    return Group(
        Text(title, style="bold"),
        _heads(heads, letters),
        Text(),
        text_table(columns, lines, left=columns, folding=("bound",)),
        Text("\n".join(["", LEGEND, *refused]), style="dim"),
    )


LEGEND = (
    "head 2.5: layer 2, head 5. σ: local Lipschitz constant at the text; worst: the largest found "
    "in the ball of radius R around 0, by constructions and ascent. Ratios are bound / σ; a lower "
    "bound on the ball is compared with the worst found; k: thousands. √n: the regime where one "
    "token can dominate all others, n <= 1 + e^(2 γ R²); mf: mean-field, n beyond that."
)


def _heads(heads: dict[Head, dict[str, Row]], letters: dict[str, str]) -> Table:
    """A line per head; every bound is a column, headed by its letter."""
    names = {name: letter for name, letter in letters.items() if not name.endswith(LEFT_OUT)}
    lines = []
    for (layer, head, n, _), rows in heads.items():
        worst = rows[WORST]
        regime = "-"
        if REGIME in rows:
            regime = "√n" if math.log(max(n - 1, 1)) <= rows[REGIME].value else "mf"
        ratios = [_short(_ratio(rows, name)) if name in rows else "-" for name in names]
        place = (f"{layer}.{head}", str(n), f"{worst.radius:.3g}")
        values = (f"{rows[SIGMA].value:.3g}", f"{worst.value:.3g}")
        lines.append((*place, *values, regime, *ratios))
    columns = ("head", "n", "R", "σ", "worst", "regime", *names.values())
    return text_table(columns, lines, left=("regime",), gap=1)


def _short(x: float) -> str:
    if 1000 <= x < math.inf:
        return f"{x / 1000:.2g}k"
    return f"{x:.0f}" if 100 <= x < 1000 else f"{x:.2g}"


def at_point(name: str) -> bool:
    """Tell whether a bound is about the text alone, not a ball."""
    return any(bound.domain is Point and name.startswith(BOUND + bound.name) for bound in REGISTRY)


def _ratio(rows: dict[str, Row], name: str) -> float:
    # A lower bound on a ball is reached by its worst input, not by the text.
    worst = rows[name].kind == "lower" and not at_point(name)
    return _over(rows[name], rows[WORST if worst else SIGMA])


def _over(bound: Row, found: Row) -> float:
    # A head whose values are all zero has σ = 0 everywhere.
    return bound.value / found.value if found.value > 0 else math.inf


@dataclass(frozen=True)
class Surrounded:
    """A measured sigma, its bounds at this input and over the ball, and the worst input found."""

    sigma: Row
    here: list[Row]
    ball: list[Row]
    worst: Row | None

    @property
    def name(self) -> str:
        """The layer, and the head if it is one."""
        head = "" if self.sigma.head is None else f", head {self.sigma.head}"
        return layer_name(self.sigma.layer) + head


def surrounded(study: Study) -> list[Surrounded]:
    """Per map, find the largest sigma among the rows that have bounds or a worst input."""
    around: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in study.rows:
        bound = row.kind in ("upper", "lower") and row.norm == "2" and row.probe != SIGMA
        if (bound or row.probe == WORST) and not row.failing:
            around[row[1:6]].append(row)
    best: dict[Map, Row] = {}
    for row in study.sigma:
        old = best.get((row.scope, row.layer))
        if row[1:6] in around and (old is None or (row.n, row.value) > (old.n, old.value)):
            best[row.scope, row.layer] = row
    found = []
    for sigma in (best[at] for at in study.maps if at in best):
        near = around[sigma[1:6]]
        bounds = [row for row in near if row.probe != WORST]
        found.append(
            Surrounded(
                sigma=sigma,
                here=[row for row in bounds if at_point(row.probe)],
                ball=[row for row in bounds if not at_point(row.probe)],
                worst=next((row for row in near if row.probe == WORST), None),
            )
        )
    return found


def _bound_name(row: Row) -> str:
    return shown(row.probe.removeprefix(BOUND), 60)


def describe_worst_case(found: Sequence[Surrounded]) -> str:
    """How far sigma at the text is from the worst input found and from the upper bounds."""
    known = {item.name: item for item in found if item.sigma.value > 0}
    sentences = []
    worst = {at: i.worst.value / i.sigma.value for at, i in known.items() if i.worst is not None}
    if worst:
        sentences.append(
            "The worst input found among those whose tokens are no larger than the text's has a σ "
            f"{_range(worst, 'times that of the text')}."
        )
    limited = False
    for where, part in (("at this text", "here"), ("over all those inputs", "ball")):
        ratios: dict[str, float] = {}
        names: dict[str, None] = {}
        for at, item in known.items():
            upper = [r for r in getattr(item, part) if r.kind == "upper" and r.value < math.inf]
            if upper:
                tightest = min(upper, key=lambda row: row.value)
                ratios[at] = tightest.value / item.sigma.value
                names[_bound_name(tightest)] = None
        if ratios:
            limited = True
            text = f"The smallest upper bound {where} is {_range(ratios, 'times σ')}"
            sentences.append(f"{text}: {', '.join(names)}.")
    if not limited:
        sentences.append("There is no upper bound, so nothing limits σ from above on other inputs.")
    return " ".join(sentences)


def _range(ratios: dict[str, float], unit: str) -> str:
    """The smallest and the largest ratio, each with its map."""
    least = min(ratios, key=lambda at: ratios[at])
    most = max(ratios, key=lambda at: ratios[at])
    low = digits(ratios[least])
    high = digits(ratios[most])
    if len(ratios) == 1:
        return f"{low} {unit} ({least})"
    if low == high:
        return f"{low} {unit} in each of {len(ratios)} maps"
    return f"{low} ({least}) to {high} ({most}) {unit}"


def bounds_part(found: Sequence[Surrounded]) -> str:
    """sigma of each map, the worst input found and the bounds; the table is the legend."""
    groups = _groups(found)
    rows = [_map_name(item) for item in found]
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
        ratios = _ratios(found, dots.points)
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
                key = _bound_name(row), f"{row.kind} bound {where}"
                named.setdefault(key, [[] for _ in found])[k].append(row)
    series = [(name, kind, _points(found, rows)) for (name, kind), rows in named.items()]
    series.sort(key=lambda item: (item[1], median(_ratios(found, item[2]) or [math.inf])))
    for k, (name, kind, points) in enumerate(series):
        shape, sign = SHAPES[k % len(SHAPES)]
        # The first two colours belong to the values; a shape comes again in another colour.
        dots = Dots(name, f"s{2 + (k + k // len(SHAPES)) % 5}", shape, False, points)
        groups.append((dots, sign, kind))
    return [group for group in groups if group[0].points]


def _ratios(found: Sequence[Surrounded], points: Sequence[tuple[int, float, str]]) -> list[float]:
    """Values relative to sigma of the same map, so that maps of different size compare."""
    return [value / found[row].sigma.value for row, value, _ in points]


def _points(
    found: Sequence[Surrounded], rows: Sequence[Sequence[Row]]
) -> list[tuple[int, float, str]]:
    """(row of the chart, value, title) of everything that has a place on a log axis."""
    points = []
    for i, (item, here) in enumerate(zip(found, rows, strict=True)):
        for row in here:
            if not (0 < row.value < math.inf and item.sigma.value > 0):
                continue
            what = "σ at this text" if row is item.sigma else _bound_name(row)
            times = "" if row is item.sigma else f"\n{digits(row.value / item.sigma.value)} × σ"
            title = f"{_map_name(item)}, n = {row.n:,}\n{what}: {digits(row.value, 4)}{times}"
            points.append((i, row.value, title))
    return points


def _map_name(item: Surrounded) -> str:
    row = item.sigma
    what = shown(row.scope, 20) if row.head is None else f"head {row.head}"
    return f"{layer_name(row.layer)}, {what}"
