"""A linear map given by its two products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lipscope._ambient import unaffected
from lipscope._types import UserError

Product = Callable[[Tensor], Tensor]
Pair = tuple[Product, Product]  # with J and with J'
Shape = tuple[int, ...]

MOST_ROUNDING = 0.5
"""Above this relative rounding, first-order error estimates are meaningless."""


class Space:
    """Where vectors live: here in a single process, which holds them whole.

    Every exchange is then the identity. `TokenShards` spreads vectors over several processes and
    documents the exchanges.
    """

    size = 1

    def _same(self, x: Any, dim: int = 0) -> Any:
        return x

    global_shape: Any = _same
    shard: Any = _same
    gather: Any = _same
    sum: Any = _same
    norm: Any = _same
    largest: Any = _same
    smallest: Any = _same
    broadcast: Any = _same

    def rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Tokens at some of the n positions [..., rows]: x [..., tokens, width]. Leading dimensions
        broadcast.
        """
        return x.take_along_dim(index[..., None], dim=-2)


LOCAL = Space()


@dataclass(frozen=True)
class Rounding:
    """How far the products of an operator may be off.

    Attributes:
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
    """

    condition: Tensor | float = 0.0
    worst: Tensor | float | None = None
    size: Tensor | float | None = None
    perturbed: Callable[[int], Pair] | None = None
    compared: Callable[[Tensor, Tensor, int], Tensor] | None = None

    @property
    def pessimistic(self) -> Tensor | float:
        """`worst`, which is `condition` by default."""
        return self.condition if self.worst is None else self.worst

    def each(self, change: Callable[[Tensor], Tensor]) -> Rounding:
        """Apply a change to the three numbers, which have one entry per member."""
        numbers: dict[str, Any] = {
            name: change(torch.as_tensor(x))
            for name in ("condition", "worst", "size")
            if (x := getattr(self, name)) is not None
        }
        return replace(self, **numbers)


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
        rounding: How far products may be off.
        take: The operator restricted to some members, where that is cheaper than the whole.
        compressed: The same operator through fewer input dimensions.
        low_precision: A cheaper operator close to this one, good enough to find the singular
            vectors but not to measure them.
        space: Where vectors live. If several processes share them, products, shapes and vectors
            are those of this process's tokens.

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
    rounding: Rounding = Rounding()
    take: Callable[[Tensor], LinearOperator] | None = None
    compressed: Compression | None = None
    low_precision: LinearOperator | None = None
    space: Space = LOCAL

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
        return math.prod(self.space.global_shape(self.in_shape))

    @property
    def range_size(self) -> int:
        """Number of entries of an output, over all ranks."""
        return math.prod(self.space.global_shape(self.out_shape))

    @property
    def leading(self) -> Shape:
        """The batch dimension as a shape: () or (B,)."""
        return () if self.batch is None else (self.batch,)

    @property
    def resolution(self) -> Tensor:
        """Accuracy of one product relative to `size`, 8 eps (1 + condition), per member."""
        growth = 1 + torch.as_tensor(self.rounding.condition, dtype=torch.float64, device="cpu")
        return 8 * (torch.finfo(self.dtype).eps * growth).expand(self.leading)

    @property
    def stated_rounding(self) -> Tensor:
        """Stated rounding of a norm computed with these products, relative to `size`."""
        stated = self.rounding
        worst = stated.condition if stated.worst is None else stated.worst
        growth = 1 + torch.as_tensor(worst, dtype=torch.float64, device="cpu")
        return 32 * (torch.finfo(self.dtype).eps * growth).expand(self.leading)

    @property
    def is_compared(self) -> bool:
        """Whether rounding is seen in a comparison with float64, not stated."""
        core = self if self.compressed is None else self.compressed.core
        return core.rounding.compared is not None

    def product(self, product: Product, x: Tensor, shape: Shape, scale: Tensor) -> Tensor:
        """A product with J or J' of vectors x [B, N], flat, times the scale of each member."""
        y = product(x.reshape((*self.leading, *shape))).reshape(len(x), -1)
        return y * scale.to(y)[:, None]

    def rounding_scale(self, norm: Tensor) -> Tensor:
        """`size` per member; the norm of J, where nothing else is stated."""
        if self.rounding.size is None:
            return norm
        return torch.as_tensor(self.rounding.size, dtype=torch.float64, device="cpu").expand(
            self.leading or (1,)
        )

    def error(self, norm: Tensor) -> Tensor:
        """Absolute error bound on a computed norm of J, per member; infinite if unknown."""
        rounding = self.stated_rounding.reshape(norm.shape)
        size = self.rounding_scale(norm)
        # A weight that is off by a factor e^rounding is off by the rounding itself only while that
        # is small.
        known = rounding < MOST_ROUNDING
        # Near the smallest numbers of a dtype underflow takes digits that eps does not account for.
        info = torch.finfo(self.dtype)
        known &= (size == 0) | (size >= info.tiny / info.eps)
        return torch.where(known, rounding * size, torch.inf)

    def changed(self, change: Callable[[Pair], Pair], **stated: Any) -> LinearOperator:
        """An operator with changed products, and perturbed products changed in the same way.

        `stated` replaces fields of `rounding`. Nothing is known of members, of fewer dimensions, of
        low precision, or of a comparison with float64.
        """
        mv, rmv = change((self.mv, self.rmv))
        perturbed = self.rounding.perturbed
        rounding = replace(
            self.rounding,
            perturbed=None if perturbed is None else lambda i: change(perturbed(i)),
            **{"compared": None, **stated},
        )
        lost: dict[str, Any] = {"take": None, "compressed": None, "low_precision": None}
        return replace(self, mv=mv, rmv=rmv, rounding=rounding, **lost)

    @property
    def T(self) -> LinearOperator:
        take = self.take
        # Only products with J were compared with float64; of J' nothing is known then.
        size = math.inf if self.is_compared else self.rounding.size
        return replace(
            self.changed(lambda pair: (pair[1], pair[0]), size=size),
            in_shape=self.out_shape,
            out_shape=self.in_shape,
            take=None if take is None else lambda members: take(members).T,
        )

    @unaffected
    def __matmul__(self, other: LinearOperator) -> LinearOperator:
        """The composition self . other."""
        if (self.in_shape, self.batch) != (other.out_shape, other.batch):
            raise UserError(
                f"cannot compose: the outer operator reads {self.leading + self.in_shape}, "
                f"the inner one gives {other.leading + other.out_shape}"
            )
        sizes = [_size(self), _size(other)]
        # 0 only where one of the two is, not where the product underflows.
        least = (sizes[0] * sizes[1]).clamp_min(torch.finfo(torch.float64).tiny)
        size = torch.where((sizes[0] > 0) & (sizes[1] > 0), least, 0.0)
        return self._joined(
            other,
            lambda outer, inner: (
                lambda E: outer[0](inner[0](E)),
                lambda U: inner[1](outer[1](U)),
            ),
            lambda a, b: 1 + (a + b),
            size,
        )

    @unaffected
    def __add__(self, other: LinearOperator) -> LinearOperator:
        """The sum of two operators with the same shapes."""
        if not isinstance(other, LinearOperator):
            return NotImplemented
        shapes = [(J.in_shape, J.out_shape, J.batch) for J in (self, other)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"cannot add: one operator maps {self.leading + self.in_shape} to "
                f"{self.leading + self.out_shape}, the other {other.leading + other.in_shape} to "
                f"{other.leading + other.out_shape}"
            )
        return self._joined(
            other,
            lambda one, two: (
                lambda E: one[0](E) + two[0](E),
                lambda U: one[1](U) + two[1](U),
            ),
            torch.maximum,
            _size(self) + _size(other),
        )

    def _joined(
        self,
        other: LinearOperator,
        join: Callable[[Pair, Pair], Pair],
        combine: Callable[[Tensor, Tensor], Tensor],
        size: Tensor,
    ) -> LinearOperator:
        """The operator whose products, and perturbed products, are those of both joined."""
        mv, rmv = join((self.mv, self.rmv), (other.mv, other.rmv))
        parts = (self, other)

        measured = any(J.rounding.perturbed is not None for J in parts)

        def perturbed(i: int) -> Pair:
            moved = (J.rounding.perturbed for J in parts)
            return join(
                *((J.mv, J.rmv) if p is None else p(i) for J, p in zip(parts, moved, strict=True))
            )

        def both(numbers: Iterable[Tensor | float]) -> Tensor:
            return combine(*(torch.as_tensor(x, dtype=torch.float64) for x in numbers))

        return LinearOperator(
            mv=mv,
            rmv=rmv,
            in_shape=other.in_shape,
            out_shape=self.out_shape,
            batch=self.batch,
            dtype=self.dtype,
            device=self.device,
            rounding=Rounding(
                condition=both(J.rounding.condition for J in parts),
                worst=both(J.rounding.pessimistic for J in parts),
                size=size,
                perturbed=perturbed if measured else None,
            ),
            space=self.space,
        )

    @unaffected
    def __mul__(self, factor: float) -> LinearOperator:
        take = self.take
        small = self.compressed
        size = self.rounding.size
        compared = self.rounding.compared

        def scaled(product: Product) -> Product:
            return lambda x: factor * product(x)

        def still_compared(v: Tensor, w: Tensor, seed: int) -> Tensor:
            assert compared is not None
            return abs(factor) * compared(v, w / factor if factor else w, seed)

        return replace(
            self.changed(
                lambda pair: (scaled(pair[0]), scaled(pair[1])),
                size=None if size is None else abs(factor) * torch.as_tensor(size),
                compared=None if compared is None else still_compared,
            ),
            take=None if take is None else lambda members: take(members) * factor,
            compressed=None if small is None else Compression(small.core * factor, small.lift),
        )

    __rmul__ = __mul__

    @unaffected
    def to_dense(self) -> Tensor:
        """The matrix [out_size, in_size] (with a leading B for a batch), one product per column."""
        columns = []
        for j in range(self.in_size):
            E = torch.zeros(*self.leading, self.in_size, dtype=self.dtype, device=self.device)
            E[..., j] = 1
            column = self.mv(E.reshape(*self.leading, *self.in_shape))
            columns.append(column.reshape(*self.leading, -1))
        return torch.stack(columns, dim=-1)


def _size(J: LinearOperator) -> Tensor:
    """What rounding in J is relative to; its norm, which has to be found, if nothing is stated."""
    if J.is_compared:
        return torch.tensor(math.inf, dtype=torch.float64)
    if J.rounding.size is not None:
        return torch.as_tensor(J.rounding.size, dtype=torch.float64)
    from lipscope.linalg.spectral import Solver, spectral_norm  # the solver is built on operators

    e = spectral_norm(J, tol=0.1, solver=Solver(seed=0, failure=1e-12))
    value = torch.as_tensor(e.value)
    upper = torch.as_tensor(e.upper)
    return torch.where(upper.isfinite(), upper, 2 * value).double()


def steady(J: LinearOperator) -> LinearOperator:
    """J with products that do not depend on the caller's settings of torch."""
    return replace(J, mv=unaffected(J.mv), rmv=unaffected(J.rmv))


def of_order_one(x: Tensor, dims: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x divided by its largest entry over `dims`, and that entry: no power under- or overflows."""
    largest = x.detach().abs().amax(dim=dims, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return x / largest, largest


def lengths(x: Tensor) -> Tensor:
    """Euclidean lengths of vectors x [..., N]; no square overflows or vanishes."""
    x, largest = of_order_one(x, -1)
    return x.norm(dim=-1) * largest[..., 0]
