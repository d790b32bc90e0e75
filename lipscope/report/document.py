"""One self-contained HTML page: sections, charts, tables and data under a strict policy."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from lipscope.report import palette
from lipscope.report.charts import Marks
from lipscope.report.encoding import packed
from lipscope.report.svg import inline_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCRIPTS = ("core.js", "charts.js", "tokens.js", "table.js", "main.js")
WIDE = 900
NARROW = 358
"""Widths in pixels for which every chart is drawn: a window, and a telephone of 390 pixels."""

Draw = Callable[[int, Marks], "Figure"]


@dataclass(frozen=True)
class Page:
    """The texts at the top of a page, its sections as HTML, and the data for its script."""

    title: str
    kind: str
    subtitle: str
    headline: str
    body: str
    data: dict[str, Any]
    tiles: Sequence[tuple[str, str, str]] = ()

    def html(self) -> str:
        """The page as a string."""
        style = palette.css() + _template("page.css")
        script = "\n".join(map(_template, SCRIPTS))
        return Template(_template("page.html")).substitute(
            policy=policy([script], [style]),
            title=escape(self.title),
            kind=escape(self.kind),
            subtitle=escape(self.subtitle),
            headline=escape(self.headline),
            tiles=_tiles(self.tiles),
            body=self.body,
            style=style,
            data=packed(self.data),
            script=script,
        )


def section(name: str, question: str, answer: str, *parts: str) -> str:
    """A question, its answer in words, and what stands below it."""
    # "n = 256" and "3.2 %" stay on one line.
    kept = escape(answer).replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")
    kept = kept.replace(" %", "\N{NO-BREAK SPACE}%")
    paragraphs = "".join(f'<p class="answer">{text}</p>' for text in kept.split("\n"))
    return (
        f'<section id="{name}"><h2>{escape(question)}</h2>{paragraphs}{"".join(parts)}</section>\n'
    )


def chart(name: str, label: str, draw: Draw, *, wide: int = WIDE, about: str = "") -> str:
    """A chart in two widths, of which the style sheet shows one; arrow keys move over its marks.

    Args:
        name: A name that is unique on the page.
        label: What the chart shows, for readers who do not see it.
        draw: Draws the chart at a width in pixels, and notes its marks.
        wide: The larger width.
        about: A line above the chart.
    """
    drawn = []
    for kind, width in (("wide", wide), ("narrow", NARROW)):
        marks: Marks = {}
        figure = draw(width, marks)
        # The marks of both are the same, in the same order: titles stand in one of them.
        svg = inline_svg(figure, marks, f"{name}-{kind}", label, titled=kind == "wide")
        drawn.append(f'<div class="{kind}">{svg}</div>')
    title = f'<p class="chart-title">{escape(about)}</p>' if about else ""
    hint = escape(f"{label} Arrow keys move over its marks.")
    return (
        f'<figure class="chart" id="chart-{name}" style="max-width:{wide}px">{title}'
        f'<div class="canvas" role="group" tabindex="0" aria-label="{hint}">{"".join(drawn)}</div>'
        "</figure>"
    )


def table(
    head: Sequence[str], lines: Sequence[Sequence[str]], name: str = "", *, raw: bool = False
) -> str:
    """A table whose first column is text; `raw` means that its cells are HTML already."""
    clean = (lambda text: text) if raw else escape
    heads = "".join(
        f'<th scope="col"{"" if i else " class=text"}>{escape(text)}</th>'
        for i, text in enumerate(head)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{clean(text)}</td>" if i else f'<th scope="row" class="text">{clean(text)}</th>'
            for i, text in enumerate(line)
        )
        + "</tr>"
        for line in lines
    )
    label = escape(name or head[0])
    # A table that may scroll sideways must be reachable by keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def swatch(colour: str, sign: str, text: str) -> str:
    """A name with the marker of its curve, so that a table is also the legend of a chart."""
    return (
        f'<span class="swatch" style="color:var(--{colour})" aria-hidden="true">{sign}</span> '
        f"{escape(text)}"
    )


def command(text: str) -> str:
    """A command to type."""
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'


def policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """A policy under which only this page's own scripts run, by hash, and nothing is loaded."""

    def hashes(texts: Sequence[str]) -> str:
        digests = (hashlib.sha256(text.encode()).digest() for text in texts)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    # Styles in attributes are allowed: they are ours, and SVG carries its colours there.
    return (
        f"default-src 'none'; script-src {hashes(scripts)}; style-src-elem {hashes(styles)}; "
        "style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )


@cache
def _template(name: str) -> str:
    return (files("lipscope.report") / "template" / name).read_text(encoding="utf-8")


def _tiles(items: Sequence[tuple[str, str, str]]) -> str:
    found = "".join(
        f"<li><span>{escape(what)}</span><strong>{escape(number)}</strong>"
        f"<span>{escape(where)}</span></li>"
        for what, number, where in items
    )
    return f'<ul class="tiles">{found}</ul>' if found else ""
