"""Weights scaled to a norm and rounded: by SVD in float64 the norm is close, never exceeded."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lipscope.nn.matrix_norms import by_squaring, of_norm, spectral_upper

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [(1, 1), (1, 7), (3, 3), (5, 5), (7, 7), (8, 24), (24, 8), (48, 48), (160, 96)]


def matrices(p: int, q: int) -> Iterator[Tensor]:
    """Whose roundings agree (ones, signs, rank one, just above halves), and whose do not."""
    yield torch.ones(p, q)
    yield torch.randn(p, q).sign()
    yield torch.outer(torch.randn(p), torch.randn(q))
    yield (1 + 2**-8 * (1 + 0.01 * torch.rand(p, q))) * torch.randn(p, 1).sign()
    yield torch.rand(p, q)
    yield torch.randn(p, q)
    yield torch.linalg.qr(torch.randn(max(p, q), max(p, q)))[0][:p, :q].contiguous()
    yield torch.randn(p, q) * torch.exp(2 * torch.randn(p, q)).clamp_max(1e3)


def norm(W: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(W.double(), 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rounded_matrix_has_at_most_the_norm_asked_for(dtype):
    torch.manual_seed(0)
    eps = torch.finfo(dtype).eps
    for shape in SHAPES:
        for W in matrices(*shape):
            W = W.to(dtype)
            for target in (1.0, 0.999 / 1.129, 2.0, 0.3, 1e-5):
                found = norm(of_norm(target, W)) / target
                assert found <= 1
                floor = (2 * eps if eps > 1e-4 else 20 * eps) + 1e-12
                assert target < 1e-4 or norm(W) < 2**-10 or found >= 1 - floor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_all_entries_round_the_same_way_the_worst_case_is_left_for_it(dtype):
    """Signs of an orthogonal matrix, 1 + eps for 1 and -1 for -1, times just below 1 + eps / 2.

    Then the former round up and the latter towards zero: the errors of all entries add up.
    """
    n, eps = 64, torch.finfo(dtype).eps
    signs = torch.tensor(
        [[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)]
    ).double()
    W = torch.where(signs > 0, 1 + eps, -1.0).to(dtype)
    scale = 1 + eps / 2 - eps**2 / 4
    target = (scale * spectral_upper(W)).item() / (1 - eps)
    rounded = (scale * W.double()).to(dtype)
    assert norm(rounded) > target and norm(rounded.double() - scale * W.double()) > 3 * eps * target
    assert target * (1 - 10 * eps) < norm(of_norm(target, W)) <= target


@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_batches_and_zeros(dtype):
    torch.manual_seed(0)
    W = torch.randn(4, 6, 6).to(dtype)
    W[3] = 0
    target = torch.tensor([1.0, -2.0, 0.0, 5.0]).to(dtype)
    R = of_norm(target, W)
    assert R.dtype == dtype and (norm(R) <= target.double().abs()).all()
    assert not R[2:].any() and (R[1] * W[1] <= 0).all()
    for i in range(4):
        torch.testing.assert_close(
            of_norm(target[i], W[i]), R[i], rtol=2 * torch.finfo(dtype).eps, atol=0
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_passes_through_the_rounding(dtype):
    """That of the map without it, up to the roundings themselves."""
    torch.manual_seed(0)
    W, U = torch.randn(6, 6).to(dtype), torch.randn(6, 6)
    found, exact = (V.clone().requires_grad_(True) for V in (W, W.double()))
    (of_norm(0.9, found).float() * U).sum().backward()
    (0.9 * exact / torch.linalg.matrix_norm(exact, 2) * U).sum().backward()
    assert (found.grad.double() - exact.grad).norm() < 4 * torch.finfo(
        dtype
    ).eps * exact.grad.norm()


@pytest.mark.parametrize("shape", [(7, 7), (3, 20), (20, 3), (4, 6, 5), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_an_upper_bound_and_close(shape, dtype):
    torch.manual_seed(0)
    for size in (1e-12, 1.0, 1e8, 1e70):
        if size > torch.finfo(dtype).max:
            continue
        W = (size * torch.randn(shape, dtype=dtype)).to(dtype)
        exact = torch.linalg.matrix_norm(W.double(), 2)
        assert (spectral_upper(W) >= exact).all() and (
            spectral_upper(W) <= exact * (1 + 1e-10)
        ).all()
        G = W.double() @ W.double().mT
        squared = by_squaring(G) * (1 + 1e-12)
        assert (squared >= exact.square()).all() and (
            squared <= exact.square() * shape[-2] ** (1 / 512) * 1.01
        ).all()


def test_weights_that_diverged_have_no_norm():
    """A loss that has become NaN stays NaN, as in any layer; linear algebra raises nothing."""
    for bad in (math.nan, math.inf):
        W = torch.randn(2, 3, 4)
        W[1, 0, 0] = bad
        assert spectral_upper(W).isnan().tolist() == [False, True]
        assert by_squaring(W.double() @ W.double().mT).isfinite().tolist() == [True, False]


def test_repeated_singular_values_are_no_trouble():
    """Equal singular values: norms of powers are least accurate; gradients must stay finite."""
    W = torch.linalg.qr(torch.randn(64, 64).double())[0].requires_grad_(True)
    assert 1 <= by_squaring(W @ W.mT).sqrt().item() * (1 + 1e-12) < 1.005
    for value in (spectral_upper(W), by_squaring(W @ W.mT)):
        (gradient,) = torch.autograd.grad(value, W, retain_graph=True)
        assert gradient.isfinite().all()
