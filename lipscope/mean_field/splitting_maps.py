"""Which maps split: the gain from mass splitting on a grid of two tokens, and its largest value.

These are hundreds of small problems, so dense matrices, all in one batch, are the fastest way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from lipscope._ambient import entry_point
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import L2
from lipscope.mean_field.attention_on_measures import check_liftable, stacked
from lipscope.mean_field.measures import DiscreteMeasure


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
class Row(Displayed):
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

    d = f.Q.shape[1]
    X = noise(tries, n, d)
    # Radii of every magnitude from R/100 to R: what splits is often one token near 0, one far out.
    X = X / X.norm(dim=-1, keepdim=True) * R * 10 ** (-2 * chance(tries, n, 1))
    deepest = -0.85 * math.log(torch.finfo(X.dtype).tiny)
    # Moderate and extreme weights in turn.
    depth = X.new_tensor([10.0, deepest], dtype=torch.float32).repeat(tries)[:tries, None]
    level = -depth * chance(tries, n) ** 2 * (not equal)
    score = gains(f, X, level.softmax(dim=1))
    best = score.topk(min(tries, 50)).indices
    X = X[best]
    level = level[best]
    score = score[best]
    # Accept or reject, with relative steps that shrink from 1/2 to 1/1000.
    for step in torch.logspace(-0.3, -3, 120, dtype=torch.float32).tolist():
        trial = _into_ball(X + step * (X.abs() + 0.01 * R) * noise(*X.shape), R)
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


def splitting_table(n: int = 3, R: float = 16.0, tries: int = 2000, seed: int = 0) -> list[Row]:
    """For each map of `MAPS`, the largest gain found on n tokens of size 2 in the ball."""
    rows = []
    for name, make in MAPS.items():
        f = make()
        equal, _ = largest_gain(f, n, R, tries=tries, seed=seed)
        free, measure = largest_gain(f, n, R, equal=False, tries=tries, seed=seed)
        rows.append(Row(name=name, equal=equal, free=free, measure=measure))
    return rows


def _beyond_rounding(gain: Tensor) -> Tensor:
    """The gain, or 1 where it exceeds 1 by no more than rounding."""
    return torch.where(gain > 1 + 1000 * torch.finfo(gain.dtype).eps, gain, 1.0)


def _into_ball(X: Tensor, R: float) -> Tensor:
    return X * (R / X.norm(dim=-1, keepdim=True).clamp_min(R))


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
