"""Enclosures in extended precision contain the 60 digits of `tests/truth.py`, and are narrow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import enclosed, truth
from tests.campaigns.random_problems import mixed_layer
from tests.cases import KINDS, problem
from tests.test_certificates import Draw, small_problem
from tests.truth import mp

EXTENDED = np.finfo(np.longdouble).eps < 1e-18


def in_mpmath(x: np.longdouble) -> truth.Exact:
    """The same number, without rounding."""
    fraction, exponent = np.frexp(np.longdouble(x))
    high = float(fraction)
    return (mp.mpf(high) + mp.mpf(float(fraction - high))) * mp.mpf(2) ** int(exponent)


def check(f, X) -> None:
    J, true = enclosed.layer_jacobian(f, X), truth.layer_jacobian(f, X)
    for entry, m, r in zip(true.flat, J.m.flat, J.r.flat, strict=True):
        assert abs(entry - in_mpmath(m)) <= in_mpmath(r)
    for norm, exact in (
        (enclosed.sigma, truth.sigma(true)),
        (enclosed.row_sum, truth.row_sum(true)),
    ):
        low, high = norm(J)
        assert in_mpmath(low) <= exact <= in_mpmath(high)


@pytest.mark.parametrize("kind", KINDS)
def test_the_truth_is_inside(kind: str):
    check(*small_problem(kind, 1))


@pytest.mark.parametrize("extreme", [False, True])
def test_the_truth_is_inside_for_any_mix_of_options(extreme: bool):
    layers = (mixed_layer(Draw(seed), extreme) for seed in range(100))
    for f, X in [(f, X) for f, X in layers if X.numel() <= 8 and f.V.shape[0] <= 8][:12]:
        check(f, X)


@pytest.mark.skipif(not EXTENDED, reason="a long double is a double here")
@pytest.mark.parametrize("kind", ["gaussian", "rotary, biases", "softcap", "L2, causal", "sinks"])
def test_it_is_narrow(kind: str):
    f, X = problem(kind, 0)
    low, high = enclosed.sigma(enclosed.layer_jacobian(f, X))
    assert 0 < low <= high <= low * (1 + 1e-12)


def test_a_repeated_value_is_enclosed_all_the_same():
    for s in ([1.0, 1.0, 0.5], [1.0, 1 - 1e-12, 0.0], [0.0, 0.0], [3.0]):
        low, high = enclosed.sigma(enclosed.exact(torch.diag(torch.tensor(s).double())))
        assert low <= s[0] <= high <= s[0] * (1 + 1e-14)


def test_what_is_not_known_is_not_claimed():
    """Scores beyond all digits: anything is possible."""
    f, X = problem("gaussian", 0)
    low, high = enclosed.sigma(enclosed.layer_jacobian(f, 1e150 * X))
    assert low == 0 and high == np.inf
