"""The exponent p of W_p and d_p: a number, at least 1."""

from __future__ import annotations

from numbers import Real

from lipscope._types import UserError


def check_exponent(p: object) -> None:
    if isinstance(p, bool) or not isinstance(p, Real):
        raise UserError(f"p must be a number, at least 1 (math.inf for the longest move), got {p!r}")
    if not float(p) >= 1:
        raise UserError(f"p must be at least 1 (math.inf for the longest move), got {p!r}")
