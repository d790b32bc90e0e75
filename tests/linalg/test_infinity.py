"""The largest absolute row sum against dense Jacobians."""

import math

import pytest
import torch

import lipscope as ls
from lipscope.linalg import local
from lipscope.linalg.operator import dense_operator
from tests.cases import KINDS, problem
from tests.naive import dense_jacobian


@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_dense_jacobian(kind: str):
    f, X = problem(kind, 3)
    J = dense_jacobian(f, X)
    exact = J.abs().sum(dim=1).max().item()
    e = local.infinity_norm(ls.jacobian(f, X))
    assert e.status is ls.Status.CONVERGED and e.confidence == 1.0
    assert e.lower <= exact <= e.upper
    assert abs(e.value - exact) <= 1e-9 * exact
    assert e.right.abs().eq(1).all() and e.left.sum() == 1
    assert (ls.jacobian(f, X).mv(e.right) * e.left).sum().item() == pytest.approx(exact, rel=1e-9)


def test_members_of_a_batch_are_apart(monkeypatch):
    monkeypatch.setattr(local, "BLOCK", 100)  # several blocks of rows
    f, X = problem("causal", 1)
    batch = torch.stack([X, 2 * X, X.flip(0)])
    e = local.infinity_norm(ls.jacobian(f, batch))
    alone = [local.infinity_norm(ls.jacobian(f, x)).value for x in batch]
    assert e.value.tolist() == pytest.approx(alone, rel=1e-12)


def test_a_map_without_closed_form():
    torch.manual_seed(0)
    W = torch.randn(5, 3, dtype=torch.float64)
    X = torch.randn(2, 3, dtype=torch.float64)
    e = local.infinity_norm(ls.jacobian(lambda x: torch.tanh(x @ W.T), X))
    J = torch.autograd.functional.jacobian(lambda x: torch.tanh(x @ W.T), X).reshape(10, 6)
    assert e.value == pytest.approx(J.abs().sum(1).max().item(), rel=1e-12)


def test_a_derivative_that_is_not_finite_is_said_so():
    M = torch.eye(3, dtype=torch.float64)
    M[1, 2] = math.nan
    e = local.infinity_norm(dense_operator(M))
    assert e.status is ls.Status.NON_FINITE and e.upper == math.inf and e.lower == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cancelling_heads_in_low_precision_are_taken_in_float64(dtype):
    g = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(3, 3, generator=g).to(dtype) for _ in range(3))
    near = (Q + 1e-2 * torch.randn(3, 3, generator=g)).to(dtype)
    O = torch.cat([torch.eye(3), -torch.eye(3)], dim=1).to(dtype)
    f = ls.SelfAttention(torch.cat([Q, near]), torch.cat([K, K]), torch.cat([V, V]), O, heads=2)
    X = torch.randn(5, 3, generator=g).to(dtype)
    truth = dense_jacobian(f.double(), X.double()).abs().sum(dim=1).max().item()
    e = ls.local_lipschitz(f, X, norm="inf")
    assert e.lower <= truth <= e.upper <= e.lower * (1 + 1e-8) and e.right.dtype == dtype
    # An operator in low precision alone has no statement about its rounding.
    e = local.infinity_norm(ls.jacobian(f, X))
    assert e.lower == 0 and e.upper == math.inf and e.confidence == 0 and "float64" in e.note


def test_every_row_near_the_top_is_measured():
    """The second row is the largest, and loses more by rounding than the first one leads by."""
    y = torch.tensor([[1.2345678]], dtype=torch.float64)
    below = y.item() * (1 - 2e-9)

    def f(x):
        return torch.cat([2 * below * x, ((x + 1e9) - 1e9) ** 2], dim=1)

    e = ls.local_lipschitz(f, y, norm="inf")
    assert e.lower <= 2 * y.item() <= e.upper
