"""Argument checks shared by several packages."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

from lipscope._types import UserError

if TYPE_CHECKING:
    import torch


def check_positive(name: str, value: object) -> None:
    """Raise unless `value` is a finite number above 0; `True` is a mistake here, not a 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{name} must be a positive number, got {value!r}")


def norm_name(norm: object, names: tuple[str, ...] = ("2", "inf")) -> str:
    """Return a norm as one of `names`; the numbers 2 and `math.inf` stand for "2" and "inf"."""
    name = norm
    if isinstance(norm, Real) and not isinstance(norm, bool):
        name = "2" if norm == 2 else "inf" if norm == math.inf else norm
    if not isinstance(name, str) or name not in names:
        raise UserError(f"norm must be {' or '.join(map(repr, names))}, got {norm!r}")
    return name


def usable_device(name: str) -> torch.device:
    """The device of this name, if it can hold a number and give it back."""
    import torch  # late: other checks serve code that never loads torch

    try:
        device = torch.device(name)
        torch.ones(1, device=device, dtype=torch.float64).sum().item()
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"device {name!r} cannot be used here ({reason}); try cpu") from error
    return device


def check_exponent(p: object) -> None:
    """Raise unless `p` can be the exponent of the distances W_p and d_p."""
    if isinstance(p, bool) or not isinstance(p, Real):
        raise UserError(
            f"p must be a number, at least 1 (math.inf for the longest move), got {p!r}"
        )
    if not float(p) >= 1:
        raise UserError(f"p must be at least 1 (math.inf for the longest move), got {p!r}")
