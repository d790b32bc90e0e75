"""A figure of matplotlib as SVG inside a page: text stays text, colours follow the page's scheme.

matplotlib writes a file for paper: its own style sheet, ids that repeat from figure to figure,
six decimals, fixed colours. A page needs none of that, so the tree is read again and reduced to
shapes, texts and the marks that the page's script selects.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as Tree

from lipscope.report.charts import Mark
from lipscope.report.palette import colours

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"
DECIMAL = re.compile(r"-?\d*\.\d+")
PLAIN = re.compile(r"rotate\(-?0(\.0)? [^)]*\)")
DROPPED = {"font-family", "stroke-linejoin", "stroke-linecap", "stroke-miterlimit"}


def inline_svg(
    figure: Figure, marks: Mapping[str, Mark], name: str, label: str, titled: bool = True
) -> str:
    """The figure as an SVG element for HTML.

    Args:
        figure: The figure; its colours are those of the palette.
        marks: What the page says about artists, by their gid.
        name: A name that is unique on the page; ids inside the figure depend on it.
        label: The description for readers who do not see the figure.
        titled: Whether marks have titles, which browsers show without a script.
    """
    import matplotlib as mpl

    file = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = Tree.fromstring(file.getvalue())
    _prune(root)
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


def _prune(root: Tree.Element) -> None:
    """Remove metadata, style sheets and clip paths, which are definitions without shapes."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(SVG) in ("metadata", "clipPath", "style"):
                parent.remove(child)


def _simplify(element: Tree.Element) -> None:
    """Drop namespaces, clipping, decimals and fonts; name colours by their CSS variables."""
    element.tag = element.tag.removeprefix(SVG)
    found = {name.removeprefix(XLINK): value for name, value in element.attrib.items()}
    # Limits of the axes contain all data, so that nothing needs to be clipped.
    found.pop("clip-path", None)
    for name in ("d", "x", "y", "transform", "points"):
        if name in found:
            found[name] = " ".join(DECIMAL.sub(_short, found[name]).split())
    if PLAIN.fullmatch(found.get("transform", "")):
        del found["transform"]
    if "style" in found:
        found["style"] = _style(found.pop("style"))
    element.attrib = found
    # Line breaks between elements are for people who read files.
    element.tail = None
    if element.tag != "text":
        element.text = None


def _short(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 1) + 0.0:.1f}".removesuffix(".0")


def _style(text: str) -> str:
    known = {value: f"var(--{name})" for name, value in colours().items()}
    pairs = (part.split(":", 1) for part in text.split(";"))
    kept = ((name.strip(), value.strip()) for name, value in pairs if name.strip() not in DROPPED)
    return ";".join(f"{name}:{known.get(value, value)}" for name, value in kept)


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
