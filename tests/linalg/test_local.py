"""local_lipschitz and singular_triplets: the two calls users make."""

import pytest
import torch

import lipscope as ls
from lipscope.linalg.local import too_large
from lipscope.linalg.operator import dense_operator
from tests.cases import problem


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_exact_precision_recomputes_in_float64():
    f, X = problem("multi-head, projected", 2)
    single = ls.local_lipschitz(f.to(torch.float32), X.float())
    exact = ls.local_lipschitz(f.to(torch.float32), X.float(), precision="exact", gap=1e-3)
    assert single.confidence == 0 and exact.confidence > 0.99 and exact.upper / exact.lower <= 1.001
    assert (
        single.value == pytest.approx(exact.value, rel=1e-4) and exact.right.dtype == torch.float64
    )


def test_exact_precision_of_a_module_leaves_it_alone():
    model = torch.nn.Linear(4, 4)
    e = ls.local_lipschitz(model, torch.randn(3, 4), precision="exact")
    assert e.value == pytest.approx(
        torch.linalg.matrix_norm(model.weight.detach().double(), 2).item(), rel=1e-12
    )
    assert model.weight.dtype == torch.float32


def test_exact_precision_of_a_lambda_is_refused_with_the_remedy():
    with pytest.raises(ls.UserError, match="convert its tensors and X to float64"):
        ls.local_lipschitz(lambda X: X, torch.randn(3, 4), precision="exact")


def test_unknown_precision():
    with pytest.raises(ls.UserError, match="'native'"):
        ls.local_lipschitz(torch.sin, draw(3, 4), precision="high")


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


def test_estimates_print_their_certificate():
    text = repr(ls.local_lipschitz(*problem("gaussian", 0)))
    assert "confidence 0.999999999" in text and ("converged" in text or "breakdown" in text)


def test_infinity_norm_is_the_largest_row_sum():
    f, X = problem("multi-head, projected", 2)
    dense = ls.jacobian(f, X).to_dense()
    e = ls.local_lipschitz(f, X, norm="inf")
    assert e.value == pytest.approx(dense.abs().sum(dim=1).max().item(), rel=1e-12)
    with pytest.raises(ls.UserError, match="norm must be '2' or 'inf'"):
        ls.local_lipschitz(f, X, norm="1")


def test_too_many_tokens_are_told_how_many_could_fit():
    """30 GiB held and 20 more asked for, of 40: of 1000 tokens no more than 800 have a chance."""
    X = torch.zeros(2, 500, 8)
    said = too_large(
        X, "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has", 30 << 30, 40 << 30
    )
    assert said.startswith(
        "1000 tokens of size 8 need more than the 40 GiB of cpu: fewer than 801 could fit"
    )
    assert "basis='host'" in said
    assert "could fit" not in too_large(X, "no number here", 30 << 30, 40 << 30)
