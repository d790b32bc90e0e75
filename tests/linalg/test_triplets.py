"""singular_triplets, repeated values included."""

import pytest
import torch

import lipscope as ls
from tests.checks import dense_operator


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "M",
    [draw(20, 30), torch.eye(6).double(), torch.diag(torch.tensor([3.0, 3, 3, 2, 2, 1])).double()],
)
def test_leading_triplets_with_repetitions(M):
    exact = torch.linalg.svdvals(M)[:4]
    found = ls.singular_triplets(dense_operator(M), 4, tol=1e-9)
    assert torch.allclose(
        torch.tensor([e.value for e in found], dtype=torch.float64), exact, rtol=1e-10
    )
    V = torch.stack([e.right for e in found])
    assert (V @ V.T - torch.eye(4)).abs().max() < 1e-8


def test_leading_triplets_of_a_batch():
    M = draw(3, 12, 9)
    found = ls.singular_triplets(dense_operator(M), 3, tol=1e-9)
    assert torch.allclose(
        torch.stack([e.value for e in found], dim=1), torch.linalg.svdvals(M)[:, :3], rtol=1e-10
    )


@pytest.mark.parametrize("k", [0, 7])
def test_number_of_triplets_is_checked(k):
    with pytest.raises(ls.UserError, match="between 1 and 6"):
        ls.singular_triplets(dense_operator(torch.eye(6)), k)


def spread(rank: int, seed: int = 0) -> torch.Tensor:
    return draw(6, rank, seed=seed) @ draw(rank, 5, seed=seed + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "M",
    [
        torch.ones(6, 5),
        torch.zeros(6, 5),
        torch.zeros(5, 6),
        spread(2),
        1e30 * spread(3),
        torch.diag(torch.tensor([1.0, 1e-4, 1e-12, 0, 0])),
        torch.stack(
            [spread(2), torch.ones(6, 5).double(), torch.zeros(6, 5), spread(4), draw(6, 5)]
        ),
    ],
    ids=["ones", "zeros", "wide zeros", "rank 2", "large", "graded", "batch"],
)
def test_vectors_past_the_rank_are_orthonormal_and_belong_to_zero(M, dtype):
    M = M.to(dtype)
    k, eps = 5, torch.finfo(dtype).eps
    found = ls.singular_triplets(dense_operator(M), k, solver=ls.Solver(seed=0))
    U, V = (torch.stack([getattr(e, side) for e in found], dim=-1) for side in ("left", "right"))
    for vectors in (U, V):
        assert vectors.dtype == dtype
        gram = vectors.mT.double() @ vectors.double()
        assert (gram - torch.eye(k)).abs().max() < 8 * eps
    # J V = U diag(sigma) with the exact values: past the rank both vectors are in null spaces.
    exact = torch.linalg.svdvals(M.double())
    size = exact.amax(dim=-1, keepdim=True)[..., None]
    tolerance = (1e-7 if dtype == torch.float64 else 1e-5) * size
    assert ((M.double() @ V.double() - U.double() * exact[..., None, :]).abs() <= tolerance).all()
    assert (
        (M.mT.double() @ U.double() - V.double() * exact[..., None, :]).abs() <= tolerance
    ).all()
    for i, e in enumerate(found):
        value, lower, upper = (
            torch.as_tensor(x, dtype=torch.float64) for x in (e.value, e.lower, e.upper)
        )
        assert ((value - exact[..., i]).abs() <= tolerance[..., 0, 0]).all()
        assert (lower <= exact[..., i] + 1e-30).all() and (exact[..., i] <= upper * (1 + eps)).all()


def test_a_member_that_is_not_finite_leaves_the_others_as_they_are():
    M = torch.stack([torch.ones(4, 4), torch.full((4, 4), torch.nan)]).double()
    _, second = ls.singular_triplets(dense_operator(M), 2)
    assert second.value[1].isnan() and second.status[1] == ls.Status.NON_FINITE
    assert second.value[0] < 1e-15 and second.left[0].norm() == pytest.approx(1)
