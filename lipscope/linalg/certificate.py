"""Probabilistic upper bound on the largest singular value from the Golub-Kahan coefficients of a random start.

With T_k the Lanczos matrix of J'J, q_k its orthonormal polynomial and y_1 a top eigenvector,
1 = ||q_k(J'J) v_1|| >= |<v_1, y_1>| q_k(lambda_1). A start drawn uniformly on the sphere has |<v_1, y_1>| >= c with
probability 1 - delta, so lambda_1 lies below the root of q_k = 1/c, for every k at once. Rounding, a source of relative
size e in every step of the recurrence, changes the equation to

    (1 + e) / q_k(lambda) + e lambda sum_m [(lambda - T_k)^{-1}]_{1m} = c,

whose left side decreases on (theta_k, infinity). See docs/theory/solver.md for the proof.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

UNIT = 2.0**-53
GRID = 128
ROUNDS = 3


def smallest_overlap(size: int, failure: float) -> float:
    """c with P(|<v, y>| < c) <= failure for v uniform on the unit sphere of R^size, y fixed.

    <v, y>^2 is Beta(1/2, (size-1)/2); its density is below x^{-1/2} / B, and B(1/2, z) >= sqrt(pi / z).
    """
    if size == 1:
        return 1.0
    if size == 2:
        return math.sin(math.pi * failure / 2)
    return failure * math.sqrt(math.pi / (2 * (size - 1)))


def polynomial_bound(
    a: Float[Tensor, "B k"], b: Float[Tensor, "B k"], overlap: float, rounding: Float[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """Upper bounds on sigma from coefficients a_1..a_k, b_1..b_k; columns past a member's last step hold NaN.

    `rounding` is the relative size of the perturbation of one product. Members without a bound get infinity.
    """
    taken = ~a.isnan()
    a, b = a.nan_to_num(), b.nan_to_num()
    previous = torch.cat([torch.zeros_like(b[:, :1]), b[:, :-1]], dim=1)
    alpha = (a.square() + previous.square()) * taken
    beta = a * b
    theta = _largest_eigenvalue(alpha, beta, taken)
    # Three perturbed products make one step of the recurrence of J'J: a e + b e + sigma e.
    source = 3 * rounding
    best = torch.full_like(theta, torch.inf)
    low, high = -16.0 * torch.ones_like(theta), 16.0 * torch.ones_like(theta)
    for _ in range(ROUNDS):
        exponent = low[:, None] + (high - low)[:, None] * torch.linspace(0, 1, GRID, dtype=torch.float64)
        lam = theta[:, None] * (1 + 10**exponent)
        enough = _left_side(lam, alpha, beta, taken, source) <= overlap
        first = enough.int().argmax(dim=1, keepdim=True)
        found = enough.any(dim=1)
        best = torch.where(found, lam.gather(1, first)[:, 0], best)
        high = exponent.gather(1, first)[:, 0]
        low = exponent.gather(1, (first - 1).clamp_min(0))[:, 0]
    return best.sqrt() * (1 + 16 * UNIT)


def _left_side(lam: Tensor, alpha: Tensor, beta: Tensor, taken: Tensor, source: Tensor) -> Tensor:
    """The decreasing function of lambda above, [B, GRID], rounded up; infinity where lambda <= theta_k."""
    k = alpha.shape[1]
    log_q, margin, above = (
        torch.zeros_like(lam),
        torch.zeros_like(lam),
        torch.ones_like(lam, dtype=torch.bool),
    )
    # s_1 = lambda - alpha_1, s_i = lambda - alpha_i - beta_{i-1}^2 / s_{i-1};  q_k = prod s_i / beta_i
    s = torch.ones_like(lam)
    for i in range(k):
        here = taken[:, i, None]
        couple = beta[:, i - 1, None].square() / s if i else 0.0
        s = torch.where(here, lam - alpha[:, i, None] - couple, s)
        above &= (s > 0) | ~here
        log_s, log_beta = s.clamp_min(1e-320).log(), beta[:, i, None].log()
        log_q += torch.where(here, log_s - log_beta, 0.0)
        margin += torch.where(here, log_s.abs() + log_beta.abs().nan_to_num(posinf=0.0), 0.0)
    log_q -= (k + 4) * UNIT * margin + 4 * k * UNIT
    # First component of (lambda - T_k)^{-1} 1, eliminating upwards: all quantities positive.
    t, r = torch.ones_like(lam), torch.zeros_like(lam)
    for i in reversed(range(k)):
        here = taken[:, i, None]
        inner = taken[:, i + 1, None] if i + 1 < k else torch.zeros_like(here)
        t_next = lam - alpha[:, i, None] - torch.where(inner, beta[:, i, None].square() / t, 0.0)
        r_next = 1 + torch.where(inner, beta[:, i, None] * r / t, 0.0)
        t, r = torch.where(here, t_next, t), torch.where(here, r_next, r)
        above &= (t > 0) | ~here
    value = (1 + source[:, None]) * torch.exp(-log_q) + source[:, None] * lam * r / t
    return torch.where(above & ~value.isnan(), value, torch.inf)


def _largest_eigenvalue(alpha: Tensor, beta: Tensor, taken: Tensor) -> Tensor:
    """theta_k, the largest eigenvalue of T_k."""
    inner = beta[:, :-1] * taken[:, 1:]
    T = torch.diag_embed(alpha) + torch.diag_embed(inner, 1) + torch.diag_embed(inner, -1)
    return torch.linalg.eigvalsh(T)[:, -1]
