"""Mean-field constants match formulas; two atoms come within a factor two of the sharper."""

from __future__ import annotations

import math

import pytest
import torch

import lipscope as ls
from lipscope._types import Ball
from lipscope.theorems.geshkovski2023 import (
    largest_token_upper,
    masked_wasserstein_upper,
    sharper_wasserstein_upper,
    wasserstein_upper,
)
from tests.naive import dense_jacobian


def repelling(bias: float = 0.0, causal: bool = False) -> ls.SelfAttention:
    """A = -1, V = 1, b_q = bias in one dimension."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return ls.SelfAttention(-one, one, one, biases=(bias * one[0], None, None), causal=causal)


def test_the_formulas_are_these():
    R, bias = 1.5, 0.5
    a, b = R**2, R * (R + bias)
    ball = Ball(R, 3)
    assert wasserstein_upper(repelling(), ball) == pytest.approx(
        (1 + 3 * a) * math.exp(2 * a), rel=1e-9
    )
    assert sharper_wasserstein_upper(repelling(bias), ball) == pytest.approx(
        a + (1 + b) * math.exp(b), rel=1e-9
    )
    masked = masked_wasserstein_upper(repelling(bias, causal=True), ball)
    assert masked == pytest.approx(a + 2 * (1 + 2 * b) * math.exp(2 * b), rel=1e-9)
    assert largest_token_upper(repelling(bias), ball) == pytest.approx(1 + a + b, rel=1e-9)


@pytest.mark.parametrize("R", [1.0, 2.0, 3.0])
def test_two_atoms_come_close_to_the_sharper_constant(R: float):
    """mu = p delta_R + (1 - p) delta_-R, p = e^(-2 R^2): the norm of the weighted derivative."""
    p = math.exp(-2 * R * R)
    w = torch.tensor([p, 1 - p], dtype=torch.float64)
    f = repelling()
    weighted = ls.SelfAttention(f.Q, f.K, f.V, mask=w.log().repeat(2, 1))
    J = dense_jacobian(weighted, torch.tensor([[R], [-R]], dtype=torch.float64))
    norm = torch.linalg.matrix_norm(w.sqrt()[:, None] * J / w.sqrt(), 2).item()
    assert 0.4 <= norm / sharper_wasserstein_upper(f, Ball(R, 2)) <= 1
