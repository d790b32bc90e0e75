"""How much attention can stretch the distance of two measures in a ball of radius R.

Theorems of `lipscope.theorems` applied to measures, and W_p and d_p for every p; the proofs are in
docs/theory/mean_field.md. Here a = ||A|| R^2 with A = K'Q/sqrt(k), and
a_b = R (||A|| R + |K'b_q|/sqrt(k)), which equals a without a query bias b_q.

`averaging` is the exact constant of causal attention with A = 0, (H x)_i = (x_1 + ... + x_i) / i. A
bound for attention without a mask would give 1 for every p. In d_p the constant of n tokens grows
with n towards p/(p-1) (Hardy); in d_1 it is 1 + 1/2 + ... + 1/n; only in d_inf is it 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._checks import check_exponent
from lipscope._display import Displayed
from lipscope._types import Ball, Domain, UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot
from lipscope.mean_field.measures import check_liftable
from lipscope.theorems import geshkovski2023


def w2_bound(f: SelfAttention, R: float) -> float:
    """W2 without mask: ||V|| (a + (1 + a_b) e^{a_b}), half the exponent of the published bound."""
    return _evaluate(geshkovski2023.sharper_wasserstein_upper, f, R, causal=False)


def w2_bound_geshkovski2023(f: SelfAttention, R: float) -> float:
    """W2 without mask, as published: ||V|| (1 + 3a) e^{2a}; stated without query bias."""
    check_liftable(f)
    if f.biases is not None and f.biases[0] is not None:
        raise UserError("this bound needs a layer without a query bias; use w2_bound")
    return _evaluate(geshkovski2023.wasserstein_upper, f, R, causal=False)


def w_inf_bound(f: SelfAttention, R: float) -> float:
    """W_inf without mask and d_inf with one: ||V|| (1 + a + a_b); no exponential."""
    return _evaluate(geshkovski2023.largest_token_upper, f, R)


def w_p_bound(f: SelfAttention, R: float, p: float = 2) -> float:
    """W_p without mask: ||V|| (a + (1 + c a_b) e^{2 a_b / p}), c = max(1, 2^{2/p - 1})."""
    check_exponent(p)
    if math.isinf(p):
        return _evaluate(geshkovski2023.largest_token_upper, f, R, causal=False)
    return _evaluate(geshkovski2023.transport_upper(p, {1.0: 0.0}), f, R, causal=False)


def d_p_bound(f: SelfAttention, R: float, p: float = 2) -> float:
    """d_p of causal attention, p > 1: ||V|| (a + (1 + c a_b) (q/(q-1) e^{2 a_b})^{q/p}).

    c = max(1, 2^{2q/p - 1}) and the best 1 < q <= p. At q = p this is
    ||V|| (a + p/(p-1) (1 + 2 a_b) e^{2 a_b}); at p = inf it is w_inf_bound.
    """
    check_exponent(p)
    if p == 1:
        raise UserError(
            f"p must be above 1, got {p!r}; averaging over the past has no constant in d_1"
        )
    if math.isinf(p):
        return _evaluate(geshkovski2023.largest_token_upper, f, R, causal=True)
    theorem = geshkovski2023.transport_upper(p, geshkovski2023.masked_prices(p))
    return _evaluate(theorem, f, R, causal=True)


def check_scores(f: SelfAttention) -> None:
    """Raise unless the scores are plain dot products, the only ones these theorems cover."""
    check_liftable(f)
    if not isinstance(f.kernel, Dot) or f.kernel.softcap is not None:
        raise UserError(
            "this theorem needs dot-product scores, but the layer has an L2 kernel or a softcap"
        )


def _evaluate(
    theorem: Callable[[SelfAttention, Domain], float],
    f: SelfAttention,
    R: float,
    causal: bool | None = None,
) -> float:
    """Evaluate a theorem for a layer with this mask; None covers both."""
    check_liftable(f)
    if causal is not None and f.causal != causal:
        raise UserError(
            "this bound is for attention without a mask; "
            "for causal attention use d_p_bound or w_inf_bound"
            if f.causal
            else "this bound is for causal attention; without a mask use w2_bound or w_inf_bound"
        )
    check_scores(f)
    return theorem(f.double(), Ball(R, 1))  # n = 1: no theorem on measures depends on it


STEPS = 1000
"""Maximum number of iterations; any field gives a lower bound of the constant."""


@dataclass(frozen=True, eq=False)
class Averaging(Displayed):
    """The d_p constant of averaging n tokens over their past, and the field that attains it."""

    constant: float
    field: Tensor


def averaging(n: int, p: float = 2) -> Averaging:
    """Return the largest ||H x||_p / ||x||_p, by power iteration.

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
