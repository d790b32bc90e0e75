"""Hypotheses, each on layers for which it holds and layers for which it does not, by hand."""

from __future__ import annotations

import pytest
import torch

import lipscope as ls
from lipscope._types import Ball
from lipscope.theorems import castin2024, statement

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
