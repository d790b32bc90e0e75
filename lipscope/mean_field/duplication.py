"""Mass splitting: is attention less smooth when copies of a token may move apart?

    L_split(mu) = max( ||D_mu F||, max_i ||D Gamma_mu(x_i)|| )

is the constant over all ways to split atoms and move the pieces infinitesimally; two equal copies
of one atom attain it. For dot products D Gamma_mu(x_i) = V C_i A. Which maps split is the question
of the second half: the gain on a grid of two tokens, and its largest value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from lipscope._ambient import entry_point
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import L2
from lipscope.linalg.estimate import Estimate, as_batch, as_single
from lipscope.linalg.operator import LinearOperator
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.mean_field.measures import (
    DiscreteMeasure,
    as_measure,
    check_liftable,
    check_measure,
    derivative,
    push,
    query_derivative,
    stacked,
)
from lipscope.mean_field.transport import conditional_distance, wasserstein


@dataclass(frozen=True, eq=False)
class Splitting(Displayed):
    """The effect of splitting at a measure, with coinciding tokens merged.

    measure:   the input with coinciding atoms merged.
    together:  ||D_mu F||, every atom moving as a whole.
    apart:     max_i ||D Gamma_mu(x_i)||, two copies of one atom moving against each other.
    token:     index in the input of the atom where that is largest.
    direction: unit vector along which one copy moves, and the other moves back.
    per_token: ||D Gamma_mu(x_i)|| for every atom of `measure`.
    atom:      like `token`, but the index in `measure`.

    This is the constant for infinitesimal moves. Mass that jumps a finite distance can be stretched
    more, see `jump_ratio`.
    """

    measure: DiscreteMeasure
    together: Estimate
    apart: Estimate
    token: int
    direction: Tensor
    per_token: Tensor
    atom: int

    @property
    def value(self) -> float:
        """L_split(mu)."""
        return max(self.together.value, self.apart.value)

    @property
    def gain(self) -> float:
        """The factor by which splitting increases the constant; 1 if it does not."""
        if self.apart.value <= self.together.value:
            return 1.0
        return self.apart.value / self.together.value if self.together.value else float("inf")

    @property
    def helps(self) -> bool:
        """Whether splitting increases the constant by more than both residuals and rounding."""
        eps = torch.finfo(self.per_token.dtype).eps
        margin = self.together.residual + self.apart.residual + 1000 * eps
        return self.apart.value > self.together.value * (1 + margin)

    @property
    def certain(self) -> bool:
        """Whether the bounds of both numbers prove that splitting helps (float64 only)."""
        return self.apart.lower > self.together.upper

    def halves(self, t: float) -> DiscreteMeasure:
        """Return the measure with the atom in two halves, moved by +t and -t along `direction`."""
        pair = self.measure.split(2)
        field = torch.zeros_like(pair.points)
        field[2 * self.atom], field[2 * self.atom + 1] = t * self.direction, -t * self.direction
        return pair.moved(field)


@entry_point
def splitting(
    f: SelfAttention,
    mu: DiscreteMeasure | Tensor,
    tol: float = 1e-8,
    *,
    gap: float | None = None,
    solver: Solver | None = None,
) -> Splitting:
    """Determine whether duplicating tokens makes attention less smooth.

    Args:
        f: The layer, without mask, window, padding, sinks or rotary positions.
        mu: Tokens of shape `[n, d]`, or a measure.
        tol: Relative residual at which the solver stops.
        gap: If given, keep iterating until `upper / lower - 1` is at most this.
        solver: Options of the solver.

    Returns:
        An object with the constants of atoms moving `together` and of copies moving `apart`, their
        ratio `gain`, and the `token` and `direction` that attain it.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> f = ls.SelfAttention(-one, one, one)  # A = -1
        >>> found = ls.mean_field.splitting(f, torch.tensor([[0.0], [4.0]], dtype=torch.float64))
        >>> found.helps, found.token, round(found.apart.value, 6)
        (True, 0, 4.0)
    """
    check_liftable(f)
    given = as_measure(mu, f.causal)
    measure = given.merged()
    solver = solver or Solver()
    # The failure probability is shared out, so that both bounds hold jointly as requested.
    each = replace(solver, failure=solver.failure / 2)
    together = as_single(spectral_norm(derivative(f, measure), tol, gap=gap, solver=each))
    queries = query_derivative(f, measure)
    blocks = as_batch(spectral_norm(queries, tol, solver=each))
    # A block that is almost zero has no good upper bound of its own, and would spoil that of the
    # maximum; the block-diagonal operator of all blocks has one.
    largest = as_single(spectral_norm(_side_by_side(queries), tol, gap=gap, solver=each))
    per_token = torch.as_tensor(blocks.value)
    atom = int(per_token.argmax())
    position = None if measure.positions is None else measure.positions[atom]
    return Splitting(
        measure=measure,
        together=together,
        apart=replace(
            blocks[atom],
            upper=max(largest.upper, blocks[atom].value),
            confidence=largest.confidence,
            note=largest.note,
        ),
        token=given.index_of(measure.points[atom], position),
        direction=blocks.right[atom].reshape(-1),
        per_token=per_token.to(measure.points),
        atom=atom,
    )


def _side_by_side(J: LinearOperator) -> LinearOperator:
    """Join a batch of operators to a block-diagonal one: its norm is the largest of theirs."""
    assert J.batch is not None
    inner = (J.batch, *J.in_shape)
    outer = (J.batch, *J.out_shape)
    return replace(
        J,
        in_shape=inner,
        out_shape=outer,
        batch=None,
        # Below float64 rounding is seen member by member, and no upper bound is drawn from this.
        rounding=replace(J.rounding.each(torch.max), compared=None),
    )


def split_estimate(found: Splitting) -> Estimate:
    """L_split(mu) as an Estimate; its vectors are fields on `measure.split(2)`."""
    lower = max(found.together.lower, found.apart.lower)
    upper = max(found.together.upper, found.apart.upper)
    both = max(0.0, found.together.confidence + found.apart.confidence - 1)
    if found.apart.value <= found.together.value:
        left, right = (
            x.repeat_interleave(2, dim=0) / 2**0.5
            for x in (found.together.left, found.together.right)
        )
        return replace(
            found.together, lower=lower, upper=upper, confidence=both, left=left, right=right
        )
    n = len(found.measure)

    def halved(x: Tensor) -> Tensor:
        field = x.new_zeros(2 * n, x.numel())
        field[2 * found.atom], field[2 * found.atom + 1] = (
            x.flatten() / 2**0.5,
            -x.flatten() / 2**0.5,
        )
        return field

    left = halved(found.apart.left)
    right = halved(found.apart.right)
    return replace(found.apart, lower=lower, upper=upper, confidence=both, left=left, right=right)


def jump_ratio(f: SelfAttention, mu: DiscreteMeasure, token: int, to: Tensor, mass: float) -> float:
    """W2(F(nu), F(mu)) / W2(nu, mu), where nu is mu with some mass of one atom moved to `to`.

    With positions the distance is d_2, and the mass keeps its position. As the mass tends to 0, so
    does W2(nu, mu), yet the ratio can stay above L_split(mu): that constant is about short moves of
    any mass, not about long moves of a small mass.
    """
    check_measure(mu)
    n, d = mu.points.shape
    if not isinstance(token, int) or not 0 <= token < n:
        raise UserError(
            f"token must be the index of an atom of the measure, 0 to {n - 1}, got {token!r}"
        )
    if not isinstance(to, Tensor):
        raise UserError(f"to must be a point, a tensor of size {d}, got {type(to).__name__}")
    if to.numel() != d or torch.equal(to.flatten().to(mu.points), mu.points[token]):
        raise UserError(
            f"to must be a point of size {d} and not the atom itself, got shape {tuple(to.shape)}"
        )
    if not isinstance(mass, Real) or not 0 < mass < mu.weights[token].item():
        raise UserError(
            f"mass must be between 0 and the weight {mu.weights[token].item():g} of token {token}, "
            f"got {mass!r}"
        )
    weights = torch.cat([mu.weights, mu.weights.new_tensor([mass])])
    weights[token] -= mass
    s = None if mu.positions is None else torch.cat([mu.positions, mu.positions[token : token + 1]])
    nu = DiscreteMeasure(torch.cat([mu.points, to.reshape(1, -1).to(mu.points)]), weights, s)
    distance = wasserstein if s is None else conditional_distance
    return distance(push(f, nu), push(f, mu)) / distance(nu, mu)


@dataclass(frozen=True, eq=False)
class SplittingMap(Displayed):
    """gain[i, j] = L_split / ||D|| for two equal tokens at positions[i] and positions[j]."""

    positions: Tensor
    gain: Tensor

    def plot(self, ax: Any = None) -> Any:
        """Plot the gain over the positions of both tokens; returns matplotlib Axes."""
        from lipscope.report.figures import draw_splitting_map, new_axes

        return draw_splitting_map(self, new_axes(ax))


@dataclass(frozen=True, eq=False)
class MapGain(Displayed):
    """One map of the table: the largest gain found with equal and with free weights, and where."""

    name: str
    equal: float
    free: float
    measure: DiscreteMeasure


def gains(f: SelfAttention, X: Tensor, weights: Tensor) -> Tensor:
    """max_i ||D Gamma(x_i)|| / ||D_mu F|| for B measures, X [B, n, d] and weights [B, n]."""
    whole, blocks = stacked(f, X, weights)
    together = torch.linalg.matrix_norm(whole.to_dense(), 2)
    apart = torch.linalg.matrix_norm(blocks.to_dense(), 2).unflatten(0, X.shape[:2]).amax(dim=1)
    return torch.where(together > 0, apart / together, 0.0)


@entry_point
def splitting_map(f: SelfAttention, positions: Tensor) -> SplittingMap:
    """Compute the gain from splitting for all pairs of two tokens on a line.

    Args:
        f: A layer on tokens of size 1.
        positions: Grid of points, shape `[N]`.

    Returns:
        An object with `positions` and `gain` of shape `[N, N]`; 1 where splitting does not help.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> f = ls.SelfAttention(-one, one, one)  # A = -1
        >>> found = ls.mean_field.splitting_map(f, torch.tensor([0.0, 4.0]))
        >>> (found.gain > 1).tolist()
        [[False, True], [True, False]]
    """
    check_liftable(f)
    if f.Q.shape[1] != 1 or positions.ndim != 1:
        raise UserError(
            f"splitting_map needs an f that reads tokens of size 1, got {f.Q.shape[1]}, "
            f"and a vector of positions, got shape {tuple(positions.shape)}"
        )
    positions = positions.to(f.Q)
    X = torch.cartesian_prod(positions, positions)[..., None]
    weights = torch.full_like(X[..., 0], 0.5)
    gain = _beyond_rounding(gains(f, X, weights))
    return SplittingMap(positions, gain.unflatten(0, (len(positions), -1)))


class LargestGain(NamedTuple):
    """The largest factor by which splitting was found to increase the constant, and where."""

    gain: float
    measure: DiscreteMeasure


@entry_point
def largest_gain(
    f: SelfAttention, n: int, R: float, *, equal: bool = True, tries: int = 2000, seed: int = 0
) -> LargestGain:
    """Search for the measure in a ball where splitting helps most.

    Random measures are drawn, and the best of them improved. The gain is a lower bound of the true
    maximum: 1 means that the search found no measure that splits, not that there is none.

    Args:
        f: The layer, without mask, window, padding, sinks or rotary positions.
        n: Number of tokens.
        R: Radius of the ball.
        equal: Whether all weights are 1/n; otherwise weights of every magnitude that the dtype
            holds are tried too.
        tries: Number of random measures.
        seed: Seed of the search.

    Returns:
        The largest `gain` found, and the `measure` that attains it.
    """
    check_liftable(f)
    if n < 1 or not (math.isfinite(R) and R > 0) or tries < 1:
        raise UserError(
            f"the search needs n >= 1, R > 0 and tries >= 1, got n={n!r}, R={R!r}, tries={tries!r}"
        )
    g = Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=f.Q.dtype).to(f.Q.device)

    def chance(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=f.Q.dtype).to(f.Q.device)

    X = noise(tries, n, f.Q.shape[1])
    # Radii of every magnitude from R/100 to R: what splits is often one token near 0, one far out.
    X = X / X.norm(dim=-1, keepdim=True) * R * 10 ** (-2 * chance(tries, n, 1))
    deepest = -0.85 * math.log(torch.finfo(X.dtype).tiny)
    # Moderate and extreme weights in turn.
    depth = X.new_tensor([10.0, deepest], dtype=torch.float32).repeat(tries)[:tries, None]
    level = -depth * chance(tries, n) ** 2 * (not equal)
    score, best = gains(f, X, level.softmax(dim=1)).topk(min(tries, 50))
    X = X[best]
    level = level[best]
    # Accept or reject, with relative steps that shrink from 1/2 to 1/1000.
    for step in torch.logspace(-0.3, -3, 120, dtype=torch.float32).tolist():
        trial = X + step * (X.abs() + 0.01 * R) * noise(*X.shape)
        trial = trial * (R / trial.norm(dim=-1, keepdim=True).clamp_min(R))
        tilt = level if equal else level + step * (1 - level) * noise(*level.shape)
        tilt = (tilt - tilt.amax(dim=1, keepdim=True)).clamp_min(-deepest)
        now = gains(f, trial, tilt.softmax(dim=1))
        better = now > score
        X = torch.where(better[:, None, None], trial, X)
        level = torch.where(better[:, None], tilt, level)
        score = torch.where(better, now, score)
    top = int(score.argmax())
    steps = torch.arange(1, n + 1, dtype=X.dtype, device=X.device)
    positions = steps / n if f.causal else None
    measure = DiscreteMeasure(X[top], level[top].softmax(dim=0), positions)
    return LargestGain(gain=_beyond_rounding(score)[top].item(), measure=measure)


def splitting_table(n: int = 3, R: float = 16.0, tries: int = 2000, seed: int = 0) -> list[MapGain]:
    """For each map of `MAPS`, the largest gain found on n tokens of size 2 in the ball."""
    rows = []
    for name, make in MAPS.items():
        f = make()
        equal, _ = largest_gain(f, n, R, tries=tries, seed=seed)
        free, measure = largest_gain(f, n, R, equal=False, tries=tries, seed=seed)
        rows.append(MapGain(name=name, equal=equal, free=free, measure=measure))
    return rows


def _beyond_rounding(gain: Tensor) -> Tensor:
    """Return the gain, or 1 where it exceeds 1 by no more than rounding."""
    return torch.where(gain > 1 + 1000 * torch.finfo(gain.dtype).eps, gain, 1.0)


def _dot(A: list[list[float]], causal: bool = False) -> Callable[[], SelfAttention]:
    def make() -> SelfAttention:
        I = torch.eye(2, dtype=torch.float64)
        return SelfAttention(
            math.sqrt(2) * torch.tensor(A, dtype=torch.float64), I, I, causal=causal
        )

    return make


def _l2(causal: bool = False) -> Callable[[], SelfAttention]:
    def make() -> SelfAttention:
        I = torch.eye(2, dtype=torch.float64)
        return SelfAttention(I, I, I, kernel=L2(scale=0.5), causal=causal)

    return make


MAPS: dict[str, Callable[[], SelfAttention]] = {
    "A = -I": _dot([[-1.0, 0.0], [0.0, -1.0]]),
    "A = I": _dot([[1.0, 0.0], [0.0, 1.0]]),
    "A = diag(1, -1)": _dot([[1.0, 0.0], [0.0, -1.0]]),
    "A = rotation by 90 degrees": _dot([[0.0, -1.0], [1.0, 0.0]]),
    "A nilpotent": _dot([[0.0, 1.0], [0.0, 0.0]]),
    "L2": _l2(),
    "masked, A = -I": _dot([[-1.0, 0.0], [0.0, -1.0]], causal=True),
    "masked, A = I": _dot([[1.0, 0.0], [0.0, 1.0]], causal=True),
    "masked, L2": _l2(causal=True),
}
"""Maps on tokens of size 2 with V = I, by the sign and kind of A."""
