"""The page on training says what the results say, and breaking means what it was said to mean."""

import json

import pytest

from benchmarks.training_grid import broke
from benchmarks.training_page import PAGE, RESULTS, filled


def test_the_tables_are_those_of_the_results():
    page = PAGE.read_text()
    assert filled(page, json.loads(RESULTS.read_text())) == page, "run python -m benchmarks.training_page"


@pytest.mark.parametrize(
    ("final", "curve", "expected"),
    [
        (2.0, [3.0, 2.0], False),
        (None, [3.0, None], True),
        (3.4, [3.6, 3.4], True),
        (2.6, [2.05, 2.6], True),
        (2.5, [2.05, 2.5], False),
    ],
)
def test_breaking(final, curve, expected):
    assert broke(final, curve, unigram=3.3) is expected
