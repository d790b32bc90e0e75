"""The bidiagonalisation's own relations."""

import pytest
import torch

from lipscope.linalg.golub_kahan import GolubKahan
from tests.checks import dense_operator


def run(M: torch.Tensor, steps: int, capacity: int = 100) -> GolubKahan:
    g = torch.Generator().manual_seed(1)
    start = torch.randn(M.shape[0], M.shape[2], generator=g, dtype=M.dtype)
    vector = M.shape[0] * sum(M.shape[1:]) * M.element_size()
    basis = GolubKahan(dense_operator(M), start, memory=capacity * vector)
    for _ in range(steps):
        basis.step()
    return basis


def matrices(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("steps", "capacity"), [(1, 100), (7, 100), (20, 100), (31, 8)])
def test_relations_and_orthogonality(steps, capacity):
    """J V' = U' H and J' U' = V' H' + b v_{k+1} e_k', with orthonormal rows, restarts or not."""
    M = matrices(3, 40, 30)
    basis = run(M, steps, capacity)
    k = basis.k
    V, U = (x.blocks[0][:k].transpose(0, 1) for x in (basis.V, basis.U))
    H = basis.H[:, :k, :k]
    J = M * basis.scale[:, None, None]
    eye = torch.eye(k, dtype=torch.float64)
    assert (V @ V.mT - eye).abs().max() < 1e-13
    assert (U @ U.mT - eye).abs().max() < 1e-13
    assert (J @ V.mT - U.mT @ H).abs().max() < 1e-13
    rest = J.mT @ U.mT - V.mT @ H.mT
    assert rest[:, :, :-1].norm() < 1e-13
    assert (rest[:, :, -1] - basis.b[:, None] * basis.v).abs().max() < 1e-13


def test_bidiagonal_until_restart():
    basis = run(matrices(2, 20, 25), 10)
    H = basis.H[:, :10, :10]
    assert (H - torch.triu(torch.tril(H, 1))).abs().max() < 1e-14
    a, b = (torch.stack(x, dim=1) for x in zip(*basis.coefficients, strict=True))
    assert torch.allclose(H.diagonal(dim1=1, dim2=2), a) and torch.allclose(
        H.diagonal(1, 1, 2), b[:, :-1]
    )


def test_drift_shows_rounding_and_no_more():
    assert run(matrices(4, 200, 200), 40).drift.max() < 1e-14
    assert 1e-9 < run(matrices(4, 200, 200).float(), 40).drift.max() < 1e-5


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1.0, 1e160, 1e300])
def test_prescaling_is_an_exact_power_of_two(size):
    M = matrices(2, 6, 6)
    basis = run(size * M, 4)
    assert torch.equal(
        torch.frexp(basis.scale).mantissa, torch.full((2,), 0.5, dtype=torch.float64)
    )
    assert basis.H.isfinite().all() and basis.H.abs().max() < 100


def test_an_exhausted_space_leaves_zeros_not_noise():
    """Rank one: after two steps everything further is rounding, and counts as zero."""
    u = matrices(1, 9, 1)
    basis = run(u @ u.mT, 5)
    theta, _, _ = basis.ritz()
    assert torch.allclose(theta / basis.scale, u.square().sum((1, 2)))
    assert basis.b.item() == 0 and basis.U.blocks[0][2:5].abs().max() == 0


def test_going_on_with_some_members_changes_nothing():
    M = matrices(5, 12, 12)
    whole, part = run(M, 6), run(M, 3)
    part.keep(torch.tensor([4, 2]))
    for _ in range(3):
        part.step()
    assert torch.allclose(part.H[:, :6, :6], whole.H[[4, 2], :6, :6], atol=1e-12)


def test_a_ritz_triplet_has_no_error_of_its_own():
    """H q = theta p to the last digit at every step, with the small SVD's value; so what J and J'
    add is their rounding.
    """
    basis = run(matrices(40, 60, 60) + torch.eye(60).double(), 1)
    for _ in range(40):
        basis.step()
        H = basis.H[:, : basis.k, : basis.k]
        theta, p, q = basis.ritz()
        off = (H @ q[:, :, None])[:, :, 0] - theta[:, None] * p
        assert (off.norm(dim=1) / theta).max() <= 2.0**-52
        assert torch.allclose(theta, torch.linalg.matrix_norm(H, 2), rtol=1e-14, atol=0)
        drawn = [basis.vectors(i, p[i], q[i]) for i in range(40)]
        right, left, back = (torch.stack(x) for x in zip(*drawn, strict=True))
        scale = basis.scale[:, None]
        forward = basis.J.mv(right) * scale - theta[:, None] * left
        backward = basis.J.rmv(left) * scale - back
        for rest in (forward, backward):
            assert (rest.norm(dim=1) / theta).max() < 8 * 2.0**-52
