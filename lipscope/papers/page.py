"""The page of `lipscope reproduce`: a table of verdicts, then each claim with its figure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from lipscope.papers.claims import PAPERS, QUOTED
from lipscope.papers.setting import TEXTS
from lipscope.report import charts
from lipscope.report.charts import Curve, Marks
from lipscope.report.document import NARROW, Page, chart, command, section, swatch, table
from lipscope.report.formats import digits, interval
from lipscope.report.palette import MARKER_TEXTS, MARKERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lipscope.papers.running import Outcome, Record

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


def columns(
    rows: Sequence[Mapping[str, Any]], x: str, names: Mapping[str, str], style: str = "points"
) -> list[Line]:
    """One series for each named column of a table, over its column `x`."""
    at = [row[x] for row in rows]
    return [Line(name, at, [row[key] for row in rows], style) for key, name in names.items()]


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


def reproduction_html(outcomes: Sequence[Outcome], setting: str) -> str:
    """The page as a string."""
    counts = Counter(one.word for one in outcomes)
    headline = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    lines = [
        [
            f'<a href="#claim-{escape(one.claim.id)}">{escape(one.claim.id)}</a> '
            f"{escape(one.claim.says)}",
            # One column, so that the table fits a telephone.
            "<br>".join(escape(text) for text in (one.word, _range(one)) if text),
        ]
        for one in outcomes
    ]
    summary = table(["claim", "verdict, interval"], lines, "Verdicts", raw=True)
    body = [section("verdicts", "Which claims hold?", VERDICTS, summary)]
    for paper in PAPERS:
        body += [_claim(one) for one in outcomes if one.claim.paper == paper]
    return Page(
        title="Two papers, rerun",
        kind="lipscope reproduce",
        subtitle=setting,
        headline=f"{len(outcomes)} claims: {headline}." if outcomes else "No claim was run.",
        body="".join(body),
        data={},
    ).html()


VERDICTS = (
    "REPRODUCED: the claim lies in the measured interval, or the inequality held in every case "
    "tested. DIFFERS: it does not, with the reason that was tested. STAND-IN: the verdict is about "
    "a model or text that stands in for the paper's. NEEDS: something that you must bring."
)


def _range(one: Outcome) -> str:
    return "" if one.interval is None else interval(*one.interval)


def _claim(one: Outcome) -> str:
    claim = one.claim
    record = one.record
    found = f". Interval: {_range(one)}" if one.interval else ""
    about = [PAPERS[claim.paper], f"Source: {QUOTED[claim.id].source}", f"Needs: {claim.needs}"]
    if record is not None:
        size = "quick" if record.quick else "full"
        run = f"{size}, {record.device}, {record.seconds:.1f} s, seed {record.seed}"
        # Hashes are shown by their first digits.
        used = (f"; {name}: {what}" for name, what in record.used.items())
        short = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", "".join(used))
        about.append(f"Run: {run}{short}")
    note = " ".join(text if text.endswith("?") else f"{text}." for text in about)
    parts = []
    if record is not None and claim.plot is not None:
        parts.append(_picture(claim.id, claim.plot(record.numbers)))
    return section(
        f"claim-{claim.id}",
        f"{claim.id}. {claim.says}",
        f"{one.word}: {one.reason}{found}.",
        *parts,
        f'<p class="note">{escape(note)}</p>',
        command(_command(claim.id, record)),
    )


def _command(name: str, record: Record | None) -> str:
    parts = ["lipscope reproduce --only", name]
    if record is not None:
        brought = {name for name, what in record.used.items() if what.startswith("sha256 ")}
        options = {
            "--quick": record.quick,
            "--models DIR": brought - TEXTS.keys(),
            "--text-dir DIR": brought & TEXTS.keys(),
            f"--device {record.device}": record.device != "cpu",
            f"--seed {record.seed}": record.seed != 0,
        }
        parts += [words for words, given in options.items() if given]
    return " ".join([*parts, "--out DIR"])


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


def _legend(lines: Sequence[Line]) -> str:
    names = []
    for i, line in enumerate(lines):
        sign = "━" if line.style == "line" else "╍"
        if line.style in MARKED:
            sign = MARKER_TEXTS[i % len(MARKER_TEXTS)]
        names.append(swatch(f"s{i % COLOURS}", sign, line.name))
    return f'<p class="note">{" &nbsp; ".join(names)}</p>'


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
                colour=f"s{i % COLOURS}",
                marker=MARKERS[i % len(MARKERS)] if points else "",
                spread=line.spread,
                titles=[
                    f"{line.name}: {digits(x)}, {digits(y)}"
                    for x, y in zip(line.x, line.y, strict=True)
                    if points
                ],
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
