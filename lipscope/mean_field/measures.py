"""A probability measure carried by finitely many weighted tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.linalg.differentiate import check_one_device, check_tensor
from lipscope.linalg.estimate import Estimate
from lipscope.linalg.operator import LinearOperator
from lipscope.linalg.spectral import Solver


@dataclass(frozen=True, eq=False)
class DiscreteMeasure(Displayed):
    """A probability measure with finitely many atoms, `mu = sum_i w_i delta_{x_i}`.

    Points listed twice are two atoms that can move apart; `merged` joins them.

    Args:
        points: Atoms, shape `[n, d]`.
        weights: Their masses, shape `[n]`, positive and summing to 1.
        positions: If given, shape `[n]` with entries in `[0, 1]`. The measure then lives on
            `[0, 1] x R^d`, and causal attention applies: `(s, x)` sees `(t, y)` if `t <= s`.

    Raises:
        UserError: If shapes or dtypes do not fit, or the weights are not a probability.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> points = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> mu = ls.mean_field.DiscreteMeasure(points, torch.tensor([0.25, 0.75]))
        >>> len(mu), mu.radius
        (2, 5.0)
    """

    points: Tensor
    weights: Tensor
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        _check_points(self.points)
        _check_weights(self.weights, self.points)
        if self.positions is not None:
            _check_positions(self.positions, self.points)
        check_one_device("points", self.points, weights=self.weights, positions=self.positions)

    @staticmethod
    def uniform(X: Tensor, causal: bool = False) -> DiscreteMeasure:
        """Return the measure of the n tokens of `X` with weights 1/n.

        Args:
            X: Tokens of shape `[n, d]`.
            causal: Whether to put token i at position i/n, which makes causal attention on the
                measure the same as on the tokens.
        """
        _check_points(X)
        n = X.shape[0]
        # Always float64: in bfloat16 300 positions have ties, and tokens that tie see each other.
        positions = (
            torch.arange(1, n + 1, dtype=torch.float64, device=X.device) / n if causal else None
        )
        return DiscreteMeasure(
            X, torch.full((n,), 1 / n, dtype=X.dtype, device=X.device), positions
        )

    def __len__(self) -> int:
        return self.points.shape[0]

    @property
    def radius(self) -> float:
        """The largest norm of an atom."""
        return self.points.norm(dim=1).max().item()

    @property
    def roots(self) -> Tensor:
        """sqrt(w_i) as a column: the norm of a field xi in L2(mu) is that of roots * xi."""
        return self.weights.sqrt()[:, None]

    def double(self) -> DiscreteMeasure:
        """Return the measure in float64, with the weights normalised again."""
        weights = self.weights.double()
        s = None if self.positions is None else self.positions.double()
        return DiscreteMeasure(self.points.double(), weights / weights.sum(), s)

    def moved(self, field: Tensor) -> DiscreteMeasure:
        """Return the measure with its atoms moved by `field` [n, d]; [1, d] moves all alike."""
        n, d = self.points.shape
        if tuple(field.shape) not in ((n, d), (1, d)):
            raise UserError(
                f"field must have the shape {(n, d)} of the points, got {tuple(field.shape)}"
            )
        return replace(self, points=self.points + field)

    def split(self, copies: int) -> DiscreteMeasure:
        """Return the same measure with each atom as `copies` equal atoms, one after the other."""
        if not isinstance(copies, int) or copies < 1:
            raise UserError(f"copies must be a whole number, at least 1, got {copies!r}")
        s = None if self.positions is None else self.positions.repeat_interleave(copies)
        weights = (self.weights / copies).repeat_interleave(copies)
        return DiscreteMeasure(self.points.repeat_interleave(copies, dim=0), weights, s)

    def merged(self) -> DiscreteMeasure:
        """Return the same measure with coinciding atoms joined, in order of first appearance."""
        # Adding 0.0 turns -0.0 into 0.0: they are equal, but `unique` tells them apart.
        rows = self.points.detach() + 0.0
        if self.positions is not None:
            rows = torch.cat([self.positions[:, None] + 0.0, rows], dim=1)
        distinct, owner = torch.unique(rows, dim=0, return_inverse=True)
        if len(distinct) == len(self):
            return self
        index = torch.arange(len(self), device=owner.device)
        first = torch.full((len(distinct),), len(self), device=owner.device).scatter_reduce(
            0, owner, index, "amin"
        )
        weights = self.weights.new_zeros(len(distinct)).index_add(0, owner, self.weights)
        order = first.argsort()
        kept = first[order]
        s = None if self.positions is None else self.positions[kept]
        return DiscreteMeasure(self.points[kept], weights[order], s)

    def jacobian_of(self, f: Any) -> LinearOperator:
        """Return `mean_field.derivative(f, self)`."""
        from lipscope.mean_field.attention_on_measures import derivative  # built on measures

        return derivative(f, self)

    def split_constant_of(
        self, f: Any, tol: float, gap: float | None, solver: Solver | None
    ) -> Estimate:
        """Return the constant of `f` at this measure if copies of a token may move apart."""
        from lipscope.mean_field.duplication import split_estimate, splitting  # built on measures

        return split_estimate(splitting(f, self, tol, gap=gap, solver=solver))

    def index_of(self, point: Tensor, position: Tensor | None = None) -> int:
        """Return the index of the first atom at this point (and position)."""
        same = (self.points == point).all(dim=1)
        if position is not None and self.positions is not None:
            same &= self.positions == position
        return int(torch.nonzero(same)[0])


def as_measure(mu: DiscreteMeasure | Tensor, causal: bool = False) -> DiscreteMeasure:
    """Tokens X [n, d] as a measure with weights 1/n; a measure is returned as it is."""
    return mu if isinstance(mu, DiscreteMeasure) else DiscreteMeasure.uniform(mu, causal)


def check_measure(mu: object) -> None:
    if not isinstance(mu, DiscreteMeasure):
        raise UserError(
            f"expected a DiscreteMeasure, got {type(mu).__name__}; "
            "DiscreteMeasure.uniform(X) makes one of tokens X"
        )


def _check_points(points: Tensor) -> None:
    if not isinstance(points, Tensor) or points.ndim != 2:
        got = tuple(points.shape) if isinstance(points, Tensor) else type(points).__name__
        raise UserError(f"points must be a tensor [n, d], one row per atom, got {got}")
    if points.numel() == 0:
        raise UserError(
            f"the measure is empty (points have shape {tuple(points.shape)}); "
            "it needs at least one atom"
        )
    check_tensor("points", points)


def _check_one_each(name: str, x: Tensor, points: Tensor) -> None:
    if not isinstance(x, Tensor) or x.shape != points.shape[:1]:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise UserError(f"{name} must be a tensor [{points.shape[0]}], one per point, got {got}")
    check_tensor(name, x)


def _check_weights(weights: Tensor, points: Tensor) -> None:
    _check_one_each("weights", weights, points)
    if weights.dtype != points.dtype:
        raise UserError(
            f"weights are {weights.dtype} and points are {points.dtype}; give both one dtype"
        )
    bad = weights <= 0
    if bad.any():
        i = int(torch.nonzero(bad)[0])
        raise UserError(
            f"weights must be positive, but weight {i} is {weights[i].item():g}; "
            "leave out atoms without mass"
        )
    total = weights.double().sum().item()
    if abs(total - 1) > 16 * len(weights) * torch.finfo(weights.dtype).eps:
        raise UserError(
            f"weights must sum to 1, but they sum to {total:.12g}; pass weights / weights.sum()"
        )


def _check_positions(positions: Tensor, points: Tensor) -> None:
    _check_one_each("positions", positions, points)
    if (positions < 0).any() or (positions > 1).any():
        low = positions.min().item()
        high = positions.max().item()
        raise UserError(
            f"positions must lie in [0, 1], but they range from {low:g} to {high:g}; "
            "rescale them, only their order matters"
        )
