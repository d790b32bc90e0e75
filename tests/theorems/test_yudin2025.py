"""Yudin et al.'s bound and its tighter version match the formulas; the latter is never larger."""

from __future__ import annotations

import mpmath
import pytest
import torch

import lipscope as ls
from lipscope._types import Point
from lipscope.theorems.input_dependent import features
from lipscope.theorems.statement import heads_of
from lipscope.theorems.yudin2025 import (
    _sharpness,
    centred_upper,
    data_upper,
    softmax_jacobian_norm,
)
from tests.cases import problem


def norm(M):
    return torch.linalg.matrix_norm(M, 2).item()


@pytest.mark.parametrize("seed", range(5))
def test_the_formulas_are_these(seed: int):
    f, X = problem("gaussian", seed)
    A = f.K.T @ f.Q / f.Q.shape[0] ** 0.5
    P = torch.softmax(X @ A.T @ X.T, dim=1)
    p = P.sort(dim=1, descending=True).values
    g1 = (p[:, 0] * (1 - p[:, 0] + p[:, 1])).max().item()
    Xc = X - X.mean(dim=0)
    published = norm(f.V) * (norm(P) + 2 * norm(X) ** 2 * norm(A) * g1)
    centred = norm(f.V) * (norm(P) + g1 * norm(Xc) * (norm(Xc @ A) + norm(X @ A.T)))
    assert data_upper(f, Point(X)) == pytest.approx(published, rel=1e-7)
    assert centred_upper(f, Point(X)) == pytest.approx(centred, rel=1e-7)
    assert centred <= published * (1 + 1e-12)


def test_g1_is_at_least_the_norm_of_the_softmax_jacobian_and_close():
    g = torch.Generator().manual_seed(0)
    P = torch.softmax(2 * torch.randn(200, 6, generator=g, dtype=torch.float64), dim=1)
    exact = torch.linalg.eigvalsh(torch.diag_embed(P) - P[:, :, None] * P[:, None, :])[:, -1]
    ratio = softmax_jacobian_norm(P) / exact
    assert ratio.min() >= 1 and ratio.max() < 1.12


@pytest.mark.parametrize("apart", [10.0, 700.0, 800.0, 5000.0])
def test_a_weight_that_underflows_is_not_taken_for_zero(apart: float):
    """Scores so far apart that float64 has no number for the smaller weight, against 60 digits."""
    X = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)
    Q = apart * 2**0.5 * eye
    (h,) = heads_of(ls.SelfAttention(Q, eye, eye), folded=False)
    with mpmath.workdps(60):
        small = mpmath.exp(-mpmath.mpf(apart)) / (1 + mpmath.exp(-mpmath.mpf(apart)))
        exact = (1 - small) * 2 * small
        found = mpmath.mpf(_sharpness(features(h, X)))
        assert exact <= found <= exact * (1 + mpmath.mpf("1e-9")) + mpmath.mpf(1e-300)
