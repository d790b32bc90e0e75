"""Samples are drawn by a hash: fixed for ever, even, and independent of one another."""

from collections import Counter

import pytest

from lipscope.study.sampling import Windows, offset


def windows(**changes) -> Windows:
    fields = {"ids": tuple(range(100)), "lengths": (8, 16), "samples": 3, "seed": 0, "digest": ""}
    return Windows(**{**fields, **changes})


def test_offsets_are_fixed_for_ever():
    """Numbers that studies on disk depend on: a change of them is a new numeric version."""
    drawn = [
        offset(1000, n, sample, seed)
        for n, sample, seed in ((8, 0, 0), (8, 1, 0), (16, 0, 0), (8, 0, 1))
    ]
    assert drawn == [772, 498, 549, 105]


def test_offsets_are_even():
    counts = Counter(offset(10, 8, sample, 0) for sample in range(10_000))
    assert set(counts) == set(range(10))
    assert (
        sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 27.9
    )  # chi-squared, 9 degrees, p = 0.001


def test_a_window_is_consecutive_and_depends_on_its_own_number_alone():
    few, many = windows(), windows(lengths=(16, 32, 8), samples=50)
    for n, sample in few.pairs:
        window = few.window(n, sample)
        assert window == tuple(range(window[0], window[0] + n))
        assert window == many.window(n, sample)
    assert few.batch(8, (2, 0)).tolist() == [list(few.window(8, 2)), list(few.window(8, 0))]


def test_every_place_can_be_drawn_the_last_one_too():
    starts = {windows(samples=1).window(96, sample)[0] for sample in range(200)}
    assert starts == {0, 1, 2, 3, 4}
    assert windows().window(100, 7) == tuple(range(100))


def test_special_tokens_count_towards_n():
    framed = windows(before=(-1,), after=(-2, -3))
    window = framed.window(8, 0)
    assert len(window) == 8 and window[0] == -1 and window[-2:] == (-2, -3)
    assert window[1:6] == tuple(range(window[1], window[1] + 5))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_is_a_different_draw(seed):
    assert windows(seed=seed).window(8, 0) != windows(seed=seed + 1).window(8, 0)
