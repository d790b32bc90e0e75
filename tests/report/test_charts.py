"""Charts say what they were given, and their SVG holds text, variables and one mark per point."""

import math
import re
from xml.etree import ElementTree as Tree

import pytest

from lipscope.report import charts
from lipscope.report.charts import Cell, Curve, Dots, Grid, figure_of
from lipscope.report.document import inline_svg
from lipscope.report.palette import colour


def drawn(draw, width=400, height=300):
    """A chart as the tree of its SVG."""
    figure, ax = figure_of(width, height, left=60, bottom=40)
    marks = {}
    draw(ax, marks)
    return Tree.fromstring(inline_svg(figure, marks, "name", "a <label>"))


def titles(tree, series):
    group = [g for g in tree.iter("g") if g.get("data-series") == str(series)]
    return [title.text for g in group for title in g.iter("title")]


CURVES = [
    Curve("a", [8, 16, 32], [1.0, 2.0, 4.0], "s0", "o", titles=["p", "q", "r"], law=(0.125, 1.0)),
    Curve("b", [8, 32], [3.0, 3.0], "s1", "s", spread=([2.0, 3.0], [3.0, 4.0]), titles=["s", "t"]),
]


def test_every_point_of_a_curve_is_a_mark():
    def draw(ax, marks):
        ax.set_yscale("log")
        charts.length_ticks(ax, [8, 16, 32])
        charts.curves(ax, CURVES, marks)
        charts.finish_growth(ax, [8, 16, 32], [1.0, 4.0])

    tree = drawn(draw)
    assert (titles(tree, 0), titles(tree, 1)) == (["p", "q", "r"], ["s", "t"])
    points = [e for e in tree.iter("use") if e.get("class") == "mark"]
    x = [float(point.get("x")) for point in points[:3]]
    y = [float(point.get("y")) for point in points[:3]]
    # Equal ratios are equal distances on log axes; up is less in SVG.
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2) and y[0] > y[2]
    assert {"8", "16", "32", "n⁰·⁵", "n⁰·²⁵"} <= {e.text for e in tree.iter("text")}


def test_a_figure_becomes_a_part_of_a_page():
    tree = drawn(lambda ax, marks: charts.curves(ax, CURVES, marks))
    text = Tree.tostring(tree, encoding="unicode")
    assert tree.get("aria-label") == "a <label>" and tree.get("role") == "img"
    assert "var(--s0)" in text and colour("s0") not in text
    assert not {"style", "metadata", "clipPath"} & {element.tag for element in tree.iter()}
    assert "font-family" not in text and "clip-path" not in text
    used = {e.get("href").removeprefix("#") for e in tree.iter("use")}
    ids = [e.get("id") for e in tree.iter() if e.get("id")]
    assert used == set(ids) and len(ids) == len(set(ids)), "ids are kept where they are used"
    assert not re.search(r"\d\.\d\d", " ".join(e.get("d", "") for e in tree.iter("path")))


def test_ids_differ_from_chart_to_chart():
    def ids(name):
        figure, ax = figure_of(300, 200, left=40, bottom=40)
        charts.curves(ax, CURVES, {})
        return set(re.findall(r'id="([^"]+)"', inline_svg(figure, {}, name, "")))

    assert ids("one") == ids("one") and not ids("one") & ids("two")


def test_a_heat_map_has_a_class_and_a_title_per_cell():
    cells = [[Cell("1.0", 3, "first"), None, Cell("$x$", 31, "third <b>")]]
    grid = Grid(["$row"], ["0", " ", "$c$"], cells, "v")
    tree = drawn(lambda ax, marks: charts.heat_map(ax, grid, marks))
    found = [g for g in tree.iter("g") if (g.get("class") or "").startswith("cell")]
    assert [g.get("class") for g in found] == ["cell v3", "cell v31"]
    assert [t.text for g in found for t in g.iter("title")] == ["first", "third <b>"]
    texts = [g for g in tree.iter("g") if (g.get("class") or "").startswith("on")]
    assert [[t.text for t in g.iter("text")] for g in texts] == [["1.0"], ["$x$"]]
    assert all("fill" not in (e.get("style") or "") for g in found for e in g.iter())
    assert {"$row", "$c$"} <= {e.text for e in tree.iter("text")}
    assert grid.frame() == [[["1.0", "v3", "first"], None, ["$x$", "v31", "third <b>"]]]


def test_dots_stand_in_rows():
    series = [
        Dots("a", "s0", "D", True, [(0, 1.0, "x"), (1, 10.0, "y")]),
        Dots("b", "s1", "o", False, [(1, 100.0, "z")]),
    ]
    tree = drawn(lambda ax, marks: charts.dots(ax, ["first", "second"], series, marks))
    assert (titles(tree, 0), titles(tree, 1)) == (["x", "y"], ["z"])
    marks = [e for e in tree.iter("use") if e.get("class") == "mark"]
    assert float(marks[0].get("y")) < float(marks[1].get("y")) == float(marks[2].get("y"))
    assert "fill-opacity:0" in marks[2].get("style") and "fill-o" not in marks[0].get("style")


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([1.0, 90.0], ["1", "2", "5", "10", "20", "50", "100"]),
        ([1.0, 1e5], ["1", "10", "100", "1,000", "10,000", "100,000"]),
        ([11.2, 14.9], ["11", "12", "13", "14", "15"]),
        ([0.0, math.nan, 2.0], None),
    ],
)
def test_ticks_of_a_log_axis_are_where_they_say(values, ticks):
    _, ax = figure_of(300, 200, left=40, bottom=40)
    ax.set_yscale("log")
    charts.log_ticks(ax.yaxis, values)
    found = [label.get_text() for label in ax.get_yticklabels()]
    low, high = ax.get_ylim()
    known = [x for x in values if 0 < x < math.inf]
    assert low < min(known) and max(known) < high
    at = ax.get_yticks()
    assert all(low <= x <= high for x in at)
    assert [float(text.replace(",", "")) for text in found] == pytest.approx(list(at))
    if ticks is not None:
        assert [text for text in found if text in ticks] == [t for t in ticks if t in found]
        assert len(found) >= len(ticks) - 1


def test_many_lengths_have_few_ticks():
    _, ax = figure_of(300, 200, left=40, bottom=40)
    lengths = list(range(8, 800, 8))
    charts.length_ticks(ax, lengths)
    assert len(ax.get_xticks()) <= 9 and ax.get_xticks()[-1] == lengths[-1]
