"""Operators: products, transposes, compositions."""

import pytest
import torch

import lipscope as ls
from tests.checks import assert_adjoint, assert_matches_dense, dense_operator


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 4, 3)])
def test_dense_operator_is_its_matrix(shape):
    M = random(*shape)
    assert_matches_dense(dense_operator(M), M)
    assert torch.equal(dense_operator(M).T.T.to_dense(), M)


def test_composition_and_scaling():
    A, B = random(3, 4), random(4, 5, seed=1)
    assert_matches_dense(dense_operator(A) @ dense_operator(B), A @ B)
    assert_matches_dense(2.5 * dense_operator(A), 2.5 * A)


def test_composition_refuses_shapes_that_do_not_fit():
    with pytest.raises(ls.UserError, match=r"reads \(4,\), the inner one gives \(5,\)"):
        dense_operator(random(3, 4)) @ dense_operator(random(5, 2))


def test_the_adjoint_check_can_fail():
    M = random(3, 3)
    wrong = ls.LinearOperator(
        mv=lambda x: M @ x, rmv=lambda x: M @ x, in_shape=(3,), out_shape=(3,)
    )
    with pytest.raises(AssertionError, match="adjoint"):
        assert_adjoint(wrong)


def test_taking_members_of_a_batch():
    M = random(5, 3, 4)
    J = dense_operator(M)
    members = torch.tensor([3, 1])
    assert J.take is not None
    assert_matches_dense(J.take(members), M[members])
    assert_matches_dense(J.T.take(members), M[members].mT)


def test_a_sum_of_operators():
    A, B = (
        torch.randn(4, 3, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        for i in (0, 1)
    )
    J = dense_operator(A) + dense_operator(B)
    assert torch.allclose(J.to_dense(), A + B)
    assert_adjoint(J)
    assert float(J.rounding.size) == pytest.approx(float(A.norm() + B.norm()))
    with pytest.raises(ls.UserError, match="cannot add"):
        dense_operator(A) + dense_operator(B.T)


def test_the_size_of_a_product_is_what_its_parts_sum_up():
    """A rotation by a right angle and its inverse, each through an operator that states no size."""
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    J = ls.LinearOperator(lambda x: turn @ x, lambda x: turn.T @ x, (2,), (2,))
    assert 1 <= float((J @ J.T).rounding.size) <= 4
    assert float((3 * dense_operator(turn)).rounding.size) == pytest.approx(3 * 2**0.5)


def test_an_operator_shows_its_shapes_and_how_many_members_it_has():
    one, many = dense_operator(random(3, 5)), dense_operator(random(7, 3, 5))
    assert repr(one) == "LinearOperator([5] -> [3], float64)"
    assert repr(many) == "LinearOperator(7 of [5] -> [3], float64)"
