"""The curves of a training as CSV, figure and table."""

import csv
import io
import math

import pytest
from rich.console import Console

from lipscope._types import UserError
from lipscope.papers.charlm.files import (
    curve_table,
    curves_csv,
    draw_curves,
)
from lipscope.papers.charlm.training import CurvePoint
from lipscope.report.figures import draw_readings
from lipscope.train.monitor import Reading

CURVE = [
    CurvePoint(0, math.nan, 3.5, (1.25, 2.5)),
    *(CurvePoint(10 * i, 3 / i, 3.1 / i, (1.5, 9.0)) for i in range(1, 30)),
]


def test_the_csv_reads_back(tmp_path):
    rows = list(csv.reader(io.StringIO(curves_csv(CURVE))))
    assert rows[0] == ["step", "training_loss", "test_loss", "sigma_layer_0", "sigma_layer_1"]
    assert rows[1] == ["0", "", "3.5", "1.25", "2.5"]
    assert [float(x) for x in rows[7]] == [60, 0.5, 3.1 / 6, 1.5, 9.0]
    assert len(rows) == 31


def test_the_figure_has_both_losses_and_every_layer():
    left, right = draw_curves(CURVE, 3.3).axes
    assert [line.get_label() for line in left.lines] == ["training", "test", "unigram baseline"]
    assert list(left.lines[1].get_ydata()) == [point.test for point in CURVE]
    assert [list(line.get_ydata()) for line in right.lines] == [
        [p.constants[i] for p in CURVE] for i in range(2)
    ]
    assert "nats" in left.get_ylabel() and right.get_yscale() == "log"


def test_readings_of_a_monitor_are_a_curve_per_layer():
    readings = [
        Reading(step, layer, sigma, 0.0, 8, 3, "converged")
        for step, layer, sigma in (
            (0, "first", 1.0),
            (0, "second", 20.0),
            (50, "first", math.nan),
            (50, "second", 30.0),
            (100, "first", 2.0),
        )
    ]
    ax = draw_readings(readings, None)
    first, second = ax.lines
    assert (first.get_label(), second.get_label()) == ("first", "second")
    # A step without a number is a gap in its curve, not a zero.
    assert list(first.get_xdata()) == [0, 50, 100] and math.isnan(first.get_ydata()[1])
    assert list(second.get_ydata()) == [20.0, 30.0]
    assert ax.get_yscale() == "log" and ax.get_xlabel() == "step"
    ax.figure.canvas.draw()
    assert draw_readings(readings[:1], ax) is ax
    with pytest.raises(UserError, match="no readings"):
        draw_readings([], None)


@pytest.mark.parametrize(
    ("most", "scale"), [(1.4, "linear"), (1e-30, "log"), (40.0, "log"), (1e5, "log")]
)
def test_constants_are_read_off_an_axis_of_plain_numbers(most, scale):
    figure = draw_curves(
        [CurvePoint(0, math.nan, 3.5, (1.0,)), CurvePoint(10, 3.0, 3.0, (most,))], 3.3
    )
    figure.canvas.draw()
    axis = figure.axes[1].yaxis
    low, high = axis.get_view_interval()
    shown = [
        label.get_text()
        for label in axis.get_ticklabels()
        if low <= label.get_position()[1] <= high
    ]
    assert axis.get_scale() == scale and len(shown) >= 3
    values = [parse(words) for words in shown]
    assert values == sorted(values) and all(value >= 0 for value in values)


def parse(text):
    """A number as the figure writes it: 20, 1,000 or 1.0 × 10⁻³⁰."""
    plain = text.replace(",", "").replace("\N{MINUS SIGN}", "-").replace(" × 10", "e")
    return float(plain.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")))


def test_the_table_is_short_and_ends_with_the_last_point():
    table = curve_table(CURVE, 3.3)
    assert 8 <= table.row_count <= 12
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    assert "290" in out.getvalue() and "3.300" in out.getvalue()
