"""Castin et al.'s bounds and sharper versions: rates, limits, and what witnesses attain."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import lipscope as ls
from lipscope._types import Ball, Point
from lipscope.theorems.castin2024 import (
    compact_upper,
    large_radius_limit,
    saturated_lower,
    saturated_upper,
    theorem_lower,
    theorem_upper,
    theorem_witness,
    tuned_lower,
    tuned_witness,
)
from tests.cases import problem
from tests.naive import dense_jacobian


def sigma(f, X):
    return torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item()


def repelling(gamma: float, d: int = 2, causal: bool = False) -> ls.SelfAttention:
    """A = -gamma I, V = I."""
    eye = torch.eye(d, dtype=torch.float64)
    return ls.SelfAttention(-gamma * math.sqrt(d) * eye, eye, eye, causal=causal)


def fitted_exponent(lengths, values):
    x, y = torch.tensor(lengths).double().log(), torch.tensor(values).double().log()
    return (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()


@pytest.mark.parametrize("causal", [False, True])
def test_the_configuration_grows_like_the_root_of_n(causal: bool):
    f, R = repelling(1.0, causal=causal), 3.0
    lengths = [8, 16, 32, 64, 128, 256]
    exact = [ls.local_lipschitz(f, theorem_witness(f, Ball(R, n))).value for n in lengths]
    assert abs(fitted_exponent(lengths, exact) - 0.5) < 0.03
    for n, value in zip(lengths, exact, strict=True):
        stated = theorem_lower(f, Ball(R, n))
        assert stated == pytest.approx(
            math.sqrt(n - 1) / (1 + (n - 1) * math.exp(-2 * R * R)), rel=1e-9
        )
        assert stated <= value


@pytest.mark.parametrize("causal", [False, True])
def test_the_tuned_gap_wins_by_a_logarithm(causal: bool):
    f, R = repelling(1.0, causal=causal), 3.0
    gains = []
    for n in (16, 64, 256):
        ball = Ball(R, n)
        exact = ls.local_lipschitz(f, tuned_witness(f, ball)).value
        assert theorem_lower(f, ball) <= tuned_lower(f, ball) <= exact <= compact_upper(f, ball)
        gains.append(tuned_lower(f, ball) / math.sqrt(n - 1))
    assert gains[1] - gains[0] > 0.15 * math.log(4) and gains[2] - gains[1] > 0.15 * math.log(4)


def test_the_tuned_gap_is_not_rounded_up():
    """Saturated attention on the line: at the witness the constant is exactly |v| sqrt(n - 1)."""
    for v in torch.rand(
        40, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).tolist():
        one = torch.ones(1, 1, dtype=torch.float64)
        f, exact = ls.SelfAttention(-3e4 * one, one, v * one), v * math.sqrt(6)
        assert exact * (1 - 1e-8) <= tuned_lower(f, Ball(1.0, 7)) <= exact


def test_the_tuned_gap_puts_the_special_token_where_it_is_seen_most():
    f, R, n = repelling(1.0), 3.0, 12
    seen = torch.ones(n, n, dtype=torch.bool)
    seen[:, 0] = False
    seen.fill_diagonal_(True)
    masked = replace(f, mask=seen)
    X = tuned_witness(masked, Ball(R, n))
    assert (X[0] != X).any(dim=1).sum() == 1 and torch.equal(X[0], X[2])
    assert tuned_lower(masked, Ball(R, n)) <= sigma(masked, X)


def test_compact_is_exact_without_scores_and_never_above_the_theorem():
    f, X = problem("repeated singular values", 0)
    assert compact_upper(f, Ball(1.0, len(X))) == pytest.approx(1.0, rel=1e-9)
    for seed in range(8):
        for kind in ("gaussian", "causal", "multi-head, projected"):
            f, X = problem(kind, seed)
            for R in (0.1, 1.0, 10.0):
                ball = Ball(R, len(X))
                assert compact_upper(f, ball) <= theorem_upper(f, ball)


def largest_product() -> float:
    """The largest p ||C|| / R^2 for an atom of mass p in B_R: 4 p (1 - p) for p >= 1/2."""
    p = torch.linspace(0, 1, 2_000_001, dtype=torch.float64)
    return (p * torch.where(p < 0.5, 1.0, 4 * p * (1 - p))).max().item()


@pytest.mark.parametrize(("causal", "bias"), [(False, 0.0), (True, 0.0), (False, 0.5)])
def test_compact_is_this_formula(causal: bool, bias: float):
    """Large scores, where the heaviest atom sets the key term; small ones, where kappa does."""
    one = torch.ones(1, 1, dtype=torch.float64)
    n, v = 9, 3.0
    for size, saturated in ((40.0, True), (0.01, False)):
        f = ls.SelfAttention(
            size * one, one, v * one, biases=(bias * one[0], None, None), causal=causal
        )
        R = 1.5
        a, b = size * R * R, R * (size * R + bias)
        counts = range(1, n + 1) if causal else [n] * n
        kappa = math.fsum(1 / (1 + (i - 1) * math.exp(-2 * b)) for i in counts)
        assert (largest_product() * n < kappa) == saturated
        truth = v * (a + math.sqrt(kappa) + b * math.sqrt(min(kappa, largest_product() * n)))
        assert compact_upper(f, Ball(R, n)) == pytest.approx(truth, rel=1e-9)


def test_the_key_term_of_compact_counts_those_who_see_a_key():
    """A window of two: no key has more than two viewers, however long the sequence is."""
    one = torch.ones(1, 1, dtype=torch.float64)
    f = ls.SelfAttention(40 * one, one, one, causal=True, window=2)
    truth = 40 + math.sqrt(2) + 40 * math.sqrt(2 * largest_product())
    assert compact_upper(f, Ball(1.0, 50)) == pytest.approx(truth, rel=1e-9)


def moved(f: ls.SelfAttention, X: torch.Tensor) -> float:
    """How far the crowd moves when the special token, the first, moves along itself by one."""
    n, d = X.shape
    J = dense_jacobian(f, X).reshape(n, -1, n, d)
    return (J[1:, :, 0] @ (X[0] / X[0].norm())).norm().item()


@pytest.mark.parametrize("size", [0.05, 0.15, 2.0])
def test_the_theorem_from_below_needs_a_gap_that_is_not_negative(size: float, monkeypatch):
    """With the wrong sign of an eigenvalue, what the proof says of its vector still holds."""
    f = repelling(-size)
    values = torch.tensor([-size, -size], dtype=torch.complex128)
    vectors = torch.eye(2, dtype=torch.complex128)
    ball = Ball(1.0, 4)
    monkeypatch.setattr(torch.linalg, "eig", lambda A: (values, vectors))
    stated, X = theorem_lower(f, ball), theorem_witness(f, ball)
    assert torch.equal(X[0], -X[1]), "the crowd is opposite, and the gap -2 size"
    p = 1 / (1 + 3 * math.exp(2 * size))
    assert moved(f, X) == pytest.approx(math.sqrt(3) * p * abs(1 - (1 - p) * 2 * size), rel=1e-9)
    assert stated <= moved(f, X)
    assert (stated > 0) == (size < 0.25)


@pytest.mark.parametrize("seed", range(20))
def test_the_theorem_from_below_where_the_eigenvalue_is_a_rounding_error(seed: int):
    """A = x y' with y orthogonal to x, so that the computed gap has any sign."""
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 3, generator=g, dtype=torch.float64)
    A = torch.outer(x, y - x * (x @ y) / (x @ x))
    f = ls.SelfAttention(A * math.sqrt(3), torch.eye(3).double(), torch.eye(3).double())
    ball = Ball(1.0, 5)
    stated = theorem_lower(f, ball)
    assert 2 / 5 * (1 - 1e-6) <= stated <= moved(f, theorem_witness(f, ball))


def test_the_large_radius_limit():
    g = torch.Generator().manual_seed(4)
    n, d = 8, 3
    Q, V, X = (
        torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((d, d), (d, d), (n, d))
    )
    f = ls.SelfAttention(Q, torch.eye(d, dtype=torch.float64), V)
    X = torch.nn.functional.normalize(X)
    limit = large_radius_limit(f, X)
    errors = [abs(sigma(f, R * X) / limit - 1) for R in (10.0, 30.0, 100.0)]
    assert errors[2] < 1e-6 and errors[2] <= errors[0]
    for R in (1.0, 10.0, 100.0):
        assert (
            saturated_lower(f, Point(R * X)) <= sigma(f, R * X) <= saturated_upper(f, Point(R * X))
        )
    assert saturated_upper(f, Point(100 * X)) / saturated_lower(f, Point(100 * X)) < 1 + 1e-6


def test_the_tuned_gap_takes_an_eigenvector_of_the_scores_in_any_basis():
    """A = -g w w' with w between the axes: the widest gap is 2 g R^2, along w and not an axis."""
    w = torch.full((2, 1), 0.5**0.5, dtype=torch.float64)
    g, n, eye = 0.25, 8, torch.eye(2, dtype=torch.float64)
    f = ls.SelfAttention(-g * math.sqrt(2) * w @ w.T, eye, eye)
    # So small a gap is best where it is widest, and the widest is on the grid.
    gap, ball = 2 * g, Ball(1.0, n)
    p = 1 / (1 + (n - 1) * math.exp(-gap))
    truth = math.sqrt(n - 1) * p * (1 + (1 - p) * gap)
    assert tuned_lower(f, ball) == pytest.approx(truth, rel=1e-9)
    assert tuned_lower(f, ball) <= moved(f, tuned_witness(f, ball)) * (1 + 1e-12)
