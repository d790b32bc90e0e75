"""The page on training says what the results say, and breaking means what it was said to mean."""

import json
import math

import pytest

from benchmarks.training_page import PAGE, RESULTS, filled, largest_rates, rises_table
from lipscope.papers.trainings import broke, outcomes


def test_the_tables_are_those_of_the_results():
    page = PAGE.read_text()
    assert filled(page, json.loads(RESULTS.read_text())) == page, (
        "run python -m benchmarks.training_page"
    )


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


def test_the_largest_rate_is_one_at_which_every_seed_learned():
    hard = {
        "variants": ["dot", "l2"],
        "depths": [6, 9],
        "rates": [0.001, 0.01, 0.1],
        "decay": False,
    }
    plans = {"grid": {"decay": True}, "hard": hard}
    calm = {**CELL, "final": [2.0] * 6, "curve": [{"test": [2.0] * 6}]}
    results = {
        "settings": {"plans": plans, "unigram_loss": 3.3},
        "cells": {
            "hard/dot/6": CELL,
            "hard/l2/6": calm,
            "hard/dot/9": {**CELL, "final": [None] * 6},
        },
    }
    assert largest_rates(results).splitlines() == [
        "- hard, depth 6: dot 0.001; L2 0.1 (the largest tried)",
        "- hard, depth 9: dot none",
    ]


def test_rises_are_told_by_seed_with_the_worst_of_the_first_steps():
    plan = {"variants": ["dot", "l2"], "depths": [6], "rates": [0.001, 0.01, 0.1]}
    seen = {
        "rise": [None, 3, 2, 2, 1, 0],
        "opening": [[4.0] * 6, [3.5, 3.5, 9.0, 7.0, None, math.pi]],
        "gradient": {"start": [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]},
    }
    results = {"settings": {"plans": {"why": plan}}, "cells": {"why/dot/6": CELL | seen}}
    assert rises_table(results).splitlines()[2:] == [
        "| first gradient | 1.5 | not run |",
        "| 0.001 | never, 3 (4) | not run |",
        "| 0.01 | 2, 2 (8) | not run |",
        "| 0.1 | 1, 0 (inf) | not run |",
    ]
