"""Vocabulary shared by every room: the user's error, the status of a number, the sets of inputs a bound speaks of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class UserError(ValueError):
    """Something the caller can put right; the message names it, what was expected and the remedy."""


class Status(Enum):
    """How a number was obtained; the value is advice to the person who reads it."""

    CONVERGED = "converged: the relative residual is at most tol"
    BREAKDOWN = "exact: the Krylov space became invariant, the value is exact up to rounding"
    RESOLUTION = (
        "converged to the resolution of this dtype, coarser than tol; use precision='exact'"
    )
    IMPRECISE = (
        "rounding alone may exceed 1 % of the value; use precision='exact' or rescale the input"
    )
    MAX_STEPS = "not converged: a lower bound only; raise max_steps or tol"
    OVERFLOW = (
        "the scores or the output overflow this dtype; rescale the input or use precision='exact'"
    )
    NON_FINITE = (
        "the derivative is not finite at this input; the map may not be differentiable there"
    )

    @property
    def ok(self) -> bool:
        """Whether the value is the largest singular value to the accuracy asked for or possible."""
        return self in (Status.CONVERGED, Status.BREAKDOWN, Status.RESOLUTION)


@dataclass(frozen=True, eq=False)
class Point:
    """The single input X [n, d]."""

    X: Tensor

    def __post_init__(self) -> None:
        _check_tokens(self.X, "Point")

    @property
    def n(self) -> int:
        return self.X.shape[0]


@dataclass(frozen=True)
class Ball:
    """All sequences of n tokens, each of norm at most R."""

    R: float
    n: int

    def __post_init__(self) -> None:
        _check_radius(self.R, "Ball(R, n)", "R")
        _check_length(self.n, "Ball(R, n)")


@dataclass(frozen=True, eq=False)
class Around:
    """All sequences Y with ||Y - X||_F <= r, around X [n, d]."""

    X: Tensor
    r: float

    def __post_init__(self) -> None:
        _check_tokens(self.X, "Around")
        _check_radius(self.r, "Around(X, r)", "r")

    @property
    def n(self) -> int:
        return self.X.shape[0]


@dataclass(frozen=True)
class Everywhere:
    """All sequences of n tokens, however large."""

    n: int

    def __post_init__(self) -> None:
        _check_length(self.n, "Everywhere(n)")


Domain = Point | Ball | Around | Everywhere


def _check_tokens(X: Tensor, name: str) -> None:
    shape = tuple(getattr(X, "shape", ()))
    if len(shape) != 2 or 0 in shape:
        got = f"shape {shape}" if shape else type(X).__name__
        raise UserError(
            f"{name} needs one sequence of tokens, a tensor X of shape [n, d], got {got}"
        )
    if not X.dtype.is_floating_point or not bool(X.isfinite().all()):
        raise UserError(
            f"{name} needs finite floating-point tokens, got X of {X.dtype} with other values in it"
        )


def _check_radius(radius: float, name: str, letter: str) -> None:
    if isinstance(radius, bool) or not isinstance(radius, int | float) or not 0 < radius < math.inf:
        raise UserError(f"{name} needs a finite radius {letter} > 0, got {letter}={radius!r}")


def _check_length(n: int, name: str) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UserError(f"{name} needs a number of tokens n >= 1, got n={n!r}")
