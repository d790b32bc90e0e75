"""Averaging over the past, which is causal attention with A = 0: how much it stretches d_p.

    (H x)_i = (x_1 + ... + x_i) / i

A bound for attention without a mask would give 1 for every p. In d_p the constant of n tokens grows
with n towards p/(p-1) (Hardy); in d_1 it is 1 + 1/2 + ... + 1/n; only in d_inf is it 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._checks import check_exponent
from lipscope._display import Displayed
from lipscope._types import UserError

STEPS = 1000
"""Maximum number of iterations; any field gives a lower bound of the constant."""


@dataclass(frozen=True, eq=False)
class Averaging(Displayed):
    """The d_p constant of averaging n tokens over their past, and the field that attains it."""

    constant: float
    field: Tensor


def averaging(n: int, p: float = 2) -> Averaging:
    """The largest ||H x||_p / ||x||_p, by power iteration.

    For nonnegative matrices it converges to the maximum [boyd1974].
    """
    if not (isinstance(n, int) and n >= 1):
        raise UserError(f"n must be a whole number of tokens, at least 1, got {n!r}")
    check_exponent(p)
    count = torch.arange(1, n + 1, dtype=torch.float64)
    x = torch.ones(n, dtype=torch.float64)
    if p == 1:
        x = (count == 1).double()
    elif not math.isinf(p):
        constant = 0.0
        x = count ** (-1 / p)
        for _ in range(STEPS):
            before = constant
            y = x.cumsum(0) / count
            constant = (y.norm(p) / x.norm(p)).item()
            if constant <= before * (1 + 1e-15):
                break
            # The transpose of H, then the inverse of the duality map of l^p. The first entry is the
            # largest, both of x and of y, and is kept at 1: no power of it overflows, and entries
            # that underflow next to it are negligible.
            x = (y ** (p - 1) / count).flip(0).cumsum(0).flip(0)
            x = (x / x[0]) ** (1 / (p - 1))
    return Averaging(((x.cumsum(0) / count).norm(p) / x.norm(p)).item(), x[:, None])
