"""L2 attention's constants match the formulas, and the lower bound grows like R^2."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.special import lambertw

import lipscope as ls
from lipscope._types import Ball, Everywhere
from lipscope.theorems.kim2021 import (
    distance_upper,
    largest_coordinate_upper,
    no_global_constant,
    quadratic_lower,
)
from lipscope.theorems.sharper import column_sum, key_reaction, tighter_distance_upper
from lipscope.theorems.statement import visibility
from tests.cases import problem


def phi(keys: int) -> float:
    return float(lambertw((keys - 1) / math.e).real)


def layer(size: float, causal: bool = False) -> ls.SelfAttention:
    """One head of width one: Q = size, V = size^2, so M = size."""
    W = torch.tensor([[size]], dtype=torch.float64)
    return ls.SelfAttention(W, W, W @ W, kernel=ls.L2(), causal=causal)


def test_phi_inverts_and_the_formulas_are_these():
    N, size = 7, 2.0
    assert phi(N) * math.exp(phi(N) + 1) == pytest.approx(N - 1)
    f = layer(size)
    assert distance_upper(f, Everywhere(N)) == pytest.approx(
        size**2 * math.sqrt(N) * (4 * phi(N) + 1), rel=1e-9
    )
    seen = visibility(f, N)
    tighter = math.sqrt(column_sum(seen, 1)) + 2 * phi(N) + 2 * math.sqrt(key_reaction(seen, 1))
    assert column_sum(seen, 1) == pytest.approx(2 / math.sqrt(3))
    assert tighter_distance_upper(f, Everywhere(N)) == pytest.approx(size**2 * tighter, rel=1e-9)
    assert largest_coordinate_upper(f, Everywhere(N)) == pytest.approx(
        size**2 * (4 * phi(N) + 1), rel=1e-9
    )


def test_causal_rows_see_fewer_keys():
    rows = math.sqrt(sum((4 * phi(i) + 1) ** 2 for i in range(1, 8)))
    assert distance_upper(layer(1.0, causal=True), Everywhere(7)) == pytest.approx(rows, rel=1e-9)


def test_the_lower_bound_grows_like_the_square_of_the_radius():
    f, X = problem("gaussian", 0)
    n = len(X)
    near, far = (quadratic_lower(f, Ball(R, n)) for R in (1e3, 1e4))
    assert far / near == pytest.approx(100, rel=1e-3)
    assert no_global_constant(f, Everywhere(n)) == math.inf
    still = ls.SelfAttention(torch.zeros_like(f.Q), f.K, f.V)
    assert no_global_constant(still, Everywhere(n)) == 0


@pytest.mark.parametrize(
    ("q", "v", "o"),
    [
        (1e150, 1e-200, 1.0),
        (1e10, 1e-320, 1.0),
        (1.0, 1e160, 1.0),
        (1.0, 1e-160, 1e160),
        (1e-150, 1e300, 1.0),
    ],
)
def test_weights_of_any_size_neither_vanish_nor_overflow(q, v, o):
    one = torch.eye(2, dtype=torch.float64)
    f = ls.SelfAttention(q * one, q * one, v * one, o * one, kernel=ls.L2())
    plain = tighter_distance_upper(ls.SelfAttention(one, one, one, kernel=ls.L2()), Everywhere(3))
    # 1e-320 is subnormal and has only three digits.
    assert tighter_distance_upper(f, Everywhere(3)) == pytest.approx(
        plain * v * o, rel=1e-2 if v < 1e-310 else 1e-9
    )


def test_a_value_beyond_all_powers_of_two_has_no_bound():
    one = torch.eye(2, dtype=torch.float64)
    assert (
        tighter_distance_upper(
            ls.SelfAttention(one, one, 1.7e308 * one, kernel=ls.L2()), Everywhere(3)
        )
        == math.inf
    )


def test_scores_that_grow_with_distance_have_no_bound():
    one = torch.eye(2, dtype=torch.float64)
    assert not ls.bounds(ls.SelfAttention(one, one, one, kernel=ls.L2(scale=-1.0)), Everywhere(3))
