"""The page on training says what the results say, and breaking means what it was said to mean."""

import pytest

from lipscope.papers.trainings import broke, outcomes


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


CELL = {
    "members": [[0.001, 0], [0.001, 1], [0.01, 0], [0.01, 1], [0.1, 0], [0.1, 1]],
    "final": [2.0, 2.2, 2.1, None, 3.25, 3.29],
    "curve": [
        {"test": [2.1, 2.3, 2.5, 2.5, 3.28, 3.3]},
        {"test": [2.0, 2.2, 2.1, None, 3.25, 3.29]},
    ],
}


def test_outcomes_are_told_by_rate():
    assert [str(end) for end in outcomes(CELL, unigram=3.3).values()] == [
        "2.100",
        "2.100, 1 broke",
        "stuck",
    ]
    assert [str(end) for end in outcomes(CELL, unigram=3.27).values()][2] == "1 broke, 1 stuck"
