"""Vocabulary shared by every package: the status of a number, and domains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from lipscope._display import Displayed
from lipscope.fused.errors import UserError as UserError

if TYPE_CHECKING:
    from torch import Tensor


class Status(Enum):
    """How the solver ended; each value is a message to the person who reads the number.

    Example:
        >>> import lipscope as ls
        >>> ls.Status.CONVERGED.ok
        True
        >>> print(ls.Status.MAX_STEPS.value)
        not converged: a lower bound only; raise max_steps or tol
    """

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
        """Whether the value is as accurate as requested, or as accurate as the dtype allows."""
        return self in (Status.CONVERGED, Status.BREAKDOWN, Status.RESOLUTION)


@dataclass(frozen=True, eq=False)
class Point(Displayed):
    """The domain that consists of a single input.

    Args:
        X: Tokens of shape `[n, d]`, finite and floating point.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> ls.Point(torch.zeros(5, 2)).n
        5
    """

    X: Tensor

    def __post_init__(self) -> None:
        _check_tokens(self.X, "Point")

    @property
    def n(self) -> int:
        return self.X.shape[0]


@dataclass(frozen=True)
class Ball:
    """The domain of all sequences of `n` tokens, each of Euclidean norm at most `R`.

    Args:
        R: Radius of the ball, positive and finite.
        n: Number of tokens.

    Example:
        >>> import lipscope as ls
        >>> ls.Ball(R=2.0, n=64)
        Ball(R=2.0, n=64)
    """

    R: float
    n: int

    def __post_init__(self) -> None:
        _check_radius(self.R, "Ball(R, n)", "R")
        _check_length(self.n, "Ball(R, n)")


@dataclass(frozen=True, eq=False)
class Around(Displayed):
    """The domain of all sequences `Y` with `||Y - X||_F <= r`.

    Args:
        X: Tokens of shape `[n, d]`, the centre, finite and floating point.
        r: Radius in the Frobenius norm over all tokens, positive and finite.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> ls.Around(torch.zeros(5, 2), r=0.1).n
        5
    """

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
    """The domain of all sequences of `n` tokens, with no limit on their norms.

    Args:
        n: Number of tokens.

    Example:
        >>> import lipscope as ls
        >>> ls.Everywhere(n=64)
        Everywhere(n=64)
    """

    n: int

    def __post_init__(self) -> None:
        _check_length(self.n, "Everywhere(n)")


Domain = Point | Ball | Around | Everywhere


def _check_tokens(X: Tensor, name: str) -> None:
    shape = tuple(getattr(X, "shape", ()))
    # A NumPy array has a shape too, a tensor on "meta" no entries, and a sparse one few operations.
    is_tensor = hasattr(X, "layout") and X.device.type != "meta" and not X.is_sparse
    if len(shape) != 2 or 0 in shape or not is_tensor:
        got = f"shape {shape}" if shape and is_tensor else type(X).__name__
        raise UserError(
            f"{name} needs one sequence of tokens, a tensor X of shape [n, d], got {got}"
        )
    if not X.dtype.is_floating_point or not bool(X.isfinite().all()):
        raise UserError(
            f"{name} needs finite floating-point tokens, got X of {X.dtype} "
            "with integers, NaN or infinities; convert or clean them first"
        )


def _check_radius(radius: float, name: str, symbol: str) -> None:
    if isinstance(radius, bool) or not isinstance(radius, int | float) or not 0 < radius < math.inf:
        raise UserError(f"{name} needs a finite radius {symbol} > 0, got {symbol}={radius!r}")


def _check_length(n: int, name: str) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UserError(f"{name} needs a number of tokens n >= 1, got n={n!r}")
