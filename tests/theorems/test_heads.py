"""A layer as the theorems read it: what scores can reach, and what a mask adds to them."""

from __future__ import annotations

import math

import pytest
import torch

import lipscope as ls
from lipscope.theorems.statement import heads_of, reach, visibility

EYE = torch.eye(4, dtype=torch.float64)
NONE = torch.zeros(4, dtype=torch.float64)


@pytest.mark.parametrize("R", [0.5, 3.0])
@pytest.mark.parametrize("kernel", [ls.Dot(), ls.Dot(rope=ls.Rope.standard(5, 4))])
def test_scores_of_multiples_of_the_identity_reach_these_values(kernel, R):
    """<2 x, 3 y> / 2 for |x|, |y| <= R: both derivatives are 3 R, the range is twice 3 R^2."""
    f = ls.SelfAttention(2 * EYE, 3 * EYE, EYE, kernel=kernel)
    (h,) = heads_of(f, folded=False)
    found = reach(h, R)
    expected = [3 * R * R, 3 * R * R, 6 * R * R]
    assert [found.query, found.key, found.range] == pytest.approx(expected, rel=1e-9)
    assert all(x >= y for x, y in zip([found.query, found.key, found.range], expected, strict=True))


@pytest.mark.parametrize("kernel", [ls.Dot(rope=ls.Rope.standard(5, 4)), ls.Dot(softcap=2.0)])
def test_a_missing_bias_reaches_as_far_as_a_bias_of_zero(kernel):
    found = []
    for biases in (None, (NONE, NONE, NONE), (None, NONE, None)):
        f = ls.SelfAttention(2 * EYE, 3 * EYE, EYE, kernel=kernel, biases=biases)
        (h,) = heads_of(f, folded=False)
        found.append(reach(h, 1.5))
    for other in found[1:]:
        assert tuple(vars(other).values()) == pytest.approx(tuple(vars(found[0]).values()))


def test_the_spread_of_a_mask_is_that_of_the_keys_that_a_query_sees():
    mask = torch.tensor([[0.0, 3.0, -math.inf], [1.0, 1.0, 1.0], [-math.inf] * 3])
    f = ls.SelfAttention(EYE, EYE, EYE, mask=mask.double())
    assert visibility(f, 3).spread.tolist() == [3.0, 0.0, 0.0]


@pytest.mark.parametrize("options", [{"window": 2}, {"padding": torch.arange(4) < 3}])
def test_the_largest_column_sums_the_weights_of_those_who_see_a_key(options):
    f = ls.SelfAttention(EYE, EYE, EYE, causal=True, **options)
    weights = torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=torch.float64)
    # Keys of a window: rows 0 1, 1 2, 2 3, 3. With padding: rows 0 1 2, 1 2, 2.
    truth = 1.125 if "window" in options else 0.875
    assert visibility(f, 4).order is None
    assert visibility(f, 4).largest_column(weights) == truth
