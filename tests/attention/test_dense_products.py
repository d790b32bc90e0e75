"""Products from a kept P, piece by piece: the numbers of `reference`, whatever the pieces are."""

import numpy as np
import pytest
import torch

import lipscope as ls
from lipscope.attention import dense_products
from lipscope.fused import reference
from lipscope.fused.pattern import Pattern

CASES = {
    "heads": (2, 3, 3, Pattern()),
    "one head": (5, 1, 1, Pattern()),
    "grouped": (2, 4, 2, Pattern(causal=True)),
    "softcap": (2, 2, 2, Pattern(softcap=2.0)),
    "window": (1, 2, 1, Pattern(causal=True, window=7)),
}


def problem(name: str, n: int = 70, dtype: torch.dtype = torch.float64):
    """Weights, q, k, v, a tangent and a cotangent; the first five keys and queries are padding."""
    M, H, G, pattern = CASES[name]
    g = torch.Generator().manual_seed(0)

    def draw(heads: int, size: int) -> torch.Tensor:
        return torch.randn(M, heads, n, size, generator=g, dtype=dtype)

    real = (torch.arange(n) >= 5).expand(M, n)
    pattern = Pattern(
        causal=pattern.causal, window=pattern.window, softcap=pattern.softcap, keys=real,
        queries=real,
    )  # fmt: skip
    q, k, v = draw(H, 8), draw(G, 8), draw(G, 6)
    W = reference.forward_and_weights(q, k, v, pattern)[2]
    return W, (q, k, v), (draw(H, 8), draw(G, 8), draw(G, 6)), draw(H, 6)


@pytest.mark.parametrize("piece", [1, 5000, 100_000, 1 << 30])
@pytest.mark.parametrize("name", CASES)
def test_the_pieces_add_up(name, piece, monkeypatch):
    """One row at a time, a few rows, whole heads, everything at once."""
    monkeypatch.setattr(dense_products, "PIECE", piece)
    W, qkv, tangent, g = problem(name)
    do, want = dense_products.jvp(W, *qkv, tangent), reference.jvp(W, *qkv, tangent)
    assert torch.allclose(do, want, rtol=0, atol=1e-14 * want.abs().max().item() * 70)
    for got, want in zip(dense_products.vjp(W, *qkv, g), reference.vjp(W, *qkv, g), strict=True):
        assert got.shape == want.shape
        assert torch.allclose(got, want, rtol=0, atol=1e-14 * want.abs().max().item() * 70)


@pytest.mark.parametrize("name", CASES)
def test_the_adjoint(name, monkeypatch):
    monkeypatch.setattr(dense_products, "PIECE", 9000)
    W, qkv, tangent, g = problem(name)
    pushed = (dense_products.jvp(W, *qkv, tangent) * g).sum()
    pulled = sum(
        (x * y).sum() for x, y in zip(dense_products.vjp(W, *qkv, g), tangent, strict=True)
    )
    assert torch.allclose(pushed, pulled, rtol=1e-12)


def test_memory_that_was_never_written_is_never_read(monkeypatch):
    """Every place that results go to starts as NaN."""
    monkeypatch.setattr(dense_products, "PIECE", 9000)
    real = dense_products._transposed
    monkeypatch.setattr(dense_products, "_transposed", lambda *a: real(*a).fill_(torch.nan))
    W, qkv, tangent, g = problem("grouped")
    results = (dense_products.jvp(W, *qkv, tangent), *dense_products.vjp(W, *qkv, g))
    assert all(x.isfinite().all() for x in results)


def test_saturated_rows_lose_no_digits():
    """Nearly one-hot P, where dS - rowsum(P dS) nearly cancels, against extended precision."""
    _, (q, k, v), tangent, _ = problem("one head")
    q, k = 30 * q, 30 * k
    P = torch.softmax(q @ k.mT, dim=-1)
    p, q_, k_, v_, dq, dk, dv = (
        x.numpy().astype(np.longdouble)[:, 0] for x in (P, q, k, v, *tangent)
    )
    dS = dq @ k_.transpose(0, 2, 1) + q_ @ dk.transpose(0, 2, 1)
    dP = p * (dS - (p * dS).sum(-1, keepdims=True))
    truth = torch.from_numpy((dP @ v_ + p @ dv).astype(np.float64))[:, None]
    assert np.finfo(np.longdouble).eps < 1e-18 and P.max() > 1 - 1e-12
    for products in (dense_products, reference):
        off = (products.jvp(reference.Weights(P), q, k, v, tangent) - truth).abs().max()
        assert off < 1e-15 * np.abs(dS).max() * v.abs().max()


def test_long_inputs_go_through_here_and_recorded_ones_do_not():
    """A layer of 80 tokens: mv and rmv under vmap and autograd give what plain calls give."""
    g = torch.Generator().manual_seed(1)
    f = ls.SelfAttention(*torch.randn(4, 8, 8, generator=g, dtype=torch.float64), heads=2)
    X, E, U = torch.randn(3, 80, 8, generator=g, dtype=torch.float64)
    J = ls.jacobian(f, X)
    W, *_ = problem("heads")
    assert dense_products.usable(W, E) and not dense_products.usable(W, E.clone().requires_grad_())
    assert torch.allclose(torch.func.vmap(J.mv)(E[None])[0], J.mv(E), rtol=1e-11)
    assert torch.allclose(torch.func.vmap(J.rmv)(U[None])[0], J.rmv(U), rtol=1e-11)
    leaf = E.clone().requires_grad_()
    (pulled,) = torch.autograd.grad(J.mv(leaf), leaf, U)
    assert torch.allclose(pulled, J.rmv(U), rtol=1e-10, atol=1e-12)
    truth = torch.func.jvp(f, (X,), (E,))[1]
    assert torch.allclose(J.mv(E), truth, rtol=1e-10, atol=1e-12)
