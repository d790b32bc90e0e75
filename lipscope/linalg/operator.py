"""A linear map given by its two products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lipscope._ambient import unaffected
from lipscope._types import UserError
from lipscope.linalg.ranks import ALONE, Ranks

Product = Callable[[Tensor], Tensor]
Pair = tuple[Product, Product]  # with J and with J'
Shape = tuple[int, ...]

MOST_ROUNDING = 0.5
"""Above this relative rounding, first-order error estimates are meaningless."""


@dataclass(frozen=True)
class Compression:
    """J = core . lift', lift with orthonormal columns: J and core share singular values and left
    vectors.
    """

    core: LinearOperator
    lift: Product


@dataclass(frozen=True, eq=False)
class LinearOperator:
    """A linear map J given by its two products, with a statement about their rounding.

    ``A @ B`` composes operators, ``A + B`` adds them, ``2.0 * A`` scales, ``A.T`` is the adjoint.

    Attributes:
        mv: Maps tensors of shape `in_shape` to `out_shape`; with a batch, B members at once.
        rmv: The adjoint of `mv`.
        in_shape: Shape of an input, without the batch dimension.
        out_shape: Shape of an output, without the batch dimension.
        batch: Number of members B, or None for a single operator.
        dtype: Type of inputs and outputs.
        device: Where they live.
        condition: Rounding amplification: a product is typically off by ``8 eps (1 + condition)``
            times `size`. Not finite where something overflows.
        worst: The same without the luck of cancelling errors: bounds are widened by
            ``32 eps (1 + worst)`` times `size`. Default: `condition`.
        size: What the terms that make up J would add up to if none of them cancelled, a number of
            at least ||J||_2; rounding is relative to it. None: ||J||_2 itself.
        perturbed: ``perturbed(i)`` gives the products once more, with every operation behind them
            moved by units in the last place; for maps whose rounding can only be measured.
        compared: ``compared(v, J v, seed)`` is how far a product in low precision is from float64,
            per member, by rows drawn with that seed; it takes the place of what `worst` and `size`
            state.
        take: The operator restricted to some members, where that is cheaper than the whole.
        compressed: The same operator through fewer input dimensions.
        rough: A cheaper operator close to this one, good enough to find the singular vectors but
            not to measure them.
        ranks: The processes that share the operator. With more than one, products, shapes and
            vectors are those of this process's tokens.

    Example:
        >>> import torch, lipscope as ls
        >>> A = torch.tensor([[0.0, 2.0], [1.0, 0.0]], dtype=torch.float64)
        >>> J = ls.LinearOperator(lambda x: A @ x, lambda u: A.T @ u, in_shape=(2,), out_shape=(2,))
        >>> (J @ J).to_dense()
        tensor([[2., 0.],
                [0., 2.]], dtype=torch.float64)
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
    size: Tensor | float | None = None
    perturbed: Callable[[int], Pair] | None = None
    compared: Callable[[Tensor, Tensor, int], Tensor] | None = None
    take: Callable[[Tensor], LinearOperator] | None = None
    compressed: Compression | None = None
    rough: LinearOperator | None = None
    ranks: Ranks = ALONE

    def __repr__(self) -> str:
        each = "" if self.batch is None else f"{self.batch} of "
        shapes = f"{list(self.in_shape)} -> {list(self.out_shape)}"
        return f"LinearOperator({each}{shapes}, {str(self.dtype).removeprefix('torch.')})"

    @property
    def in_size(self) -> int:
        return math.prod(self.in_shape)

    @property
    def out_size(self) -> int:
        return math.prod(self.out_shape)

    @property
    def domain_size(self) -> int:
        """Number of entries of an input, over all ranks."""
        return math.prod(self.ranks.whole(self.in_shape))

    @property
    def range_size(self) -> int:
        """Number of entries of an output, over all ranks."""
        return math.prod(self.ranks.whole(self.out_shape))

    @property
    def leading(self) -> Shape:
        """The batch dimension as a shape: () or (B,)."""
        return () if self.batch is None else (self.batch,)

    @property
    def resolution(self) -> Tensor:
        """Accuracy of one product relative to `size`, 8 eps (1 + condition), per member."""
        return 8 * self._amplified(self.condition)

    @property
    def rounding(self) -> Tensor:
        """Stated rounding of a norm computed with these products, relative to `size`."""
        return 32 * self._amplified(self.condition if self.worst is None else self.worst)

    @property
    def _states(self) -> bool:
        """Whether rounding is stated by `worst` and `size`, not seen in a comparison."""
        core = self if self.compressed is None else self.compressed.core
        return core.compared is None

    def uncancelled(self, norm: Tensor) -> Tensor:
        """`size` per member; the norm of J, where nothing else is stated."""
        if self.size is None:
            return norm
        return torch.as_tensor(self.size, dtype=torch.float64, device="cpu").expand(
            self.leading or (1,)
        )

    def error(self, norm: Tensor) -> Tensor:
        """How far a computed norm of J may be off, per member: absolute; infinite where nothing can
        be said.
        """
        rounding = self.rounding.reshape(norm.shape)
        size = self.uncancelled(norm)
        # A weight that is off by a factor e^rounding is off by the rounding itself only while that
        # is small.
        known = rounding < MOST_ROUNDING
        # Near the smallest numbers of a dtype underflow takes digits that eps does not account for.
        info = torch.finfo(self.dtype)
        known &= (size == 0) | (size >= info.tiny / info.eps)
        return torch.where(known, rounding * size, torch.inf)

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
            perturbed=_changed(self.perturbed, lambda pair: (pair[1], pair[0])),
            # Only products with J were compared with float64; of J' nothing is known then.
            size=self.size if self._states else math.inf,
            compared=None,
            take=None if take is None else lambda members: take(members).T,
            compressed=None,
            rough=None,
        )

    @unaffected
    def __matmul__(self, other: LinearOperator) -> LinearOperator:
        """The composition self . other."""
        if (self.in_shape, self.batch) != (other.out_shape, other.batch):
            raise UserError(
                f"cannot compose: the outer operator reads {self.leading + self.in_shape}, "
                f"the inner one gives {other.leading + other.out_shape}"
            )
        condition, worst = _both(self, other, torch.add)
        return _made_of(
            self,
            other,
            _one_after_the_other,
            in_shape=other.in_shape,
            out_shape=self.out_shape,
            condition=1 + condition,
            worst=1 + worst,
            size=_product_size(_size(self), _size(other)),
        )

    @unaffected
    def __add__(self, other: LinearOperator) -> LinearOperator:
        """The sum of two operators with the same shapes."""
        if not isinstance(other, LinearOperator):
            return NotImplemented
        if (self.in_shape, self.out_shape, self.batch) != (
            other.in_shape,
            other.out_shape,
            other.batch,
        ):
            raise UserError(
                f"cannot add: one operator maps {self.leading + self.in_shape} to "
                f"{self.leading + self.out_shape}, the other {other.leading + other.in_shape} to "
                f"{other.leading + other.out_shape}"
            )
        condition, worst = _both(self, other, torch.maximum)
        return _made_of(
            self,
            other,
            _side_by_side,
            in_shape=self.in_shape,
            out_shape=self.out_shape,
            condition=condition,
            worst=worst,
            size=_size(self) + _size(other),
        )

    @unaffected
    def __mul__(self, factor: float) -> LinearOperator:
        take = self.take
        small = self.compressed
        compared = self.compared

        def scaled(product: Product) -> Product:
            return lambda x: factor * product(x)

        return replace(
            self,
            mv=scaled(self.mv),
            rmv=scaled(self.rmv),
            size=None if self.size is None else abs(factor) * torch.as_tensor(self.size),
            perturbed=_changed(self.perturbed, lambda pair: (scaled(pair[0]), scaled(pair[1]))),
            compared=None
            if compared is None
            else lambda v, w, seed: abs(factor) * compared(v, w / factor if factor else w, seed),
            take=None if take is None else lambda members: take(members) * factor,
            compressed=None if small is None else Compression(small.core * factor, small.lift),
            rough=None,
        )

    __rmul__ = __mul__

    @unaffected
    def to_dense(self) -> Tensor:
        """The matrix [out_size, in_size] (with a leading B for a batch), one product per column."""
        columns = []
        for j in range(self.in_size):
            E = torch.zeros(*self.leading, self.in_size, dtype=self.dtype, device=self.device)
            E[..., j] = 1
            columns.append(
                self.mv(E.reshape(*self.leading, *self.in_shape)).reshape(*self.leading, -1)
            )
        return torch.stack(columns, dim=-1)


def _one_after_the_other(outer: Pair, inner: Pair) -> Pair:
    return lambda E: outer[0](inner[0](E)), lambda U: inner[1](outer[1](U))


def _side_by_side(one: Pair, other: Pair) -> Pair:
    return lambda E: one[0](E) + other[0](E), lambda U: one[1](U) + other[1](U)


def _made_of(
    A: LinearOperator, B: LinearOperator, join: Callable[[Pair, Pair], Pair], **stated: Any
) -> LinearOperator:
    """The operator whose products, and perturbed products, are those of A and B joined."""
    mv, rmv = join((A.mv, A.rmv), (B.mv, B.rmv))
    return LinearOperator(
        mv=mv,
        rmv=rmv,
        batch=A.batch,
        dtype=A.dtype,
        device=A.device,
        perturbed=_joined(A, B, join),
        ranks=A.ranks,
        **stated,
    )


def _both(
    A: LinearOperator, B: LinearOperator, combine: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """condition and worst of an operator made of A and B."""
    typical = (torch.as_tensor(J.condition, dtype=torch.float64) for J in (A, B))
    worst = (
        torch.as_tensor(J.condition if J.worst is None else J.worst, dtype=torch.float64)
        for J in (A, B)
    )
    return combine(*typical), combine(*worst)


def _size(J: LinearOperator) -> Tensor:
    """What rounding in J is relative to; where nothing is stated that is its norm, and it has to be
    found.
    """
    if not J._states:
        return torch.tensor(math.inf, dtype=torch.float64)
    if J.size is not None:
        return torch.as_tensor(J.size, dtype=torch.float64)
    from lipscope.linalg.spectral import Solver, spectral_norm  # the solver is built on operators

    e = spectral_norm(J, tol=0.1, solver=Solver(seed=0, failure=1e-12))
    value = torch.as_tensor(e.value)
    upper = torch.as_tensor(e.upper)
    return torch.where(upper.isfinite(), upper, 2 * value).double()


def _product_size(a: Tensor, b: Tensor) -> Tensor:
    """a b, which is 0 only where a or b is, not where it underflows."""
    return torch.where((a > 0) & (b > 0), (a * b).clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def _changed(
    perturbed: Callable[[int], Pair] | None, change: Callable[[Pair], Pair]
) -> Callable[[int], Pair] | None:
    return None if perturbed is None else lambda i: change(perturbed(i))


def _joined(
    A: LinearOperator, B: LinearOperator, join: Callable[[Pair, Pair], Pair]
) -> Callable[[int], Pair] | None:
    """The perturbed products of an operator made of A and B, where either has any."""
    if A.perturbed is None and B.perturbed is None:
        return None

    def pair(J: LinearOperator, i: int) -> Pair:
        return (J.mv, J.rmv) if J.perturbed is None else J.perturbed(i)

    return lambda i: join(pair(A, i), pair(B, i))


def steady(J: LinearOperator) -> LinearOperator:
    """J with products that do not depend on the caller's settings of torch."""
    return replace(J, mv=unaffected(J.mv), rmv=unaffected(J.rmv))


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
        size=lengths(M.double().flatten(-2)).cpu(),  # what a product with M sums up
        take=(lambda members: dense_operator(M[members])) if M.ndim == 3 else None,
    )


def lengths(x: Tensor) -> Tensor:
    """Euclidean lengths of vectors x [..., N], scaled so that no square overflows or vanishes."""
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    return (x / largest).norm(dim=-1) * largest[..., 0]
