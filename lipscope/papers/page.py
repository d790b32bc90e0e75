"""The page of `lipscope reproduce`: a table of verdicts, then each claim with its figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from lipscope.report import charts
from lipscope.report.charts import Curve, Marks
from lipscope.report.document import NARROW, Page, chart, command, section, swatch, table
from lipscope.report.formats import digits, interval
from lipscope.report.palette import MARKER_TEXTS, MARKERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKED = ("points", "cloud")
LINES = {"points": "-", "cloud": " ", "line": "-", "dashes": "--"}
"""Styles of a series with a marker at each point, and the line style of each in matplotlib."""

COLOURS = 7
"""Number of colours for series; beyond it they repeat with another marker."""


@dataclass(frozen=True)
class Line:
    """One series of a picture.

    name:   what the legend calls it
    x, y:   its points
    style:  "points" joined by a line, a "cloud" of points, a "line", or "dashes" for what a paper
            draws
    spread: the lowest and highest value at each x, where a point is a median
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "points"
    spread: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class Picture:
    """The figure of a claim as data, with an optional table below it.

    log:     the axes that are logarithmic: "xy", "x", "y" or ""
    columns: heading of the table
    rows:    its lines
    """

    title: str
    x: str = ""
    y: str = ""
    lines: Sequence[Line] = ()
    log: str = "xy"
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Entry:
    """One claim on the page, in words.

    verdict: for example "REPRODUCED", or "STAND-IN: DIFFERS"
    range:   the interval of the judged quantity, or None
    about:   models, texts, device and time of the run
    """

    id: str
    paper: str
    says: str
    source: str
    needs: str
    verdict: str
    range: tuple[float, float] | None
    reason: str
    about: str
    command: str
    picture: Picture | None = None


def reproduction_html(entries: Sequence[Entry], papers: dict[str, str], setting: str) -> str:
    """The page as a string."""
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.verdict] = counts.get(entry.verdict, 0) + 1
    headline = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    body = [section("verdicts", "Which claims hold?", VERDICTS, _summary(entries))]
    for key, name in papers.items():
        own = [entry for entry in entries if entry.paper == key]
        body += [_claim(entry, name) for entry in own]
    return Page(
        title="Two papers, rerun",
        kind="lipscope reproduce",
        subtitle=setting,
        headline=f"{len(entries)} claims: {headline}." if entries else "No claim was run.",
        body="".join(body),
        data={},
    ).html()


VERDICTS = (
    "REPRODUCED: the claim lies in the measured interval, or the inequality held in every case "
    "tested. DIFFERS: it does not, with the reason that was tested. STAND-IN: the verdict is about "
    "a model or text that stands in for the paper's. NEEDS: something that you must bring."
)


def _summary(entries: Sequence[Entry]) -> str:
    lines = [
        [
            f'<a href="#claim-{escape(entry.id)}">{escape(entry.id)}</a> {escape(entry.says)}',
            # One column, so that the table fits a telephone.
            "<br>".join(escape(text) for text in (entry.verdict, _range(entry)) if text),
        ]
        for entry in entries
    ]
    return table(["claim", "verdict, interval"], lines, "Verdicts", raw=True)


def _range(entry: Entry) -> str:
    return "" if entry.range is None else interval(*entry.range)


def _claim(entry: Entry, paper: str) -> str:
    found = f". Interval: {_range(entry)}" if entry.range else ""
    facts = {"Source": entry.source, "Needs": entry.needs, "Run": entry.about}
    about = [f"{name}: {text}" for name, text in facts.items() if text]
    note = " ".join(text if text.endswith("?") else f"{text}." for text in (paper, *about))
    parts = [] if entry.picture is None else [_picture(entry.id, entry.picture)]
    return section(
        f"claim-{entry.id}",
        f"{entry.id}. {entry.says}",
        f"{entry.verdict}: {entry.reason}{found}.",
        *parts,
        f'<p class="note">{escape(note)}</p>',
        command(entry.command),
    )


def _picture(name: str, picture: Picture) -> str:
    parts = []
    if picture.lines:
        parts.append(
            chart(
                f"picture-{name}",
                picture.title,
                lambda width, marks: _draw(picture, width, marks),
                wide=720,
                about=picture.title,
            )
        )
        parts.append(_legend(picture.lines))
    if picture.rows:
        parts.append(table(picture.columns, picture.rows, picture.title))
    return "".join(parts)


def _sign(i: int, line: Line) -> str:
    if line.style in MARKED:
        return MARKER_TEXTS[i % len(MARKER_TEXTS)]
    return "━" if line.style == "line" else "╍"


def _legend(lines: Sequence[Line]) -> str:
    names = (swatch(_tint(i), _sign(i, line), line.name) for i, line in enumerate(lines))
    return f'<p class="note">{" &nbsp; ".join(names)}</p>'


def _tint(i: int) -> str:
    return f"s{i % COLOURS}"


def _draw(picture: Picture, width: int, marks: Marks) -> Figure:
    narrow = width <= NARROW
    figure, ax = charts.figure_of(width, 300 if narrow else 360, left=78, bottom=52)
    for axis, set_scale in (("x", ax.set_xscale), ("y", ax.set_yscale)):
        if axis in picture.log:
            set_scale("log")
    found = []
    for i, line in enumerate(picture.lines):
        points = line.style in MARKED
        found.append(
            Curve(
                name=line.name,
                x=line.x,
                y=line.y,
                colour=_tint(i),
                marker=MARKERS[i % len(MARKERS)] if points else "",
                spread=line.spread,
                titles=[f"{line.name}: {digits(x)}, {digits(y)}" for x, y in _pairs(line)]
                if points
                else (),
                line=LINES[line.style],
            )
        )
    charts.curves(ax, found, marks)
    for side, letter in ((ax.xaxis, "x"), (ax.yaxis, "y")):
        if letter in picture.log:
            values = [v for line in picture.lines for v in (line.x if letter == "x" else line.y)]
            spreads = [v for line in picture.lines for side in line.spread or () for v in side]
            charts.log_ticks(side, [*values, *(spreads if letter == "y" else [])])
    ax.set_xlabel(picture.x, parse_math=False)
    ax.set_ylabel(picture.y, parse_math=False)
    return figure


def _pairs(line: Line) -> list[tuple[float, float]]:
    return list(zip(line.x, line.y, strict=True))
