"""What every operator must satisfy, in one place."""

from __future__ import annotations

import torch
from torch import Tensor

import lipscope as ls
from lipscope.linalg.operator import LinearOperator, Rounding, lengths


def assert_adjoint(J: ls.LinearOperator, seed: int = 0, tol: float = 1e-12) -> None:
    """<J E, U> = <E, J' U> for random E, U, relative to |J E| |U| + |E| |J' U|, per member."""
    g = torch.Generator().manual_seed(seed)
    E = torch.randn(*J.leading, *J.in_shape, generator=g, dtype=torch.float64).to(J.dtype)
    U = torch.randn(*J.leading, *J.out_shape, generator=g, dtype=torch.float64).to(J.dtype)
    JE, JU = J.mv(E), J.rmv(U)
    assert JE.shape == (*J.leading, *J.out_shape) and JU.shape == (*J.leading, *J.in_shape)

    def flat(x: Tensor) -> Tensor:
        return x.reshape(*J.leading, -1)

    left, right = (flat(JE) * flat(U)).sum(-1), (flat(E) * flat(JU)).sum(-1)
    size = flat(JE).norm(dim=-1) * flat(U).norm(dim=-1) + flat(E).norm(dim=-1) * flat(JU).norm(
        dim=-1
    )
    assert ((left - right).abs() <= tol * size).all(), (
        f"adjoint defect {((left - right).abs() / size).max():.1e}"
    )


def assert_matches_dense(J: ls.LinearOperator, dense: Tensor, tol: float = 1e-12) -> None:
    """J is the matrix `dense` and its adjoint the transpose, relative to the matrix norm."""
    size = torch.linalg.matrix_norm(dense, 2).clamp_min(torch.finfo(dense.dtype).tiny)[
        ..., None, None
    ]
    for product, matrix in ((J, dense), (J.T, dense.mT)):
        got = product.to_dense()
        assert got.shape == matrix.shape
        worst = ((got - matrix).abs() / size).max()
        assert worst <= tol, f"differs from the dense matrix by {worst:.1e} of its norm"
    assert_adjoint(J, tol=tol)


def dense_operator(M: Tensor) -> LinearOperator:
    """The operator of a matrix [m, n], or of a batch of matrices [B, m, n]."""
    return LinearOperator(
        mv=lambda E: (M @ E[..., None])[..., 0],
        rmv=lambda U: (M.mT @ U[..., None])[..., 0],
        in_shape=(M.shape[-1],),
        out_shape=(M.shape[-2],),
        batch=M.shape[0] if M.ndim == 3 else None,
        dtype=M.dtype,
        device=M.device,
        # The size is what a product with M sums up.
        rounding=Rounding(size=lengths(M.double().flatten(-2)).cpu()),
        take=(lambda members: dense_operator(M[members])) if M.ndim == 3 else None,
    )
