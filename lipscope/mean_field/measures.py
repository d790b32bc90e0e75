"""Probability measures of weighted tokens, and attention on them, F(mu) = (Gamma_mu)#mu.

    Gamma_mu(x) = sum_j P_j(x) V x_j,   P_j(x) = w_j e^{S(x, x_j)} / sum_l w_l e^{S(x, x_l)}

A weight acts as an additive mask log w_j, so everything attention can do carries over, its
closed-form derivative included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.linearization import linearize, query_rounding
from lipscope.attention.scores import L2, Dot, augment, default_scale
from lipscope.fused.primitive import attend
from lipscope.linalg.differentiate import check_one_device, check_tensor, jacobian
from lipscope.linalg.estimate import Estimate
from lipscope.linalg.operator import Compression, LinearOperator, Rounding, steady
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
        weights = self.weights
        _check_points(self.points)
        _check_one_each("weights", weights, self.points)
        if weights.dtype != self.points.dtype:
            raise UserError(
                f"weights are {weights.dtype} and points are {self.points.dtype}; "
                "give both one dtype"
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
        if self.positions is not None:
            _check_one_each("positions", self.positions, self.points)
            low = self.positions.min().item()
            high = self.positions.max().item()
            if low < 0 or high > 1:
                raise UserError(
                    f"positions must lie in [0, 1], but they range from {low:g} to {high:g}; "
                    "rescale them, only their order matters"
                )
        check_one_device("points", self.points, weights=weights, positions=self.positions)

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


@entry_point
def push(f: SelfAttention, mu: DiscreteMeasure) -> DiscreteMeasure:
    """Apply attention to a measure, F(mu) = (Gamma_mu)#mu.

    Every atom moves and keeps its weight. With equal weights this is `f` itself.

    Args:
        f: The layer, without mask, window, padding, sinks or rotary positions.
        mu: The measure; it must have positions if and only if `f` is causal.

    Returns:
        The image measure, with the weights and positions of `mu`.

    Raises:
        UserError: If `f` cannot act on measures, or does not fit `mu`.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> f = ls.SelfAttention(0 * one, one, one)  # scores of zero: attention averages
        >>> points = torch.tensor([[0.0], [4.0]], dtype=torch.float64)
        >>> weights = torch.tensor([0.25, 0.75], dtype=torch.float64)
        >>> mu = ls.mean_field.DiscreteMeasure(points, weights)
        >>> ls.mean_field.push(f, mu).points.flatten().round(decimals=6).tolist()
        [3.0, 3.0]
    """
    return replace(mu, points=lifted(f, mu)(mu.points))


@entry_point
def derivative(f: SelfAttention, mu: DiscreteMeasure) -> LinearOperator:
    """Return the derivative of attention at a measure, as an operator on L2(mu).

    It is `W^{1/2} J W^{-1/2}` with `J_ij = d F(mu)_i / d x_j` and `W = diag(w)`: fields `xi` are
    given in the coordinates `E_i = sqrt(w_i) xi_i`, in which the norm of L2(mu) is Euclidean.

    Args:
        f: The layer, without mask, window, padding, sinks or rotary positions.
        mu: The measure; it must have positions if and only if `f` is causal.

    Returns:
        The operator on fields of shape `[n, d]`.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> f = ls.SelfAttention(0 * one, one, one)
        >>> mu = ls.mean_field.DiscreteMeasure.uniform(torch.zeros(4, 1, dtype=torch.float64))
        >>> round(ls.spectral_norm(ls.mean_field.derivative(f, mu)).value, 6)
        1.0
    """
    J = linearize(lifted(f, mu), mu.points, apart=False, weights=mu.weights)
    return steady(in_l2(J, mu.weights))


def query_derivative(f: SelfAttention, mu: DiscreteMeasure) -> LinearOperator:
    """D Gamma_mu(x_i) at every atom with mu fixed: a batch of n operators [1, d] -> [1, d'].

    For dot products it is V C_i A.
    """
    J = query_blocks(lifted(f, mu), mu.points[None])
    return replace(J, rounding=_with_weights(J.rounding, mu.weights))


def lifted(f: SelfAttention, mu: DiscreteMeasure) -> SelfAttention:
    """f as a map of the atoms of mu, with log w_j and the order of positions as a mask."""
    check_liftable(f)
    check_measure(mu)
    n, d = mu.points.shape
    if d != f.Q.shape[1]:
        raise UserError(
            f"the points have size {d}, but the weights of f read tokens of size {f.Q.shape[1]}"
        )
    check_one_device("f", f.Q, points=mu.points)
    if f.causal != (mu.positions is not None):
        raise UserError(
            "f is causal and the measure has no positions; "
            "use DiscreteMeasure.uniform(X, causal=True) or pass positions"
            if f.causal
            else "the measure has positions and f is not causal; "
            "make f causal, or leave the positions out"
        )
    w = mu.weights.detach()
    s = mu.positions
    mask = None if bool((w == w[0]).all()) else w.log().expand(n, n)
    # Positions in order and without ties are the causal order itself, which needs no n x n mask.
    if s is None or bool((s.diff() > 0).all()):
        return replace(f, mask=mask)
    seen = s[None, :] <= s[:, None]
    mask = seen if mask is None else mask.masked_fill(~seen, -torch.inf)
    return replace(f, causal=False, mask=mask)


def check_liftable(f: object) -> None:
    """Raise unless f can act on measures, which neither number nor count their tokens."""
    if not isinstance(f, SelfAttention):
        raise UserError(f"f must be a SelfAttention to act on measures, got {type(f).__name__}")
    rope = f.kernel.rope if isinstance(f.kernel, Dot) else None
    forbidden = {
        "mask": f.mask,
        "window": f.window,
        "padding": f.padding,
        "sinks": f.kernel.sinks,
        "rotary positions": rope,
    }
    for name, value in forbidden.items():
        if value is not None:
            raise UserError(
                f"f has {name}, which depends on the index or the number of tokens, "
                "and a measure has neither; leave it out"
            )


def respond(
    f: SelfAttention,
    Z: Float[Tensor, "*batch N d"],
    X: Float[Tensor, "*batch n d"],
    mask: Tensor | None,
) -> Float[Tensor, "*batch N out"]:
    """Return the output of queries at Z [..., N, d] on keys and values at X [..., n, d]."""
    q, (_, k, v) = f.project(Z)[0], f.project(X)
    q, k, scale = scored(f, q, k)
    mask = mask if mask is None or mask.ndim == 2 else mask[:, None]
    o = attend(q, k, v, scale=scale, mask=mask, causal=f.causal, softcap=f.kernel.softcap)
    joined = o.transpose(-3, -2).flatten(-2)
    return joined if f.O is None else joined @ f.O.T


def scored(f: SelfAttention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
    """Queries, keys and a scale whose scores scale <q_i, k_j> are those of f's kernel."""
    if isinstance(f.kernel, L2):
        return *augment(f.kernel, q, k), 1.0
    return q, k, default_scale(f.kernel, q.shape[-1])


def query_blocks(lift: SelfAttention, X: Float[Tensor, "B n d"]) -> LinearOperator:
    """The derivative of each row of X [B, n, d] in its own query: B n operators, member-major."""
    B, n, d = X.shape

    def rows(Z: Tensor) -> Tensor:
        return respond(lift, Z.reshape(B, n, d), X, lift.mask).reshape(B * n, 1, -1)

    J = jacobian(rows, X.reshape(B * n, 1, d))
    # No `take`: each row of the mask belongs to its own query, and a subset would mismatch them.
    return replace(J, rounding=query_rounding(lift, X), take=None)


def stacked(
    f: SelfAttention, X: Float[Tensor, "B n d"], weights: Float[Tensor, "B n"]
) -> tuple[LinearOperator, LinearOperator]:
    """`derivative` and `query_derivative` of B measures at once, X [B, n, d] and weights [B, n].

    The second is a batch of B n operators. For a causal f the atoms are at increasing positions.
    """
    B, n, _ = X.shape
    check_liftable(f)
    lift = replace(f, mask=weights.log()[:, None, :].expand(B, n, n))
    return in_l2(linearize(lift, X, apart=False, weights=weights), weights), query_blocks(lift, X)


def in_l2(J: LinearOperator, weights: Tensor) -> LinearOperator:
    """W^{1/2} J W^{-1/2} for weights [n], or [B, n] with a batch of B."""
    roots = weights.detach().sqrt()[..., None]
    take = J.take
    small = J.compressed
    return replace(
        J,
        mv=lambda E: roots * J.mv(E / roots),
        rmv=lambda U: J.rmv(roots * U) / roots,
        rounding=replace(_with_weights(J.rounding, weights), compared=None),  # only J was compared
        take=None if take is None else lambda members: in_l2(take(members), weights[members]),
        compressed=None if small is None else Compression(in_l2(small.core, weights), small.lift),
    )


def _with_weights(rounding: Rounding, weights: Tensor) -> Rounding:
    """Add the largest |log w_j|: a score contains it, and its rounding grows accordingly."""
    extra = weights.detach().log().abs().amax(dim=-1).double().cpu()
    worst = None if rounding.worst is None else rounding.worst + extra
    return replace(rounding, condition=rounding.condition + extra, worst=worst)
