"""Yudin et al.'s bound and its tighter version match the formulas; the latter is never larger."""

from __future__ import annotations

import pytest
import torch

from lipscope._types import Point
from lipscope.theorems.yudin2025 import centred_upper, data_upper, softmax_jacobian_norm
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
