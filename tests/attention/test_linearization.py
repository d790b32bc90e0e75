"""The closed-form Jacobian against the dense one: by tiles, per head, compressed, at the edges."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import lipscope as ls
from lipscope.attention import linearization
from lipscope.fused import reference, tiled
from tests.cases import KINDS, problem
from tests.checks import assert_adjoint, assert_matches_dense
from tests.naive import dense_jacobian


def accuracy(J: ls.LinearOperator) -> float:
    return max(1e-12, float(J.stated_rounding.max()))


@pytest.mark.parametrize("cached", [True, False], ids=["weights kept", "weights recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_dense_jacobian(kind, cached, monkeypatch):
    if not cached:
        monkeypatch.setattr(linearization, "CACHE", 0)
        monkeypatch.setattr(tiled, "TILE", 20)
    for seed in (0, 1):
        f, X = problem(kind, seed)
        J = ls.jacobian(f, X)
        assert_matches_dense(J, dense_jacobian(f, X), tol=accuracy(J))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    "kind", ["multi-head, projected", "grouped keys", "sinks", "softcap", "L2", "rotary", "padding"]
)
def test_heads_apart(kind, cached, monkeypatch):
    if not cached:
        monkeypatch.setattr(linearization, "CACHE", 0)
    f, X = problem(kind, 3)
    batch = torch.stack([X, 0.3 * X])
    J = ls.jacobian(f.heads_apart(), batch)
    assert J.batch == 2 * f.heads
    dense = torch.stack([dense_jacobian(f.head(h), x) for x in batch for h in range(f.heads)])
    assert_matches_dense(J, dense, tol=accuracy(J))
    members = torch.tensor([2, 0])
    assert_matches_dense(J.take(members), dense[members], tol=accuracy(J))


def test_members_of_a_batch_with_masks_of_their_own(monkeypatch):
    f, _ = problem("multi-head, projected", 3)
    g = torch.Generator().manual_seed(0)
    X = torch.randn(4, 6, f.Q.shape[1], generator=g, dtype=torch.float64)
    masked = replace(
        f, mask=torch.rand(4, 6, 6, generator=g) > 0.4, padding=torch.rand(4, 6, generator=g) > 0.2
    )
    dense = torch.stack(
        [
            dense_jacobian(replace(masked, mask=masked.mask[i], padding=masked.padding[i]), X[i])
            for i in range(4)
        ]
    )
    for cache in (linearization.CACHE, 0):
        monkeypatch.setattr(linearization, "CACHE", cache)
        J = ls.jacobian(masked, X)
        assert_matches_dense(J, dense)
        assert_matches_dense(J.take(torch.tensor([3, 1])), dense[[3, 1]])


def test_a_head_is_solved_in_the_space_it_reads():
    g = torch.Generator().manual_seed(0)
    f = ls.SelfAttention(*(torch.randn(4, 50, generator=g, dtype=torch.float64) for _ in range(3)))
    X = torch.randn(7, 50, generator=g, dtype=torch.float64)
    J = ls.jacobian(f, X)
    assert J.in_shape == (7, 50) and J.compressed.core.in_shape == (7, 12)
    dense = dense_jacobian(f, X)
    e = ls.spectral_norm(J, tol=1e-10)
    assert e.value == pytest.approx(torch.linalg.matrix_norm(dense, 2).item(), rel=1e-12)
    assert e.right.shape == (7, 50) and torch.allclose(
        dense @ e.right.flatten(), e.value * e.left.flatten(), atol=1e-10
    )
    assert_adjoint(J.compressed.core)


@pytest.mark.wide
def test_stated_rounding_holds_in_float32():
    """A float32 solve differs from a float64 solve by no more than the rounding it states."""
    for kind in KINDS:
        for seed in range(6):
            f, X = problem(kind, seed)
            if "huge" in kind or "tiny" in kind:
                continue  # outside the range of float32
            single, x = f.to(torch.float32), X.float()
            exact = ls.local_lipschitz(single.double(), x.double(), tol=1e-10).value
            J = ls.jacobian(single, x)
            e = ls.spectral_norm(J, tol=1e-10)
            if e.status.ok:
                assert abs(e.value - exact) <= float(J.stated_rounding) * exact, f"{kind} {seed}"


def test_scores_that_overflow_have_their_status():
    f = ls.SelfAttention(*(torch.eye(3, dtype=torch.float64) for _ in range(3)))
    X = 1e200 * torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    e = ls.local_lipschitz(f, X)
    assert (
        e.status is ls.Status.OVERFLOW
        and e.value != e.value
        and e.upper == float("inf")
        and e.lower == 0
    )


def test_a_norm_that_overflows_has_its_status():
    f, X = problem("huge output projection", 0)
    e = ls.local_lipschitz(replace(f, V=1e160 * f.V), X)
    assert e.status is ls.Status.OVERFLOW and e.value != e.value and e.upper == float("inf")


def test_overflow_of_one_member_leaves_the_others_alone():
    f, X = problem("gaussian", 0)
    e = ls.local_lipschitz(f, torch.stack([X, 1e200 * X, 2 * X]), tol=1e-10)
    assert e.status[1] is ls.Status.OVERFLOW and e.value[1].isnan() and e.confidence == 1 - 1e-9
    for i, x in ((0, X), (2, 2 * X)):
        assert e.value[i] <= e.upper[i] < 10 * e.value[i]
        assert e.value[i].item() == pytest.approx(
            ls.local_lipschitz(f, x, tol=1e-10).value, rel=1e-11
        )


def test_large_radius_limit():
    """One winner per row: J tends to a selection matrix times V, of norm |V| sqrt(most votes)."""
    g = torch.Generator().manual_seed(4)
    Q, K, V, X = (torch.randn(3, 3, generator=g, dtype=torch.float64) for _ in range(4))
    X = torch.cat([X, torch.randn(5, 3, generator=g, dtype=torch.float64)])
    f = ls.SelfAttention(Q, K, V)
    votes = torch.bincount((X @ Q.T @ K @ X.T).argmax(dim=1)).max().item()
    limit = torch.linalg.matrix_norm(V, 2).item() * votes**0.5
    assert ls.local_lipschitz(f, 300 * X).value == pytest.approx(limit, rel=1e-10)


def test_long_sequences_in_little_memory():
    """n = 2048 by tiles against a closed form: for equal tokens J = (1/n) 1 1' (x) V."""
    n, d = 2048, 8
    V = torch.randn(d, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    f = ls.SelfAttention(torch.eye(d).double(), torch.eye(d).double(), V)
    token = torch.randn(d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    e = ls.local_lipschitz(f, token.expand(n, d).contiguous())
    # D_X f = (1/n) 1 1' (x) V: the covariances vanish, and x_j - m_i too
    assert e.value == pytest.approx(torch.linalg.matrix_norm(V, 2).item(), rel=1e-10)


PIECES = {
    "heads": ((2,), 3, 3, {}),
    "one head": ((5,), 1, 1, {}),
    "grouped": ((2,), 4, 2, {"causal": True}),
    "softcap": ((2,), 2, 2, {"kernel": ls.Dot(softcap=2.0)}),
    "window": ((), 2, 1, {"causal": True, "window": 7}),
}


@pytest.mark.parametrize("piece", [1, 5000, 1 << 30])
@pytest.mark.parametrize("name", PIECES)
def test_products_in_pieces_add_up(name, piece, monkeypatch):
    """One row at a time, a few rows, everything at once; memory not yet written starts as NaN."""
    members, heads, groups, options = PIECES[name]
    g = torch.Generator().manual_seed(0)
    Q, K, V = (
        torch.randn(8 * count, 9, generator=g, dtype=torch.float64)
        for count in (heads, groups, groups)
    )
    padding = torch.arange(70) >= 5
    f = ls.SelfAttention(Q, K, V, heads=heads, kv_heads=groups, padding=padding, **options)
    X, E = torch.randn(2, *members, 70, 9, generator=g, dtype=torch.float64)
    Y, pushed = torch.func.jvp(f, (X,), (E,))
    U = torch.randn(Y.shape, generator=g, dtype=torch.float64)
    pulled = torch.func.vjp(f, X)[1](U)[0]
    J = ls.jacobian(f, X)
    plain = torch.Tensor.new_empty
    monkeypatch.setattr(linearization, "PIECE", piece)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a: plain(*a).fill_(torch.nan))
    for got, want in ((J.mv(E), pushed), (J.rmv(U), pulled)):
        assert torch.allclose(got, want, rtol=0, atol=1e-14 * want.abs().max().item() * 70)


def test_saturated_rows_lose_no_digits():
    """Nearly one-hot P, where dS - rowsum(P dS) nearly cancels, against extended precision."""
    g = torch.Generator().manual_seed(0)
    q, k, v, *tangent = torch.randn(6, 5, 1, 70, 8, generator=g, dtype=torch.float64)
    q, k = 30 * q, 30 * k
    P = torch.softmax(q @ k.mT, dim=-1)
    p, q_, k_, v_, dq, dk, dv = (
        x.numpy().astype(np.longdouble)[:, 0] for x in (P, q, k, v, *tangent)
    )
    dS = dq @ k_.transpose(0, 2, 1) + q_ @ dk.transpose(0, 2, 1)
    dP = p * (dS - (p * dS).sum(-1, keepdims=True))
    truth = torch.from_numpy((dP @ v_ + p @ dv).astype(np.float64))[:, None]
    assert np.finfo(np.longdouble).eps < 1e-18 and P.max() > 1 - 1e-12
    for jvp in (linearization._jvp_in_pieces, reference.jvp):
        off = (jvp(reference.Weights(P), q, k, v, tuple(tangent)) - truth).abs().max()
        assert off < 1e-15 * np.abs(dS).max() * v.abs().max()


def test_products_that_are_recorded_are_not_formed_in_place():
    """A layer of 80 tokens: mv and rmv under vmap and autograd give what plain calls give."""
    g = torch.Generator().manual_seed(1)
    f = ls.SelfAttention(*torch.randn(4, 8, 8, generator=g, dtype=torch.float64), heads=2)
    X, E, U = torch.randn(3, 80, 8, generator=g, dtype=torch.float64)
    J = ls.jacobian(f, X)
    assert torch.allclose(torch.func.vmap(J.mv)(E[None])[0], J.mv(E), rtol=1e-11)
    assert torch.allclose(torch.func.vmap(J.rmv)(U[None])[0], J.rmv(U), rtol=1e-11)
    leaf = E.clone().requires_grad_()
    (pulled,) = torch.autograd.grad(J.mv(leaf), leaf, U)
    assert torch.allclose(pulled, J.rmv(U), rtol=1e-10, atol=1e-12)
