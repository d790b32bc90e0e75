"""Vocabulary shared by every room: the user's error, the status of a number, array types."""

from __future__ import annotations

from enum import Enum


class UserError(ValueError):
    """Something the caller can put right; the message names it, what was expected and the remedy."""


class Status(Enum):
    """How a number was obtained; the value is advice to the person who reads it."""

    CONVERGED = "converged: the relative residual is at most tol"
    BREAKDOWN = "exact: the Krylov space became invariant, the value is exact up to rounding"
    RESOLUTION = "converged to the resolution of this dtype, coarser than tol; use precision='exact'"
    MAX_STEPS = "not converged: a lower bound only; raise max_steps or tol"
    OVERFLOW = "the scores or the output overflow this dtype; rescale the input or use precision='exact'"
    NON_FINITE = "the derivative is not finite at this input; the map may not be differentiable there"

    @property
    def ok(self) -> bool:
        """Whether the value is the largest singular value to the accuracy asked for or possible."""
        return self in (Status.CONVERGED, Status.BREAKDOWN, Status.RESOLUTION)
