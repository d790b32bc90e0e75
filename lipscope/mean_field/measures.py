"""A probability measure carried by finitely many weighted tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.linalg.differentiate import check_tensor


@dataclass(frozen=True, eq=False)
class DiscreteMeasure:
    """mu = sum_i w_i delta_{x_i}: points [n, d], weights [n], positive and summing to 1.

    With positions s [n] in [0, 1] it is a measure on [0, 1] x R^d, where attention is masked: (s, x) sees (t, y)
    if t <= s. Points listed twice are two atoms, free to move apart; `merged` joins them.
    """

    points: Tensor
    weights: Tensor
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        _check_points(self.points)
        _check_weights(self.weights, self.points)
        if self.positions is not None:
            _check_positions(self.positions, self.points)

    @staticmethod
    def uniform(X: Tensor, causal: bool = False) -> DiscreteMeasure:
        """The n tokens of X with weights 1/n; causal puts token i at position i/n, which recovers causal attention."""
        _check_points(X)
        n = X.shape[0]
        # In float64 whatever X is: bfloat16 has ties among 300 positions, and tokens that tie see each other.
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
        """The largest |x_i|."""
        return self.points.norm(dim=1).max().item()

    @property
    def roots(self) -> Tensor:
        """sqrt(w_i) as a column: E = roots * xi has the Euclidean norm that the field xi has in L2(mu)."""
        return self.weights.sqrt()[:, None]

    def double(self) -> DiscreteMeasure:
        """In float64, the weights divided by their sum again."""
        weights = self.weights.double()
        s = None if self.positions is None else self.positions.double()
        return DiscreteMeasure(self.points.double(), weights / weights.sum(), s)

    def moved(self, field: Tensor) -> DiscreteMeasure:
        """Every atom x_i displaced to x_i + field_i; a field [1, d] moves all alike."""
        n, d = self.points.shape
        if tuple(field.shape) not in ((n, d), (1, d)):
            raise UserError(
                f"field must have the shape {(n, d)} of the points, got {tuple(field.shape)}"
            )
        return replace(self, points=self.points + field)

    def split(self, copies: int) -> DiscreteMeasure:
        """Every atom as so many equal copies of itself, one after the other: the same measure with more atoms."""
        if not isinstance(copies, int) or copies < 1:
            raise UserError(f"copies must be a whole number, at least 1, got {copies!r}")
        s = None if self.positions is None else self.positions.repeat_interleave(copies)
        weights = (self.weights / copies).repeat_interleave(copies)
        return DiscreteMeasure(self.points.repeat_interleave(copies, dim=0), weights, s)

    def merged(self) -> DiscreteMeasure:
        """The same measure with atoms that coincide (in position too) joined into one, in order of first appearance."""
        # Adding 0.0 makes one zero of -0.0 and 0.0, which are equal but sort apart.
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

    def index_of(self, point: Tensor, position: Tensor | None = None) -> int:
        """The first atom at this point (and position)."""
        same = (self.points == point).all(dim=1)
        if position is not None and self.positions is not None:
            same &= self.positions == position
        return int(torch.nonzero(same)[0])


def as_measure(mu: DiscreteMeasure | Tensor, causal: bool = False) -> DiscreteMeasure:
    """Tokens X [n, d] as the measure that gives each the weight 1/n; a measure as it is."""
    return mu if isinstance(mu, DiscreteMeasure) else DiscreteMeasure.uniform(mu, causal)


def check_measure(mu: object) -> None:
    if not isinstance(mu, DiscreteMeasure):
        raise UserError(
            f"a DiscreteMeasure is expected, got {type(mu).__name__}; DiscreteMeasure.uniform(X) makes one of tokens X"
        )


def _check_points(points: Tensor) -> None:
    if not isinstance(points, Tensor) or points.ndim != 2:
        got = tuple(points.shape) if isinstance(points, Tensor) else type(points).__name__
        raise UserError(f"points must be a tensor [n, d], one row an atom, got {got}")
    if points.numel() == 0:
        raise UserError(
            f"the measure is empty (points of shape {tuple(points.shape)}); it needs one atom"
        )
    check_tensor("points", points)


def _check_weights(weights: Tensor, points: Tensor) -> None:
    if not isinstance(weights, Tensor) or weights.shape != points.shape[:1]:
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise UserError(
            f"weights must be a tensor [{points.shape[0]}], one for each point, got {got}"
        )
    check_tensor("weights", weights)
    if weights.dtype != points.dtype:
        raise UserError(
            f"weights are {weights.dtype} and points {points.dtype}; give both one dtype"
        )
    bad = weights <= 0
    if bad.any():
        i = int(torch.nonzero(bad)[0])
        raise UserError(
            f"weights must be positive, weight {i} is {weights[i].item():g}; leave out atoms without mass"
        )
    total = weights.double().sum().item()
    if abs(total - 1) > 16 * len(weights) * torch.finfo(weights.dtype).eps:
        raise UserError(
            f"weights must sum to 1, they sum to {total:.12g}; divide them: weights / weights.sum()"
        )


def _check_positions(positions: Tensor, points: Tensor) -> None:
    if not isinstance(positions, Tensor) or positions.shape != points.shape[:1]:
        got = tuple(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise UserError(
            f"positions must be a tensor [{points.shape[0]}], one for each point, got {got}"
        )
    check_tensor("positions", positions)
    if (positions < 0).any() or (positions > 1).any():
        low, high = positions.min().item(), positions.max().item()
        raise UserError(
            f"positions must lie in [0, 1], they run from {low:g} to {high:g}; rescale them, their order alone matters"
        )
