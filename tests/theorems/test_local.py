"""The input-dependent bound: tight where the theory says so, the same for every form of head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lipscope as ls
from lipscope._types import Point
from lipscope.theorems.local import local_upper
from lipscope.theorems.registry import bounds
from tests.cases import problem
from tests.naive import dense_jacobian, naive_softmax


def written_out(X, A, V, beta, mask=None):
    """The formula term by term, in tokens, for one head: max ||V C A|| + ||V|| ||P|| + key term."""
    n = len(X)
    b = X @ A.T + beta
    P = naive_softmax((b @ X.T)[None], n, n, False, None, mask, None, None, None)[0]
    away = X[None] - (P @ X)[:, None]
    C = torch.einsum("ij,ija,ijb->iab", P, away, away)
    spread = torch.linalg.matrix_norm(V @ C @ V.T, 2)
    keys = (
        torch.linalg.matrix_norm(torch.einsum("ij,ia,ib->jab", P * spread[:, None], b, b), 2)
        .max()
        .sqrt()
    )
    first = torch.linalg.matrix_norm(V @ C @ A, 2).max()
    return (first + torch.linalg.matrix_norm(V, 2) * torch.linalg.matrix_norm(P, 2) + keys).item()


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_formula(seed: int):
    f, X = problem("boolean mask" if seed % 2 else "gaussian", seed)
    g = torch.Generator().manual_seed(seed)
    bq = torch.randn(f.Q.shape[0], generator=g, dtype=torch.float64)
    f = replace(f, biases=(bq, None, None))
    scale = f.Q.shape[0] ** -0.5
    expected = written_out(X, scale * f.K.T @ f.Q, f.V, scale * f.K.T @ bq, f.mask)
    assert local_upper(f, Point(X)) == pytest.approx(expected, rel=1e-9)


def test_rope_by_angle_zero_changes_nothing():
    f, X = problem("gaussian", 1)
    k = f.Q.shape[0]
    still = ls.Rope(torch.ones(len(X), k).double(), torch.zeros(len(X), k).double())
    turned = replace(f, kernel=ls.Dot(rope=still))
    assert local_upper(turned, Point(X)) == pytest.approx(local_upper(f, Point(X)), rel=1e-9)


def test_tightness_on_random_heads():
    ratios = []
    for seed in range(12):
        g = torch.Generator().manual_seed(seed)
        X = torch.nn.functional.layer_norm(
            torch.randn(16, 12, generator=g, dtype=torch.float64), (12,)
        )
        Q, K, V = (torch.randn(6, 12, generator=g, dtype=torch.float64) / 12**0.5 for _ in range(3))
        f = ls.SelfAttention(Q, K, V)
        ratios.append(
            local_upper(f, Point(X)) / torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item()
        )
    assert min(ratios) >= 1 and sorted(ratios)[6] <= 2.5


def test_concatenated_heads_add_as_squares():
    f, X = problem("multi-head", 0)
    alone = sum(local_upper(f.head(h), Point(X)) ** 2 for h in range(f.heads)) ** 0.5
    assert local_upper(f, Point(X)) == pytest.approx(alone, rel=1e-9)


def test_tables_that_do_not_rotate_are_refused():
    f, X = problem("rotary", 0)
    table = torch.rand(len(X), f.Q.shape[0] // f.heads, dtype=torch.float64)
    skewed = replace(f, kernel=ls.Dot(rope=ls.Rope(table, table)))
    refused = bounds(skewed, Point(X)).not_offered
    assert any("rope" in r.failed for r in refused if r.name == "input-dependent")
