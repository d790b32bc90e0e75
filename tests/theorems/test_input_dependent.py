"""The input-dependent bound: tight where the theory says so, the same for every form of head."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import lipscope as ls
from lipscope._types import Point
from lipscope.theorems.input_dependent import Features, _query_term, centred, features, local_upper
from lipscope.theorems.registry import bounds
from lipscope.theorems.rounding import gamma
from lipscope.theorems.statement import heads_of
from tests.cases import problem
from tests.naive import naive_softmax


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


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_a_key_bias_enlarges_the_errors_of_the_keys(size: float):
    """Keys in exact arithmetic are within the stated error, which grows with |b_k|."""
    f, X = problem("gaussian", 3)
    g = torch.Generator().manual_seed(0)
    bk = size * torch.randn(f.K.shape[0], generator=g, dtype=torch.float64)
    (h,) = heads_of(replace(f, biases=(None, bk, None)), folded=False)
    found = features(h, X)
    for i, row in enumerate(X.tolist()):
        errors = [
            sum(Fraction(w) * Fraction(x) for w, x in zip(weights, row, strict=True))
            + Fraction(b)
            - Fraction(k)
            for weights, b, k in zip(f.K.tolist(), bk.tolist(), found.k[i].tolist(), strict=True)
        ]
        slack = found.k_slack[i].item()
        assert slack > 0 and any(errors)
        assert sum(e * e for e in errors) <= Fraction(slack) ** 2
    far = torch.linalg.matrix_norm(f.K) * X.norm(dim=1) + bk.norm()
    assert found.k_slack.tolist() == pytest.approx((gamma(h.steps) * far).tolist(), rel=1e-9)


def test_the_query_term_covers_weights_whose_mean_moves():
    """Weights known to +-e on the corners of a square: the covariance of both sides is up to 4 e.

    Computed about the mean of the middle weights it is 0, and the centres may be off by 4 e each.
    """
    e = 0.01
    v = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    k = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    P = torch.full((4, 4), 0.25, dtype=torch.float64)
    none, one = torch.zeros(4, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    (h,) = heads_of(ls.SelfAttention(one, one, one), folded=False)
    seen = Features(
        q=k[:, None],
        k=k[:, None],
        v=v[:, None],
        P=P,
        q_slack=none,
        k_slack=none,
        v_slack=none,
        P_slack=torch.full_like(P, e),
        log_slack=none,
        seen=torch.ones(4, 4, dtype=torch.bool),
    )
    found = _query_term(h, seen, centred(seen, seen.v, none))
    true = P[0] + e * v * k
    covariance = (true @ (v * k) - (true @ v) * (true @ k)).item()
    assert covariance == pytest.approx(4 * e, rel=1e-12)
    assert covariance <= found
    assert found == pytest.approx(4 * e + (4 * e) ** 2, rel=1e-9)
