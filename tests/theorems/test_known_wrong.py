"""Negative controls: published formulas that are not bounds fail where the registered one holds."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import pytest
import torch

import lipscope as ls
from lipscope._types import Ball, Everywhere, Point
from lipscope.theorems.kim2021 import phi_inverse
from lipscope.theorems.registry import bounds
from lipscope.theorems.yudin2025 import softmax_jacobian_norm
from tests.naive import dense_jacobian


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def sigma(f, X):
    return torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item()


def smallest_upper(f, domain, norm="2"):
    return min(row.value for row in bounds(f, domain, norm) if row.kind == "upper")


def test_the_released_compute_bound_confuses_a_with_its_transpose():
    """||V|| (max|A x|^2 diameter^2 (n + 1) + n)^(1/2): the query term needs |A' x|."""
    s = 10.0
    X, A = matrix([1.0, 0.0], [-1.0, 0.0]), matrix([0.0, s], [0.0, 0.0])
    f = ls.SelfAttention(A * math.sqrt(2), torch.eye(2).double(), torch.eye(2).double())
    diameter, reach = torch.cdist(X, X).max().item(), (X @ A.T).norm(dim=1).max().item()
    released = math.sqrt(reach**2 * diameter**2 * 3 + 2)
    exact = sigma(f, X)
    assert exact > 7 * released
    assert exact <= smallest_upper(f, Point(X))


def l2_layer(size: float) -> ls.SelfAttention:
    """Kim et al.'s layer with D = H = 1: V = W_V' A, A = W_Q W_Q' / sqrt(k)."""
    W = matrix([size])
    return ls.SelfAttention(W, W, W @ W, kernel=ls.L2())


def test_the_second_power_in_the_l2_bound_fails():
    """sqrt(N) (4 phi + 1) ||W_Q|| ||W_V||: attention is homogeneous of degree two in W_Q."""
    for size in (3.0, 10.0):
        X = matrix([0.0], [1.3], [-1.3]) / size
        f = l2_layer(size)
        quoted = math.sqrt(3) * (4 * phi_inverse(3) + 1) * size
        assert sigma(f, X) > quoted
        assert sigma(f, X) <= smallest_upper(f, Everywhere(3))


def test_l2_attention_nearly_attains_its_bound_for_the_largest_coordinate():
    """x_1 = 0 among +-t, t^2 = 1 + phi: row sum 4 phi + (1 - phi) / (1 + phi), not 4 phi + 1."""
    for N in (5, 51):
        phi = phi_inverse(N)
        t = math.sqrt(1 + phi)
        X = torch.cat(
            [torch.zeros(1), *(torch.tensor([t, -t]) for _ in range((N - 1) // 2))]
        ).double()[:, None]
        rows = dense_jacobian(l2_layer(1.0), X).abs().sum(dim=1)
        assert rows.max().item() == pytest.approx(4 * phi + (1 - phi) / (1 + phi), rel=1e-6)
        assert (
            rows.max().item()
            <= smallest_upper(l2_layer(1.0), Everywhere(N), "inf")
            <= rows.max().item() + 2
        )


@pytest.mark.parametrize("broken", ["untied", "no self"])
def test_l2_attention_without_its_hypotheses_has_no_constant(broken: str):
    f = l2_layer(1.0)
    mask = torch.ones(3, 3, dtype=torch.bool).fill_diagonal_(False)
    f = replace(f, K=2 * f.K) if broken == "untied" else replace(f, mask=mask)
    rows = bounds(f, Everywhere(3))
    assert not [row for row in rows if row.kind == "upper"]
    assert any("same" in r.failed or "own key" in r.failed for r in rows.not_offered)
    spread = matrix([3.0], [1.0], [2.0]) if broken == "untied" else matrix([0.0], [1.0], [-1.0])
    assert sigma(f, 100 * spread) > 50 * sigma(f, 10 * spread)


@pytest.mark.parametrize("additive", [False, True])
def test_kappa_without_the_mask_fails(additive: bool):
    """n = 16, A = 0, every query sees key 1 and itself, or key 1 most: unmasked, the bound is 1."""
    n = 16
    mask = torch.eye(n, dtype=torch.bool)
    mask[:, 0] = True
    if additive:
        mask = torch.zeros(n, n, dtype=torch.float64)
        mask[:, 0] = 50.0
    none = torch.zeros(1, 1, dtype=torch.float64)
    f = ls.SelfAttention(none, none, torch.ones_like(none), mask=mask)
    X = torch.rand(n, 1, dtype=torch.float64)
    unmasked = smallest_upper(replace(f, mask=None), Ball(1.0, n))
    assert unmasked == pytest.approx(1.0, rel=1e-9)
    assert sigma(f, X) > (3 if additive else 2) * unmasked
    assert sigma(f, X) <= smallest_upper(f, Ball(1.0, n))


def test_the_unmasked_mean_field_constant_fails_under_a_causal_mask():
    """A = 0, V = 1: averages over the past have norm up to 2, not 1."""
    none = torch.zeros(1, 1, dtype=torch.float64)
    f = ls.SelfAttention(none, none, torch.ones_like(none), causal=True)
    X = torch.rand(100, 1, dtype=torch.float64)
    assert sigma(f, X) > 1.6
    assert sigma(f, X) <= smallest_upper(f, Ball(1.0, 100), "W2") == pytest.approx(2.0, rel=1e-9)


def test_the_tuned_gap_formula_without_the_mask_overstates_under_a_causal_mask():
    """(1/2) sqrt(n - 1) (1 + ln(n - 1) / 2) at n = 400: causal rows weigh the token differently."""
    n = 400
    gap = math.log(n - 1)
    R = math.sqrt(gap / 2)
    one = torch.ones(1, 1, dtype=torch.float64)
    f = ls.SelfAttention(-one, one, one, causal=True)
    X = R * torch.cat([torch.ones(1, 1), -torch.ones(n - 1, 1)]).double()
    exact = ls.local_lipschitz(f, X).value
    stated = {row.name: row.value for row in bounds(f, Ball(R, n)) if row.kind == "lower"}
    assert 0.5 * math.sqrt(n - 1) * (1 + gap / 2) > 1.05 * exact
    assert stated["Castin et al., ball, from below"] <= stated["tuned gap"] <= 1.01 * exact


def test_g1_written_literally_rounds_below_the_norm():
    """p_1 (1 - p_1 + p_2) cancels, the registered form does not. Reference: 60 digits."""
    literal_fails = 0
    g = torch.Generator().manual_seed(1)
    with mpmath.workdps(60):
        for _ in range(60):
            z = torch.randn(4, generator=g, dtype=torch.float64) * 15
            p = torch.softmax(z, 0)
            exact = [mpmath.mpf(x) for x in p.tolist()]
            exact = [x / sum(exact) for x in exact]
            M = mpmath.matrix(4, 4)
            for i in range(4):
                for j in range(4):
                    M[i, j] = (exact[i] if i == j else 0) - exact[i] * exact[j]
            norm = max(mpmath.eigsy(M, eigvals_only=True))
            top = p.sort(descending=True).values.tolist()
            literal_fails += mpmath.mpf(top[0] * (1 - top[0] + top[1])) < norm * (
                1 - mpmath.mpf("1e-6")
            )
            assert mpmath.mpf(softmax_jacobian_norm(p).item()) >= norm
    assert literal_fails > 0
