"""Searches end in time and keep their best text, whatever stops them."""

import math
import time

import pytest
import torch

from lipscope.attack.limited import search_until
from lipscope.attack.tokens import guided_swaps, random_swaps
from tests.attack.test_tokens import IDS, target


def test_a_search_without_a_limit_is_the_search_itself():
    seen = []
    found, interrupted = search_until(
        lambda t, ids: guided_swaps(t, ids, 2), target(), IDS, report=seen.append
    )
    assert found == guided_swaps(target(), IDS, 2) and not interrupted
    assert seen == sorted(seen) and seen[-1] == found.measured and len(seen) > 10


def slow(seconds: float):
    """A target whose every measurement is one step that takes this long, in many products."""
    t = target()

    def measure(texts):
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            with torch.no_grad():
                torch.eye(2) @ torch.eye(2)
        return t.measure(texts)

    return type(t)(measure, t.slope, t.embedding)


@pytest.mark.parametrize(("step", "texts"), [(0.05, 17), (60.0, None)])
def test_the_time_is_kept_also_within_a_step(step, texts):
    start = time.monotonic()
    found, interrupted = search_until(
        lambda t, ids: random_swaps(t, ids, 2, tries=1000), slow(step), IDS, until=start + 1.0
    )
    assert time.monotonic() - start < 3.0 and not interrupted
    assert torch.is_grad_enabled()
    if texts is None:
        assert found is None  # not even the original text was measured
    else:
        assert found.stopped and texts <= found.measured < 1000
        assert found.value == target().measure(torch.tensor([found.ids])).item() >= found.before


def test_ctrl_c_keeps_the_best_text():
    t, calls = target(), []

    def measure(texts):
        calls.append(texts)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return t.measure(texts)

    found, interrupted = search_until(
        lambda t, ids: random_swaps(t, ids, 2, tries=100),
        type(t)(measure, t.slope, t.embedding),
        IDS,
    )
    values = torch.cat([t.measure(texts) for texts in calls[:3]])
    assert interrupted and found.stopped and found.measured == len(values) == 33
    assert found.value == values.max().item() and found.before == values[0].item()
    assert not math.isnan(found.factor)
