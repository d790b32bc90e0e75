"""Castin et al.'s bounds and their sharper versions: rates, limits, and what each configuration attains."""

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
        assert stated == pytest.approx(math.sqrt(n - 1) / (1 + (n - 1) * math.exp(-2 * R * R)), rel=1e-9)
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
    """Saturated attention in one dimension: the constant at the witness is |v| sqrt(n - 1) to the last digit."""
    for v in torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist():
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


def test_compact_stops_growing_with_n_in_the_mean_field_regime():
    f = repelling(0.5)
    values = [compact_upper(f, Ball(1.0, n)) for n in (4, 64, 4096, 65536 // 8)]
    assert values[0] < values[1] < values[2] and values[3] < 1.01 * values[2]
    assert values[3] <= 0.5 + 1.5 * math.exp(0.5)


def test_the_large_radius_limit():
    g = torch.Generator().manual_seed(4)
    n, d = 8, 3
    Q, V, X = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((d, d), (d, d), (n, d)))
    f = ls.SelfAttention(Q, torch.eye(d, dtype=torch.float64), V)
    X = torch.nn.functional.normalize(X)
    limit = large_radius_limit(f, X)
    errors = [abs(sigma(f, R * X) / limit - 1) for R in (10.0, 30.0, 100.0)]
    assert errors[2] < 1e-6 and errors[2] <= errors[0]
    for R in (1.0, 10.0, 100.0):
        assert saturated_lower(f, Point(R * X)) <= sigma(f, R * X) <= saturated_upper(f, Point(R * X))
    assert saturated_upper(f, Point(100 * X)) / saturated_lower(f, Point(100 * X)) < 1 + 1e-6
