"""The judge of a killed study sees what is lost, double or different."""

from __future__ import annotations

from lipscope.study.records import Row
from tests.campaigns.kills import fault, moment


def row(n: int, value: float = 1.0) -> Row:
    return Row(
        "sigma", "attention", 0, 0, n, 0, "local", "2", value, value, value, 0.0, "converged",
        1.0, "float64", "cpu", 0.0,
    )  # fmt: skip


CALM = [row(n) for n in range(4)]


def test_rows_that_stay_are_right():
    assert fault([], None, CALM) == ""
    assert fault(CALM[:1], CALM[:2], CALM) == ""


def test_what_is_lost_double_or_different_is_a_fault():
    assert fault(CALM[:1], None, CALM) == "the study is gone"
    assert fault(CALM[:2], CALM[1:3], CALM) == "1 rows lost"
    assert fault([], [CALM[0], CALM[0]], CALM) == "a row is there twice"
    assert fault([], [row(1, value=2.0)], CALM) == "a row differs from the run in peace"


def test_moments():
    moments = [moment(rows, 4) for rows in (0, 1, 4)]
    assert moments == ["before any row", "in the middle", "after all rows"]
