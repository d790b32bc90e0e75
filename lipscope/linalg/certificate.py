"""Probabilistic upper bound on the largest singular value from the Golub-Kahan coefficients of a
random start.

With T_k the Lanczos matrix of J'J, q_k its orthonormal polynomial and y_1 a top eigenvector, 1 =
||q_k(J'J) v_1|| >= |<v_1, y_1>| q_k(lambda_1). A start drawn uniformly on the sphere has |<v_1,
y_1>| >= c with probability 1 - delta, so lambda_1 lies below the root of q_k = 1/c, for every k at
once. Rounding, a source of relative size e in every step of the recurrence, changes the equation to

    (1 + e) / q_k(lambda) + e lambda sum_m [(lambda - T_k)^{-1}]_{1m} = c,

whose left side decreases on (theta_k, infinity). More steps make the first term small, but the
second, the noise, only larger: where the noise alone is c, there is a floor that no further step
gets below. See docs/theory/solver.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope._types import UserError

UNIT = 2.0**-53
GRID = 128
ROUNDS = 3

MISSED = "gap not reached: "
UNCERTIFIED = MISSED + "there is no upper bound"
NO_VALUE = MISSED + "there is no value"
SCORES = MISSED + (
    "rounding of the scores alone is wider; request a wider gap or scale the input down"
)
MEMORY = MISSED + (
    "the Krylov vectors outgrew their memory; raise Solver's memory, use basis='host' or "
    "request a wider gap"
)
STEPS = MISSED + "the steps are used up; raise Solver's max_steps or request a wider gap"
NOISE = MISSED + (
    "rounding in the products allows no tighter bound; request a wider gap or raise Solver's "
    "failure"
)

SEARCHED = 1 - 1e-4
"""Share of the distance that is aimed at: the last step of the search for the bound is finer."""


def smallest_overlap(size: int, failure: float) -> float:
    """c with P(|<v, y>| < c) <= failure for v uniform on the unit sphere of R^size, y fixed.

    <v, y>^2 is Beta(1/2, (size-1)/2); its density is below x^{-1/2} / B, and
    B(1/2, z) >= sqrt(pi / z).
    """
    if size == 1:
        return 1.0
    if size == 2:
        return math.sin(math.pi * failure / 2)
    return failure * math.sqrt(math.pi / (2 * (size - 1)))


def perturbation(noise: Float[Tensor, "B"], drift: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """e from the noise seen in one product and the drift of the recurrence, relative to theta."""
    return 4 * torch.clamp(noise, min=2 * UNIT) + drift


def polynomial_bound(
    a: Float[Tensor, "B k"],
    b: Float[Tensor, "B k"],
    overlap: float,
    rounding: Float[Tensor, "B"],
    decaying: bool = True,
) -> Float[Tensor, "B"]:
    """Upper bounds on sigma from coefficients a_1..a_k, b_1..b_k, rounded up.

    Columns past a member's last step hold NaN. `rounding` is the relative size of the perturbation
    of one product. Members without a bound get infinity. Without `decaying`, the noise floor:
    what no bound gets below, whatever further steps bring.
    """
    T = _recurrence(a, b, rounding)
    inner = T.beta[:, :-1] * T.taken[:, 1:]
    matrix = torch.diag_embed(T.alpha) + torch.diag_embed(inner, 1) + torch.diag_embed(inner, -1)
    theta = torch.linalg.eigvalsh(matrix)[:, -1]
    best = torch.full_like(theta, torch.inf)
    low = -16.0 * torch.ones_like(theta)
    high = 16.0 * torch.ones_like(theta)
    for _ in range(ROUNDS):
        exponent = low[:, None] + (high - low)[:, None] * torch.linspace(
            0, 1, GRID, dtype=torch.float64
        )
        lam = theta[:, None] * (1 + 10**exponent)
        decay, noise = _terms(lam, T)
        enough = (decay + noise if decaying else noise) <= overlap
        first = enough.int().argmax(dim=1, keepdim=True)
        found = enough.any(dim=1)
        best = torch.where(found, lam.gather(1, first)[:, 0], best)
        high = exponent.gather(1, first)[:, 0]
        low = exponent.gather(1, (first - 1).clamp_min(0))[:, 0]
    return best.sqrt() * (1 + 16 * UNIT)


def bounded_by(
    candidate: Float[Tensor, "B"],
    a: Float[Tensor, "B k"],
    b: Float[Tensor, "B k"],
    overlap: float,
    rounding: Float[Tensor, "B"],
) -> tuple[Bool[Tensor, "B"], Bool[Tensor, "B"]]:
    """Whether the candidate is an upper bound on sigma, and whether it is above the noise floor."""
    decay, noise = _terms(candidate.square()[:, None], _recurrence(a, b, rounding))
    return (decay + noise)[:, 0] <= overlap, noise[:, 0] < overlap


class _Recurrence(NamedTuple):
    """T_k of each member, which of its columns there are, and the relative error of one step."""

    alpha: Tensor
    beta: Tensor
    taken: Tensor
    source: Tensor


def _recurrence(a: Tensor, b: Tensor, rounding: Tensor) -> _Recurrence:
    taken = ~a.isnan()
    a = a.nan_to_num()
    b = b.nan_to_num()
    previous = torch.cat([torch.zeros_like(b[:, :1]), b[:, :-1]], dim=1)
    alpha = (a.square() + previous.square()) * taken
    # Three perturbed products make one step of the recurrence of J'J: a e + b e + sigma e.
    source = 3 * rounding
    return _Recurrence(alpha, a * b, taken, source[:, None])


def _terms(lam: Tensor, T: _Recurrence) -> tuple[Tensor, Tensor]:
    """Both terms of the left side at every lambda [B, G], rounded up; infinite below theta_k."""
    k = T.alpha.shape[1]
    above = torch.ones_like(lam, dtype=torch.bool)  # lambda > theta_k
    # s_1 = lambda - alpha_1, s_i = lambda - alpha_i - beta_{i-1}^2 / s_{i-1};  q_k = prod s_i /
    # beta_i, whose logarithm is rounded down
    log_q = torch.zeros_like(lam)
    margin = torch.zeros_like(lam)
    s = torch.ones_like(lam)
    for i in range(k):
        here = T.taken[:, i, None]
        couple = T.beta[:, i - 1, None].square() / s if i else 0.0
        s = torch.where(here, lam - T.alpha[:, i, None] - couple, s)
        above &= (s > 0) | ~here
        log_s = s.clamp_min(1e-320).log()
        log_beta = T.beta[:, i, None].log()
        log_q += torch.where(here, log_s - log_beta, 0.0)
        margin += torch.where(here, log_s.abs() + log_beta.abs().nan_to_num(posinf=0.0), 0.0)
    log_q = log_q - ((k + 4) * UNIT * margin + 4 * k * UNIT)
    # sum_m [(lambda - T_k)^{-1}]_{1m} = r / t, eliminating upwards: all quantities are positive
    t = torch.ones_like(lam)
    r = torch.zeros_like(lam)
    for i in reversed(range(k)):
        here = T.taken[:, i, None]
        inner = T.taken[:, i + 1, None] if i + 1 < k else torch.zeros_like(here)
        couple = torch.where(inner, T.beta[:, i, None].square() / t, 0.0)
        r_next = 1 + torch.where(inner, T.beta[:, i, None] * r / t, 0.0)
        t = torch.where(here, lam - T.alpha[:, i, None] - couple, t)
        r = torch.where(here, r_next, r)
        above &= (t > 0) | ~here
    decay = (1 + T.source) * torch.exp(-log_q)
    noise = T.source * lam * (r / t)
    decay, noise = (torch.where(above & ~x.isnan(), x, torch.inf) for x in (decay, noise))
    return decay, noise


def check_gap(gap: object) -> None:
    """Raise UserError unless `gap` is None or a number between 0 and 1."""
    if gap is None:
        return
    if isinstance(gap, bool) or not isinstance(gap, int | float):
        raise UserError(
            f"gap, the relative distance upper / lower - 1, must be a number, got {gap!r}"
        )
    if not 0 < gap < 1:
        hint = f"; for upper / lower <= {gap:g} give {gap - 1:.6g}" if 1 < gap < 2 else ""
        raise UserError(
            f"gap, the relative distance upper / lower - 1, must lie between 0 and 1, "
            f"got {gap:g}{hint}"
        )


def widening(rounding: Tensor) -> Tensor:
    """The factor by which rounding of the map parts upper and lower; no bound beyond 1/2."""
    r = rounding.nan_to_num(nan=0.5).clamp(max=0.5)
    return (1 + r) / (1 - r)
