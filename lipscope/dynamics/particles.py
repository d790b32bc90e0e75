"""Tokens as particles: the residual network X + f(X)/L, and its limit dx/dt = Gamma_mu(x)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.dynamics.integration import (
    Ending,
    Progress,
    check_count,
    check_time,
    check_tolerance,
    instants,
    integrate,
)
from lipscope.fused.primitive import attend
from lipscope.linalg.differentiate import check_input
from lipscope.mean_field.measures import DiscreteMeasure, lifted, scored

SCORES = 1 << 18
"""Scores computed at once on a CPU: they stay in its cache, which makes exponentials cheaper."""

UNRESOLVED = 1e-3
"""A flow is unresolved where eps max|score|, the relative error of a weight, exceeds this."""


@dataclass(frozen=True, eq=False)
class Flow(Displayed):
    """Tokens along depth: positions [T, n, d] at times [T].

    weights [n]: masses of the tokens, None if they are equal
    ending:      why the flow ended; `summary` says it in a sentence
    unresolved:  the first time at which the scores exceed what the dtype can resolve, after which
                 rounding decides between keys of nearly equal score; None if there is none
    """

    f: SelfAttention
    times: Tensor
    positions: Tensor
    weights: Tensor | None
    ending: Ending
    steps: int
    evaluations: int
    unresolved: float | None = None

    def plot(self, ax: Any = None, *, renormalised: bool = False) -> Any:
        """Plot the paths of the tokens.

        Args:
            ax: matplotlib Axes to draw on. Default: new ones.
            renormalised: Whether to draw z = e^{-tV} x in place of x.

        Returns:
            The Axes.
        """
        from lipscope.report.simulations import plot_flow

        return plot_flow(self, ax, renormalised)

    @property
    def ok(self) -> bool:
        """Whether it reached the requested time."""
        return self.ending is Ending.FINISHED

    @property
    def summary(self) -> str:
        end = f"{self.ending.value} (t = {self.times[-1].item():.6g}, {self.steps} steps)"
        if self.unresolved is None:
            return end
        return (
            f"{end}; from t = {self.unresolved:.4g} on, rounding decides between keys of nearly "
            "equal score"
        )

    @cached_property
    def renormalised(self) -> Tensor:
        """z = e^{-tV} x, [T, n, d], where V is the value matrix of the layer."""
        shrink = torch.linalg.matrix_exp(
            -self.times.to(self.positions)[:, None, None] * value_matrix(self.f)
        )
        z = self.positions @ shrink.mT
        lost = torch.nonzero(~z.flatten(1).isfinite().all(dim=1).cpu())
        if len(lost):
            t = self.times[lost[0, 0]].item()
            raise UserError(
                f"z = e^(-tV) x overflows {str(z.dtype).removeprefix('torch.')} at t = {t:.6g}: "
                "use `positions` (in find_clusters, renormalised=False), or a shorter time"
            )
        return z


@entry_point
def flow(
    f: SelfAttention,
    X: Tensor | DiscreteMeasure,
    time: float,
    *,
    frames: int = 65,
    tol: float = 1e-6,
    renormalise: bool = False,
    max_steps: int = 10_000,
    progress: Progress | None = None,
) -> Flow:
    """Integrate dx_i/dt = f(X)_i, the limit of infinitely many residual layers.

    Args:
        f: The attention.
        X: Initial tokens [n, d], or a measure, whose atoms are the tokens.
        time: Depth to integrate to.
        frames: Number of equidistant times in the result.
        tol: Error per step in each coordinate, relative to it and to the largest initial token.
        renormalise: Integrate z = e^{-tV} x instead of x. This is faster where V drives the tokens
            outwards, because z comes to rest.
        max_steps: Maximum number of integration steps.
        progress: Called with (time reached, final time) after every step.

    Returns:
        The positions of the tokens along depth; `summary` says how the flow ended.

    Raises:
        UserError: If a number is out of range, or the tokens do not fit f.

    Example:
        >>> import math
        >>> import torch
        >>> import lipscope as ls
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> X = torch.ones(3, 2, dtype=torch.float64)
        >>> path = ls.dynamics.flow(ls.SelfAttention(eye, eye, eye), X, time=1.0)
        >>> abs(path.positions[-1, 0, 0].item() - math.e) < 1e-4
        True
    """
    velocity, points, weights = velocity_of(f, X)
    times = instants(time, frames)
    check_tolerance(tol)
    V = value_matrix(f)
    resolution = _Resolution(f, V if renormalise else None)

    def field(t: float, z: Tensor) -> Tensor:
        """dz/dt = e^{-tV} Gamma(e^{tV} z) - V z."""
        if not renormalise:
            return velocity(z)
        grow, shrink = torch.linalg.matrix_exp(torch.stack([t * V, -t * V]))
        return velocity(z @ grow.T) @ shrink.T - z @ V.T

    path = integrate(
        field,
        points,
        times,
        rtol=tol,
        atol=tol * max(points.abs().max().item(), torch.finfo(points.dtype).tiny),
        watch=resolution,
        max_steps=max_steps,
        progress=progress,
    )
    states = path.states
    if renormalise:
        grow = torch.linalg.matrix_exp(path.times.to(states)[:, None, None] * V)
        states = states @ grow.mT
    return Flow(
        f=f,
        times=path.times,
        positions=states,
        weights=weights,
        ending=path.ending,
        steps=path.steps,
        evaluations=path.evaluations,
        unresolved=resolution.lost,
    )


@entry_point
def layered(f: SelfAttention, X: Tensor | DiscreteMeasure, time: float, layers: int) -> Flow:
    """Run the residual network X <- X + (time/layers) f(X), layer by layer.

    Args:
        f: The attention of every layer.
        X: Initial tokens [n, d], or a measure, whose atoms are the tokens.
        time: Total depth.
        layers: Number of layers.

    Returns:
        The positions of the tokens after every layer.

    Raises:
        UserError: If a number is out of range, or the tokens do not fit f.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> X = torch.ones(3, 2, dtype=torch.float64)
        >>> path = ls.dynamics.layered(ls.SelfAttention(eye, eye, eye), X, time=1.0, layers=2)
        >>> path.positions[:, 0, 0].tolist()
        [1.0, 1.5, 2.25]
    """
    velocity, points, weights = velocity_of(f, X)
    check_count("layers", layers)
    check_time(time, layers + 1)
    times = torch.arange(layers + 1, dtype=torch.float64) * (time / layers)
    resolution = _Resolution(f, None)
    states = [points]
    ending = Ending.FINISHED
    with torch.no_grad():
        resolution(0.0, points)
        for t in times[1:].tolist():
            x = states[-1] + (time / layers) * velocity(states[-1])
            if not bool(x.isfinite().all()):
                ending = Ending.OVERFLOW
                break
            states.append(x)
            resolution(t, x)
    done = len(states) - 1
    return Flow(
        f=f,
        times=times[: done + 1],
        positions=torch.stack(states),
        weights=weights,
        ending=ending,
        steps=done,
        evaluations=done,
        unresolved=resolution.lost,
    )


def value_matrix(f: SelfAttention) -> Tensor:
    """V, or sum_h O_h V_h for several heads: identical tokens follow dx/dt = V x without biases."""
    values = f.per_head(f.V).flatten(0, 1)
    return (values if f.O is None else f.O @ values).detach()


def velocity_of(
    f: SelfAttention, X: Tensor | DiscreteMeasure
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor | None]:
    """The velocity as a function of the positions, the initial positions, and unequal weights."""
    if not isinstance(f, SelfAttention):
        raise UserError(f"f must be a SelfAttention, got {type(f).__name__}")
    points = X.points if isinstance(X, DiscreteMeasure) else X
    _check_tokens(f, points)
    points = points.detach()
    if not isinstance(X, DiscreteMeasure):
        return lambda x: _by_rows(f, x, f.mask), points, None
    weights = None if bool((X.weights == X.weights[0]).all()) else X.weights.detach()
    if X.positions is None or bool((X.positions.diff() >= 0).all()):
        return _on_measure(f, X), points, weights
    # Sorted by position and without ties, the causal order needs no mask: compute in that order,
    # then permute back.
    order = X.positions.argsort(stable=True)
    back = order.argsort()
    ordered = _on_measure(f, DiscreteMeasure(X.points[order], X.weights[order], X.positions[order]))
    return lambda x: ordered(x[order])[back], points, weights


def _on_measure(f: SelfAttention, X: DiscreteMeasure) -> Callable[[Tensor], Tensor]:
    lift = lifted(f, X)
    mask = lift.mask
    # The rows of log w are all equal, so one row broadcasts; with ties among positions they differ.
    shared = mask is not None and lift.causal == f.causal
    return lambda x: _by_rows(lift, x, mask[:1] if mask is not None and shared else mask, shared)


def _by_rows(f: SelfAttention, x: Tensor, mask: Tensor | None, shared: bool = False) -> Tensor:
    """f(x) in O(n) memory, by blocks of queries; mask is [n, n], or [1, n] if rows share it."""
    if f.padding is not None or (f.window is not None and not f.causal):
        return f(x)
    q, k, v = f.project(x)
    q, k, scale = scored(f, q, k)
    n = x.shape[0]
    # A GPU kernel tiles by itself; a CPU gets blocks of rows that fit its cache.
    height = n if x.is_cuda else max(1, min(n, SCORES // (n * f.heads)))
    rules = f.kernel
    plain = (mask is None or shared) and not x.is_cuda
    plain = plain and f.window is None and rules.softcap is None and rules.sinks is None
    out = x.new_empty(n, f.heads * v.shape[-1])
    scratch = x.new_empty(2, f.heads * height * n if plain else 0)
    for start in range(0, n, height):
        rows = slice(start, min(n, start + height))
        # Under a causal mask, later keys are not even multiplied.
        seen = rows.stop if f.causal else n
        part = None if mask is None else mask[:, :seen] if shared else mask[rows, :seen]
        block = (q[:, rows] * scale, k[:, :seen], v[:, :seen])
        # Causal order and window align the last query with the last key, which is right for a block
        # of queries and the keys it sees.
        o = (
            _softmax_rows(*block, part, f.causal, scratch)
            if plain
            else attend(
                *block,
                scale=1.0,
                causal=f.causal,
                window=f.window,
                mask=part,
                softcap=rules.softcap,
                sinks=rules.sinks,
            )
        )
        out[rows] = o.transpose(0, 1).flatten(1)
    return out if f.O is None else out @ f.O.T


def _softmax_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scratch: Tensor
) -> Tensor:
    """softmax(q k' + mask) v, with scores and weights written into `scratch`."""
    # `attend` would also store what derivatives need, which doubles the cost for small tokens.
    # Allocating the scores again for every block would cost page faults.
    (heads, h, _), (groups, seen, _) = q.shape, k.shape
    S, P = (space[: heads * h * seen].view(groups, -1, seen) for space in scratch)
    torch.bmm(q.reshape(groups, -1, q.shape[-1]), k.mT, out=S)
    if mask is not None:
        S += mask
    if causal:
        later = torch.ones(h, h, dtype=torch.bool, device=S.device).triu(1)
        S.view(heads, h, seen)[..., -h:].masked_fill_(later, -torch.inf)
    return (torch.softmax(S, dim=-1, out=P) @ v).view(heads, h, -1)


class _Resolution:
    """Records the first time at which the scores exceed what the dtype can resolve."""

    def __init__(self, f: SelfAttention, V: Tensor | None):
        self.f = f
        self.V = V
        self.lost: float | None = None

    def __call__(self, t: float, state: Tensor) -> None:
        if self.lost is not None:
            return
        x = state if self.V is None else state @ torch.linalg.matrix_exp(t * self.V).T
        q, k, _ = self.f.project(x)
        q, k, scale = scored(self.f, q, k)
        largest = abs(scale) * q.norm(dim=-1).max().item() * k.norm(dim=-1).max().item()
        if self.f.kernel.softcap is None and torch.finfo(x.dtype).eps * largest > UNRESOLVED:
            self.lost = t


def check_square(f: SelfAttention) -> int:
    """Return the size of a token; raise UserError if f maps it to another."""
    d = f.Q.shape[1]
    out = value_matrix(f).shape[0]
    if out != d:
        raise UserError(
            f"f maps tokens of size {d} to size {out}; a flow needs them equal: "
            f"use a square V, or an O that maps back to size {d}"
        )
    return d


def check_alike(f: SelfAttention, name: str, x: Tensor) -> None:
    """Raise UserError unless x has the dtype and device of the weights."""
    if x.dtype != f.Q.dtype or x.device != f.Q.device:
        raise UserError(
            f"{name} is {x.dtype} on {x.device} and the weights of f are {f.Q.dtype} on "
            f"{f.Q.device}; convert one to the other, for instance f.to({name})"
        )


def _check_tokens(f: SelfAttention, points: Tensor) -> None:
    if not isinstance(points, Tensor) or points.ndim != 2:
        got = tuple(points.shape) if isinstance(points, Tensor) else type(points).__name__
        raise UserError(f"the flow takes tokens X [n, d] or a DiscreteMeasure, got {got}")
    d = check_square(f)
    check_input(points)
    n = points.shape[0]
    if points.shape[1] != d:
        raise UserError(f"the tokens have size {points.shape[1]}, and f takes tokens of size {d}")
    check_alike(f, "X", points)
    if f.mask is not None and tuple(f.mask.shape) != (n, n):
        raise UserError(
            f"the mask of f must have shape {(n, n)} for {n} tokens, got {tuple(f.mask.shape)}"
        )
