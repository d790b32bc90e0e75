"""A linear map given by its two products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lipscope._types import UserError

Product = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Compression:
    """J = core . lift', lift with orthonormal columns: J and core share singular values and left vectors."""

    core: LinearOperator
    lift: Product


@dataclass(frozen=True, eq=False)
class LinearOperator:
    """`mv` maps [*in_shape] to [*out_shape], `rmv` is its adjoint; with `batch` = B both act on B members at once.

    condition:  rounding amplification; a product is good to about 8 eps (1 + condition) ||J||; non-finite: overflow.
    worst:      the same without the luck of cancelling errors; bounds are widened by 32 eps (1 + worst).
                Default: condition.
    take:       the operator restricted to some members of the batch, where that is cheaper than the whole.
    compressed: the same operator through fewer input dimensions.
    rough:      a cheaper operator close to this one, good enough to find the singular vectors, not to measure them.
    """

    mv: Product
    rmv: Product
    in_shape: Shape
    out_shape: Shape
    batch: int | None = None
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    condition: Tensor | float = 0.0
    worst: Tensor | float | None = None
    take: Callable[[Tensor], LinearOperator] | None = None
    compressed: Compression | None = None
    rough: LinearOperator | None = None

    @property
    def in_size(self) -> int:
        return math.prod(self.in_shape)

    @property
    def out_size(self) -> int:
        return math.prod(self.out_shape)

    @property
    def leading(self) -> Shape:
        """The batch dimension as a shape: () or (B,)."""
        return () if self.batch is None else (self.batch,)

    @property
    def resolution(self) -> Tensor:
        """Relative accuracy of one product, 8 eps (1 + condition), per member."""
        return 8 * self._amplified(self.condition)

    @property
    def rounding(self) -> Tensor:
        """Stated bound on the relative error of a norm evaluated with these products, 32 eps (1 + worst)."""
        return 32 * self._amplified(self.condition if self.worst is None else self.worst)

    def _amplified(self, factor: Tensor | float) -> Tensor:
        growth = 1 + torch.as_tensor(factor, dtype=torch.float64, device="cpu")
        return (torch.finfo(self.dtype).eps * growth).expand(self.leading)

    @property
    def T(self) -> LinearOperator:
        take = self.take
        return replace(
            self,
            mv=self.rmv,
            rmv=self.mv,
            in_shape=self.out_shape,
            out_shape=self.in_shape,
            take=None if take is None else lambda members: take(members).T,
            compressed=None,
            rough=None,
        )

    def __matmul__(self, other: LinearOperator) -> LinearOperator:
        """The composition self . other."""
        if (self.in_shape, self.batch) != (other.out_shape, other.batch):
            raise UserError(
                f"cannot compose: the outer operator reads {self.leading + self.in_shape}, "
                f"the inner one gives {other.leading + other.out_shape}"
            )
        condition = torch.maximum(torch.as_tensor(self.condition), torch.as_tensor(other.condition))
        worst = torch.maximum(*(torch.as_tensor(x.condition if x.worst is None else x.worst) for x in (self, other)))
        return LinearOperator(
            mv=lambda E: self.mv(other.mv(E)),
            rmv=lambda U: other.rmv(self.rmv(U)),
            in_shape=other.in_shape,
            out_shape=self.out_shape,
            batch=self.batch,
            dtype=self.dtype,
            device=self.device,
            condition=1 + condition,
            worst=1 + worst,
        )

    def __mul__(self, factor: float) -> LinearOperator:
        take, small = self.take, self.compressed
        return replace(
            self,
            mv=lambda E: factor * self.mv(E),
            rmv=lambda U: factor * self.rmv(U),
            take=None if take is None else lambda members: take(members) * factor,
            compressed=None if small is None else Compression(small.core * factor, small.lift),
            rough=None,
        )

    __rmul__ = __mul__

    def to_dense(self) -> Tensor:
        """The matrix [out_size, in_size] (with a leading B for a batch), one product per column."""
        columns = []
        for j in range(self.in_size):
            E = torch.zeros(*self.leading, self.in_size, dtype=self.dtype, device=self.device)
            E[..., j] = 1
            columns.append(self.mv(E.reshape(*self.leading, *self.in_shape)).reshape(*self.leading, -1))
        return torch.stack(columns, dim=-1)


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
        take=(lambda members: dense_operator(M[members])) if M.ndim == 3 else None,
    )
