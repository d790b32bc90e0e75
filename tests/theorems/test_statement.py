"""Hypotheses, each on layers for which it holds and layers for which it does not, by hand."""

from __future__ import annotations

import math

import pytest
import torch

import lipscope as ls
from lipscope._types import Ball
from lipscope.theorems import castin2024, statement
from lipscope.theorems.statement import heads_of, reach, visibility

EYE = torch.eye(4, dtype=torch.float64)
ONES, NONE = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
LAST_SEES_FIRST = torch.ones(3, 3, dtype=torch.bool).tril().index_fill(0, torch.tensor(2), False)
LAST_SEES_FIRST[2, 0] = True


def layer(**options) -> ls.SelfAttention:
    return ls.SelfAttention(EYE, EYE, EYE, **options)


def dot(**options) -> ls.SelfAttention:
    return layer(kernel=ls.Dot(**options))


LAYERS = {
    "plain": layer(),
    "two heads": layer(heads=2),
    "projected": layer(O=EYE),
    "two heads, projected": layer(heads=2, O=EYE),
    "causal": layer(causal=True),
    "window": layer(causal=True, window=2),
    "padding": layer(padding=torch.tensor([True, True, False])),
    "not itself": layer(mask=LAST_SEES_FIRST),
    "additive": layer(mask=torch.zeros(3, 3, dtype=torch.float64) + torch.eye(3)),
    "distance": layer(kernel=ls.L2()),
    "distance, scale 0": layer(kernel=ls.L2(scale=0.0)),
    "softcap": dot(softcap=5.0),
    "rope": dot(rope=ls.Rope.standard(3, 4)),
    "query bias": layer(biases=(ONES, None, None)),
    "value bias": layer(biases=(NONE, NONE, ONES)),
}
EXCEPT = {
    "DOT": {"distance", "distance, scale 0"},
    "PLAIN_SCORES": {"softcap"},
    "NO_ROPE": {"rope"},
    "NO_QUERY_BIAS": {"query bias"},
    "NO_ADDITIVE": {"additive"},
    "FULL_OR_CAUSAL": {"window", "padding", "not itself", "additive"},
    "SELF_SEEN": {"not itself"},
    "HEADS_APART": {"two heads, projected"},
    "TWO_TOKENS": set(),
    "ROTATION": set(),
    "SINKS_UNBIASED": set(),
}
"""For each hypothesis, the layers above for which it does not hold."""

ONLY = {
    "DISTANCE": {"distance"},
    "CAUSAL": {"causal"},
    "FULL": set(LAYERS) - {"causal", "window", "padding", "not itself", "additive"},
    "ONE_HEAD": set(LAYERS) - {"two heads", "two heads, projected"},
}
"""For each of these, the layers for which it holds."""


@pytest.mark.parametrize("name", [*EXCEPT, *ONLY])
def test_a_hypothesis_holds_for_these_layers(name):
    hypothesis = getattr(castin2024 if name == "ONE_HEAD" else statement, name)
    held = {kind for kind, f in LAYERS.items() if hypothesis.holds(f, Ball(1.0, 3))}
    assert held == (ONLY[name] if name in ONLY else set(LAYERS) - EXCEPT[name])


def test_a_single_token_and_biased_sinks_are_told_apart():
    assert not statement.TWO_TOKENS.holds(layer(), Ball(1.0, 1))
    assert statement.TWO_TOKENS.holds(layer(), Ball(1.0, 2))
    sinks = ls.Dot(sinks=torch.zeros(1, dtype=torch.float64))
    held = [
        statement.SINKS_UNBIASED.holds(layer(kernel=sinks, biases=biases), Ball(1.0, 3))
        for biases in (None, (ONES, NONE, NONE), (None, ONES, None), (None, None, ONES))
    ]
    assert held == [True, True, False, False]
    assert not statement.PLAIN_SCORES.holds(layer(kernel=sinks), Ball(1.0, 3))


def test_every_hypothesis_of_these_theorems_is_in_the_table():
    stated = {k for k, v in vars(statement).items() if isinstance(v, statement.Hypothesis)}
    assert stated <= {*EXCEPT, *ONLY}


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
