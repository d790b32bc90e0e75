"""The one check that a setting of this room is a positive number."""

from __future__ import annotations

import math

from lipscope._types import UserError


def check_positive(name: str, value: object) -> None:
    """Finite, and no bool: True is 1 to Python and a slip to everybody else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{name} must be a positive number, got {value!r}")
