"""singular_triplets, repeated values included."""

import pytest
import torch

import lipscope as ls
from lipscope.linalg.operator import dense_operator


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
