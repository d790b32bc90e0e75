"""The uncancelled size of a Jacobian: at least its norm, and right where terms cancel."""

import pytest
import torch

import lipscope as ls
from lipscope.attention import linearization
from lipscope.attention.rounding_scale import norm_above
from lipscope.mean_field.measures import derivative, query_derivative
from tests.cases import KINDS, problem


def norms(J: ls.LinearOperator) -> torch.Tensor:
    return torch.linalg.matrix_norm(J.to_dense(), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_no_smaller_than_the_norm(kind, monkeypatch):
    f, X = problem(kind, 1)
    whole, apart = ls.jacobian(f, X), ls.jacobian(f.heads_apart(), X)
    for J in (whole, apart):
        assert (torch.as_tensor(J.rounding.size) >= norms(J) * (1 - 1e-12)).all()
    # Computed in blocks of rows it is the same number.
    monkeypatch.setattr(linearization, "CACHE", 0)
    assert torch.allclose(
        torch.as_tensor(ls.jacobian(f, X).rounding.size), torch.as_tensor(whole.rounding.size)
    )


@pytest.mark.parametrize("R", [0.5, 1.5, 3.0])
def test_of_a_measure_with_one_light_atom(R):
    """Its norm is that of the light atom, far above what equal weights would give."""
    f = ls.SelfAttention(*(a * torch.eye(1, dtype=torch.float64) for a in (-1.0, 1.0, 1.0)))
    mu = ls.mean_field.two_diracs(f, R).measure
    assert derivative(f, mu).rounding.size >= norms(derivative(f, mu))
    assert (query_derivative(f, mu).rounding.size >= norms(query_derivative(f, mu))).all()


def test_two_heads_that_cancel_keep_the_size_of_both():
    f, X = problem("gaussian", 0)
    twice = (torch.cat([W, W]) for W in (f.Q, f.K, f.V))
    O = torch.cat([torch.eye(f.V.shape[0]), -torch.eye(f.V.shape[0])], dim=1).double()
    J = ls.jacobian(ls.SelfAttention(*twice, O, heads=2), X)
    assert norms(J) == 0 and float(J.rounding.size) >= 2 * norms(ls.jacobian(f, X))


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (1, 4), (32, 384)])
def test_the_bound_on_a_matrix(shape):
    W = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = torch.linalg.matrix_norm(W, 2)
    for scale in (1.0, 1e-200, 1e200):
        found = norm_above(scale * W)
        assert (found >= scale * exact).all()
        assert (found <= scale * exact * min(shape) ** 0.125 * 1.0001).all()
    assert (norm_above(0 * W) == 0).all()
