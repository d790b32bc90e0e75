"""Python objects do not pile up from call to call; what piles up is seen."""

from __future__ import annotations

import sys
from itertools import islice

import pytest

from tests.campaigns.memory import calls, growth

pytestmark = pytest.mark.slow  # a process that ran other tests holds thousands of blocks more


@pytest.mark.parametrize("kind", range(4))
def test_calls_keep_nothing(kind, tmp_path):
    _, _, call = next(islice(calls(tmp_path), kind, None))
    for _ in range(3):
        call()
    held = [row[1] for row in growth(call, 20)]
    assert held[-1] - held[len(held) // 2] < 50


def test_what_is_kept_is_seen():
    kept: list[object] = []
    held = [row[1] for row in growth(lambda: kept.extend([{i: [i]} for i in range(20)]), 20)]
    assert held[-1] - held[len(held) // 2] > 200 and sys.getsizeof(kept) > 0
