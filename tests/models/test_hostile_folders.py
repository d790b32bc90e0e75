"""Hostile model folders are refused in one sentence or measured; none runs code or takes long."""

import pytest

from tests.models.hostile_cases import SPOILERS
from tests.models.hostile_folders import examine, limit_resources

FEW = range(0, len(SPOILERS), 4)


def check(seed, case):
    row = examine(seed, case)
    assert row["outcome"] in ("refused", "measured"), row


@pytest.mark.parametrize("case", FEW)
def test_some_hostile_folders(case):
    check(0, case)


@pytest.mark.slow
def test_two_hundred_more_hostile_folders():
    limit_resources()
    for case in range(200):
        check(1, case)
