"""The package does not grow and calls do not travel further: counts of tests/meter.py only fall."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meter import size

ROOT = Path(__file__).resolve().parent.parent

SIZE = {
    "lines": 40_478,
    "files": 162,
    "private functions used once": 302,
    "tuple assignments": 30,
    "files that register hooks": 1,
    "functions over 60 lines": 34,
    "papers lines": 5_655,
    "papers files": 20,
}
HOPS = {
    "local_lipschitz": (94, 15),
    "bounds": (72, 12),
    "measure": (334, 40),
    "error_budget": (227, 30),
    "attend": (35, 7),
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
