"""Numbers rounded in a stated direction: against 60 digits and exactly known norms.

Each is on its side of the truth, by at least the error that a computation of that length may have
and by little more: a margin with the wrong sign or size is seen though no rounding happens to fail.
"""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from lipscope.theorems.rounding import (
    TINY,
    U,
    down,
    exp_up,
    frobenius_up,
    gamma,
    length_up,
    norm_down,
    norm_up,
    row_sum_up,
    scaled_up,
    up,
)


@pytest.mark.parametrize("m", [1, 10, 1000])
def test_gamma_bounds_the_error_of_that_many_operations(m):
    with mpmath.workdps(60):
        u = mpmath.mpf(2) ** -53
        worst = (1 + u) ** m - 1
        assert worst <= mpmath.mpf(gamma(m)) * (1 + 4 * u) and gamma(m) <= 1.01 * m * 2.0**-53
    assert gamma(2**60) == math.inf


@pytest.mark.parametrize("value", [TINY, 1e-200, 0.1, 3.0, 1e200])
@pytest.mark.parametrize("operations", [1, 64, 5000])
def test_results_are_moved_by_at_least_their_operations_and_little_more(value, operations):
    least, most = operations * U, 2 * (operations + 8) * U
    assert least * value <= up(value, operations) - value <= most * value
    assert least * value <= value - down(value, operations) <= most * value


def test_what_is_no_number_bounds_nothing():
    assert up(math.nan) == up(math.inf) == math.inf and up(0.0) == down(0.0) == 0.0
    assert down(math.nan) == down(math.inf) == down(-1.0) == 0.0
    assert norm_up(torch.full((2, 2), math.nan, dtype=torch.float64)) == math.inf
    assert norm_down(torch.full((2, 2), math.inf, dtype=torch.float64)) == 0.0


@pytest.mark.parametrize("x", [-700.0, -1.0, 0.0, 1e-9, 1.0, 50.0, 700.0, 708.9])
def test_exponentials_are_rounded_up(x):
    with mpmath.workdps(60):
        exact = mpmath.exp(mpmath.mpf(x))
        tight = mpmath.mpf((40 + 16 * abs(x)) * U)
        # x itself may be off by a unit in its last place.
        off = abs(mpmath.mpf(x)) * U
        assert exact * (1 + off) <= mpmath.mpf(exp_up(x)) <= exact * (1 + tight)


def test_exponentials_beyond_the_range_are_infinite():
    assert exp_up(709.0) == exp_up(1e6) == math.inf


@pytest.mark.parametrize("power", [-2000, -1074, -30, 0, 30, 900, 2000])
def test_powers_of_two_are_rounded_up(power):
    with mpmath.workdps(60):
        exact = mpmath.ldexp(mpmath.mpf(1.1), power)
        assert mpmath.mpf(scaled_up(1.1, power)) >= exact
    assert scaled_up(0.0, power) == 0.0


def hadamard(k: int) -> torch.Tensor:
    """2^k columns of +-1, all orthogonal: the norm is 2^(k/2), the Frobenius norm 2^k."""
    H = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(k):
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)], 0)
    return H


@pytest.mark.parametrize("scale", [2.0**-500, 1.0, 2.0**500])
@pytest.mark.parametrize("k", [2, 4, 6])
def test_norms_of_orthogonal_signs_are_enclosed_with_room_for_rounding(k, scale):
    M, n = scale * hadamard(k), 2**k
    norm, frobenius = scale * 2.0 ** (k / 2), scale * n
    # Products of rows of n numbers are off by up to n u times the Frobenius norm.
    room = n * U * frobenius
    assert room <= norm - norm_down(M) <= 20 * room
    assert 0 < norm_up(M).item() - norm <= 20 * n * room
    assert n * U * frobenius <= frobenius_up(M).item() - frobenius <= 4 * n * n * U * frobenius
    assert n * U * frobenius <= row_sum_up(M) - frobenius <= 4 * (n + 8) * U * frobenius
    length = scale * n**0.5
    assert bool((length_up(M) - length >= n * U * length).all())
    assert bool((length_up(M) - length <= 4 * (n + 8) * U * length).all())
