"""The package does not grow and calls do not travel further: counts of tests/meter.py only fall."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meter import size

ROOT = Path(__file__).resolve().parent.parent

SIZE = {
    "lines": 43_920,
    "files": 231,
    "private functions used once": 526,
    "tuple assignments": 40,
    "files that register hooks": 5,
    "functions over 60 lines": 40,
    "papers lines": 6_705,
    "papers files": 34,
}
HOPS = {
    "local_lipschitz": (146, 23),
    "bounds": (94, 15),
    "measure": (400, 53),
    "error_budget": (254, 37),
    "attend": (43, 9),
}
"""Functions and files of lipscope that a warm call touches."""


@pytest.mark.wide
@pytest.mark.parametrize("name", SIZE)
def test_counts_only_fall(name):
    assert size()[name] <= SIZE[name]


@pytest.mark.wide
def test_calls_do_not_travel_further():
    # In a fresh process: under pytest all functions are wrapped, for the shapes of their arguments.
    done = subprocess.run(
        [sys.executable, "-m", "tests.meter"], cwd=ROOT, capture_output=True, text=True
    )
    found = re.findall(r"^(\w+): (\d+) functions in (\d+) files", done.stdout, flags=re.M)
    assert [name for name, _, _ in found] == list(HOPS), done.stderr
    for name, *counts in found:
        assert all(int(a) <= b for a, b in zip(counts, HOPS[name], strict=True)), (name, counts)
