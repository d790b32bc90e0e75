"""One self-contained HTML page: sections, charts, tables and data under a strict policy.

matplotlib writes SVG for paper: its own style sheet, ids that repeat from figure to figure, six
decimals, fixed colours. A page needs none of that, so the tree is read again and reduced to shapes,
texts and the marks that the page's script selects.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as Tree

from lipscope._files import whole_file
from lipscope.report import palette
from lipscope.report.charts import Mark, Marks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCRIPTS = ("core.js", "charts.js", "tokens.js", "table.js", "main.js")
WIDE = 900
NARROW = 358
"""Widths in pixels for which every chart is drawn: a window, and a telephone of 390 pixels."""

DIGITS = 6
"""Significant digits of the numbers for the script."""

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"
DECIMAL = re.compile(r"-?\d*\.\d+")
PLAIN = re.compile(r"rotate\(-?0(\.0)? [^)]*\)")
DROPPED = {"font-family", "stroke-linejoin", "stroke-linecap", "stroke-miterlimit"}

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
        tiles = "".join(
            f"<li><span>{escape(what)}</span><strong>{escape(number)}</strong>"
            f"<span>{escape(where)}</span></li>"
            for what, number, where in self.tiles
        )
        style = palette.css() + _template("page.css")
        script = "\n".join(map(_template, SCRIPTS))
        return Template(_template("page.html")).substitute(
            policy=policy([script], [style]),
            title=escape(self.title),
            kind=escape(self.kind),
            subtitle=escape(self.subtitle),
            headline=escape(self.headline),
            tiles=f'<ul class="tiles">{tiles}</ul>' if tiles else "",
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
    """Draw a chart in two widths, of which the style sheet shows one; `about` is a line above it.

    `name` is unique on the page, and `label` describes the chart to readers who do not see it.
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
    heads = "".join(
        f'<th scope="col"{"" if i else " class=text"}>{escape(text)}</th>'
        for i, text in enumerate(head)
    )
    body = ""
    for line in lines:
        first, *others = line if raw else map(escape, line)
        cells = "".join(f"<td>{text}</td>" for text in others)
        body += f'<tr><th scope="row" class="text">{first}</th>{cells}</tr>'
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


def write(page: str | bytes, path: str | os.PathLike[str], *, typed: bool) -> Path:
    """Write a file completely or not at all; links are followed only for a name the user typed."""
    goal = Path(path)
    with whole_file(goal, typed=typed) as draft:
        draft.write_bytes(page if isinstance(page, bytes) else page.encode())
    return goal


@cache
def _template(name: str) -> str:
    return (files("lipscope.report") / "template" / name).read_text(encoding="utf-8")


def inline_svg(
    figure: Figure, marks: Mapping[str, Mark], name: str, label: str, titled: bool = True
) -> str:
    """Turn a figure into an SVG element for HTML, with the marks of its artists by their gid.

    Ids inside the figure depend on its name; titles are what browsers show without a script.
    """
    import matplotlib as mpl

    file = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = Tree.fromstring(file.getvalue())
    # Metadata, style sheets and clip paths are definitions without shapes.
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(SVG) in ("metadata", "clipPath", "style"):
                parent.remove(child)
    for element in root.iter():
        _simplify(element)
    for group in root.iter("g"):
        mark = marks.get(group.attrib.pop("id", ""))
        if mark is not None:
            _apply(group, mark, titled)
    width, height = root.attrib["viewBox"].split()[2:]
    root.attrib = {
        "viewBox": f"0 0 {width} {height}",
        "width": width,
        "height": height,
        "role": "img",
        "aria-label": label,
    }
    return Tree.tostring(root, encoding="unicode")


def _simplify(element: Tree.Element) -> None:
    """Drop namespaces, clipping, decimals and fonts; name colours by their CSS variables."""
    element.tag = element.tag.removeprefix(SVG)
    found = {name.removeprefix(XLINK): value for name, value in element.attrib.items()}
    # Limits of the axes contain all data, so that nothing needs to be clipped.
    found.pop("clip-path", None)
    for name in ("d", "x", "y", "transform", "points"):
        if name in found:
            rounded = DECIMAL.sub(
                lambda x: f"{round(float(x[0]), 1) + 0.0:.1f}".removesuffix(".0"), found[name]
            )
            found[name] = " ".join(rounded.split())
    if PLAIN.fullmatch(found.get("transform", "")):
        del found["transform"]
    if "style" in found:
        known = {value: f"var(--{name})" for name, value in palette.colours().items()}
        pairs = [part.split(":", 1) for part in found.pop("style").split(";")]
        kept = [(name.strip(), value.strip()) for name, value in pairs]
        found["style"] = ";".join(
            f"{name}:{known.get(value, value)}" for name, value in kept if name not in DROPPED
        )
    element.attrib = found
    # Line breaks between elements are for people who read files.
    element.tail = None
    if element.tag != "text":
        element.text = None


def _apply(group: Tree.Element, mark: Mark, titled: bool) -> None:
    """Put titles and classes on the shapes of an artist, in the order of its data."""
    if mark.kind:
        group.set("class", mark.kind)
    if mark.series is not None:
        group.set("data-series", str(mark.series))
    # The first use of a marker comes with its definition, which is not a shape of its own.
    defined = {shape for holder in group.iter("defs") for shape in holder.iter()}
    shapes = [e for e in group.iter() if e.tag in ("path", "use", "text") and e not in defined]
    placed = len(shapes) == len(mark.titles)
    # Numbers at the ends of floating point have no place on an axis, and no shape.
    for shape, title in zip(shapes, mark.titles, strict=True) if placed else ():
        shape.set("class", "mark")
        if titled:
            Tree.SubElement(shape, "title").text = title
    if mark.coloured:
        # The class of a cell gives its colour, which the script changes with the selection.
        for shape in shapes:
            parts = shape.attrib.pop("style", "").split(";")
            kept = ";".join(part for part in parts if not part.startswith(("fill", "stroke")))
            if kept:
                shape.set("style", kept)


def packed(value: Any) -> str:
    """Base64 of deflated JSON, which `DecompressionStream("deflate")` of browsers reads."""
    return base64.b64encode(zlib.compress(as_json(value).encode(), 9)).decode()


def as_json(value: Any) -> str:
    """JSON in ASCII: floats to six digits, NaN as null, infinity as 1e999, which parses as such."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        pairs = (f"{as_json(str(key))}:{as_json(inner)}" for key, inner in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, Sequence):
        # Of 100,000 rows nearly all time is spent here, in columns of one type.
        kinds = {type(item) for item in value}
        encode = number if kinds == {float} else str if kinds == {int} else as_json
        return "[" + ",".join(map(encode, value)) + "]"
    return json.dumps(value)


def number(value: float) -> str:
    if math.isnan(value):
        return "null"
    # JSON has no infinity, but JSON.parse reads 1e999 as one.
    if math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    return f"{value:.{DIGITS}g}"
