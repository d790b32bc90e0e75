"""Attention by torch.cdist against dense Jacobians of written-out distances; roots by name."""

import pytest
import torch

import lipscope as ls
from lipscope.linalg.differentiate import TwiceDifferentiable


def attention(tied: bool, power: int, d: int, seed: int, mode: str, dtype: torch.dtype):
    """L2 attention by torch.cdist, and the same in float64 with written-out distances."""
    g = torch.Generator().manual_seed(seed)
    Q, K, V = (torch.randn(d, d, generator=g, dtype=torch.float64).to(dtype) / 2 for _ in range(3))
    K = Q if tied else K

    def by_cdist(X):
        scores = torch.cdist(X @ Q, X @ K, compute_mode=mode) ** power
        return torch.softmax(-scores, dim=-1) @ (X @ V)

    def written_out(X):
        q, k = X @ Q.double(), X @ K.double()
        squares = (q[..., :, None, :] - k[..., None, :, :]).square().sum(dim=-1)
        zero = squares == 0  # along the diagonal of tied weights, whatever X is
        roots = torch.where(zero, 1.0, squares).sqrt()
        scores = torch.where(zero, 0.0, roots**power)
        return torch.softmax(-scores, dim=-1) @ (X @ V.double())

    return by_cdist, written_out


MODES = ("use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("power", [2, 1])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n", [5, 30])
def test_attention_by_cdist_is_measured(n, tied, power, mode, dtype):
    for seed in range(2):
        f, exact = attention(tied, power, 3, seed, mode, dtype)
        X = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed + 50)).to(dtype)
        J = torch.autograd.functional.jacobian(exact, X.double()).reshape(n * 3, n * 3)
        sigma = torch.linalg.matrix_norm(J, 2).item()
        e = ls.local_lipschitz(f, X)
        assert e.status != ls.Status.NON_FINITE
        assert e.lower <= sigma <= e.upper
        assert e.value == pytest.approx(sigma, rel=1e-6 if dtype == torch.float64 else 1e-2)
    rows = ls.local_lipschitz(f, X, norm="inf")
    assert rows.value == pytest.approx(J.abs().sum(dim=1).max().item(), rel=1e-2)


def test_batches_and_second_derivatives_of_cdist():
    f, exact = attention(True, 2, 3, 0, MODES[0], torch.float64)
    X = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1)).double()
    for e, x in zip(ls.local_lipschitz(f, X), X, strict=True):
        J = torch.autograd.functional.jacobian(exact, x).reshape(12, 12)
        assert e.value == pytest.approx(torch.linalg.matrix_norm(J, 2).item(), rel=1e-9)
    with TwiceDifferentiable():
        assert torch.autograd.gradgradcheck(f, X[0].clone().requires_grad_(True))
        apart = torch.randn(2, 5, 3).double()
        assert torch.autograd.gradcheck(
            torch.cdist, (X[0][None].requires_grad_(True), apart.requires_grad_(True))
        )


def test_roots_at_zero_are_named_with_the_remedy():
    X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()

    def by_root(X):
        d = (X[:, None] - X[None]).square().sum(dim=-1).sqrt()
        return torch.softmax(-(d**2), dim=-1) @ X

    for norm in ("2", "inf"):
        e = ls.local_lipschitz(by_root, X, norm=norm)
        assert e.status == ls.Status.NON_FINITE
        assert "the derivative of sqrt is not finite" in e.note and "squared distances" in repr(e)
    assert "f(X) itself is not finite" in ls.local_lipschitz(lambda X: X * torch.nan, X).note


@pytest.mark.parametrize(
    "f",
    [lambda X: torch.cdist(X, X, p=1), lambda X: torch.nn.functional.pdist(X)[:, None]],
)
def test_distances_that_cannot_be_differentiated_twice_are_refused_by_name(f):
    with pytest.raises(ls.UserError, match=r"differentiated twice.*_[cp]dist_backward"):
        ls.jacobian(f, torch.randn(4, 3))
