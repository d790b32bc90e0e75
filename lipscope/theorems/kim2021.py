"""Kim, Papamakarios, Mnih: dot-product attention has no global constant; L2 attention has one, in two norms.

Their values are V = W_V' A with A made of the query weights, so that V = M Q: what moves a value also moves the
distances. The bounds below are stated for any M; ||M_h|| ||Q_h|| is at most their ||W_Q||^2 ||W_V|| / sqrt(k), which
enters the 2-norm bound squared: the fourth power of ||W_Q|| under the root, not the second as it is often quoted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from scipy.special import lambertw
from torch import Tensor

from lipscope._types import Ball, Domain, Everywhere
from lipscope.attention.layer import SelfAttention
from lipscope.theorems.distance_columns import column_sum, key_reaction
from lipscope.theorems.heads import Head, Sight, heads_of, hypotenuse, sight
from lipscope.theorems.rounding import U, down, frobenius_up, gamma, norm_down, norm_up, row_sum_up, scaled_up, up
from lipscope.theorems.statement import (
    DISTANCE,
    DOT,
    HEADS_APART,
    NO_ADDITIVE,
    NO_QUERY_BIAS,
    NO_ROPE,
    PLAIN_SCORES,
    SELF_SEEN,
    TWO_TOKENS,
    Bound,
    Hypothesis,
)


def mean_distance(keys: int) -> float:
    """phi^-1(N - 1), phi(x) = x e^(x + 1): the largest mean score distance of a query that sees itself among N keys."""
    return up(float(lambertw((keys - 1) / math.e).real), 64) if keys > 1 else 0.0


def value_factor(h: Head) -> Tensor | None:
    """M with V = M Q, or None where the values do not factor through the queries."""
    Q = h.one.Q
    M = h.V @ torch.linalg.pinv(Q)
    # Where Q is invertible on the tokens what is left over enters the bound; elsewhere it must be rounding of V.
    allowed = h.V_size + (_size(M) * _size(Q) if Q.shape[0] >= Q.shape[1] else 0.0)
    return M if _size(h.V - M @ Q) <= 64 * U * max(Q.shape) * allowed else None


def _factor(h: Head) -> tuple[Tensor, float]:
    """M, and a bound of what V - M Q adds to it where Q is invertible on the tokens, in either norm."""
    M = value_factor(h)
    assert M is not None
    Q = h.one.Q
    if Q.shape[0] < Q.shape[1]:
        return M, 0.0
    left = torch.linalg.pinv(Q)
    skew = norm_up(left @ Q - torch.eye(Q.shape[1], dtype=Q.dtype)).item() + gamma(h.steps) * _size(left) * _size(Q)
    missed = _size(h.V - M @ Q) + gamma(h.steps) * (_size(M) * _size(Q) + h.V_size)
    return M, math.inf if skew >= 0.5 else missed * _size(left) / (1 - skew) * math.sqrt(max(M.shape))


def _factor_norm(h: Head, norm: Callable[[Tensor], float]) -> float:
    """norm(M) norm(Q)."""
    M, rest = _factor(h)
    return up((norm(M) + rest) * norm(h.one.Q))


def _size(M: Tensor) -> float:
    return frobenius_up(M).item()


def _spectral(M: Tensor) -> float:
    return norm_up(M).item()


def distance_upper(f: SelfAttention, domain: Domain) -> float:
    """(sum_i (4 phi^-1(n_i - 1) + 1)^2)^(1/2) ||M|| ||Q||, n_i the number of keys that query i sees."""
    rows = [4 * mean_distance(c) + 1 for c in sight(f, domain.n).counts.tolist() if c > 0]
    return _over_heads(f, hypotenuse(rows or [0.0]))


def tighter_distance_upper(f: SelfAttention, domain: Domain) -> float:
    """(sqrt(kappa) + 2 phi + 2 sqrt(tau)) ||O diag(M_h / m_h)|| ||diag(m_h) Q||, m_h = ||M_h||.

    Column sums of P are at most kappa, of what keys react with tau.
    """
    size, power = _through_heads(f)
    return scaled_up(up(distance_reaction(sight(f, domain.n)) * size), power)


def distance_reaction(seen: Sight) -> float:
    """What L2 attention with identity weights reacts with at most, in norm 2."""
    return up(math.sqrt(column_sum(seen)) + 2 * mean_distance(seen.most_keys) + 2 * math.sqrt(key_reaction(seen)))


def _over_heads(f: SelfAttention, reaction: float) -> float:
    apart = hypotenuse([h.factor * _factor_norm(h, _spectral) for h in heads_of(f, folded=False)])
    return up(reaction * apart * (1.0 if f.O is None else norm_up(f.O).item()))


def _through_heads(f: SelfAttention) -> tuple[float, int]:
    """All heads as one product, O diag(M_h / m_h), then each head by itself, then diag(m_h) Q: s and p of s 2^p."""
    rights, lefts, powers, rest = [], [], [], 0.0
    for h in heads_of(f, folded=False):
        M, missed = _factor(h)
        m = up(_spectral(M) + missed)
        if math.inf in (m, h.factor):
            return math.inf, 0
        Q, power = _of_order_one(h.one.Q)
        share, own = math.frexp(m)
        rights.append(share * Q)
        powers.append(power + own + math.frexp(h.factor)[1] - 1)
        lefts.append(M / m if m > 0 else M)
        rest = max(rest, missed / m if m > 0 else 0.0)
    top = max(powers)
    right = torch.cat([torch.ldexp(Q, torch.tensor(power - top)) for Q, power in zip(rights, powers, strict=True)])
    rounding = gamma(2 * sum(M.shape[0] for M in lefts) + 16)
    across = up(_spectral(right) + rounding * _size(right))
    if f.O is None:
        return across, top
    O, power = _of_order_one(f.O)
    left = O @ torch.block_diag(*lefts)
    error = rounding * _size(O) * math.hypot(*(_size(M) for M in lefts)) + rest * _spectral(O)
    return up(across * (_spectral(left) + error)), top + power


def _of_order_one(W: Tensor) -> tuple[Tensor, int]:
    """W 2^-p and p, the largest entry between a half and one; a weight of zeros stays what it is."""
    power = math.frexp(W.abs().max().item())[1]
    return torch.ldexp(W, torch.tensor(-power)), power


def largest_coordinate_upper(f: SelfAttention, domain: Domain) -> float:
    """(4 sqrt(k) phi^-1(N - 1) + 1) ||O||_inf max_h ||M_h||_inf ||Q_h||_inf, norms being largest absolute row sums."""
    largest = max(h.factor * _factor_norm(h, row_sum_up) for h in heads_of(f, folded=False))
    reaction = coordinate_reaction(sight(f, domain.n), f.Q.shape[0] // f.heads)
    return up(reaction * largest * (1.0 if f.O is None else row_sum_up(f.O)))


def coordinate_reaction(seen: Sight, k: int) -> float:
    """The same for the largest coordinate, in heads of size k."""
    return up(4 * math.sqrt(k) * mean_distance(seen.most_keys) + 1)


def quadratic_lower(f: SelfAttention, domain: Domain) -> float:
    """||V (c R^2 u u' A + I / n)||, c about 1: a token at 0 among tokens at +-R u; grows like R^2."""
    return max(_quadratic_case(f, h, domain)[0] for h in heads_of(f, folded=True))


def quadratic_witness(f: SelfAttention, domain: Domain) -> Tensor:
    """Zero where a token sees all, R u and -R u in turn elsewhere."""
    return max((_quadratic_case(f, h, domain) for h in heads_of(f, folded=True)), key=lambda case: case[0])[1]


def _quadratic_case(f: SelfAttention, h: Head, domain: Domain) -> tuple[float, Tensor]:
    assert isinstance(domain, Ball)
    n, R = domain.n, domain.R
    u = _reactive_direction(h)
    odd = (n - 1) % 2
    covariance = R * R * ((n - 1) / n - odd / n**2)
    M = h.V @ (covariance * torch.outer(u, u @ h.A) + torch.eye(h.d, dtype=torch.float64) / n)
    slack = 4 * gamma(2 * h.steps + 32) * h.V_size * (covariance * h.A_size + 1)
    signs = 1 - 2 * (torch.arange(n - 1) % 2).double()
    centre = int((sight(f, n).counts == n).nonzero()[0])
    order = [i for i in range(n) if i != centre]
    X = torch.zeros(n, h.d, dtype=torch.float64)
    X[order] = R * signs[:, None] * u
    return down(h.factor * (norm_down(M) - slack)), X


def _reactive_direction(h: Head) -> Tensor:
    """A unit u with |Vu| |A'u| large."""
    v, a = torch.linalg.svd(h.V)[2][0], torch.linalg.svd(h.A)[0][:, 0]
    candidates = [v, a, *(x / x.norm() for x in (v + a, v - a) if x.norm() > 1e-3)]
    best = max(candidates, key=lambda u: ((h.V @ u).norm() * (h.A.T @ u).norm()).item())
    return best * (1 - gamma(h.d + 8))


def no_global_constant(f: SelfAttention, domain: Domain) -> float:
    """Infinite where some direction moves both a value and a score, u with Vu and A'u not 0; else 0, nothing said."""
    if all(_reaction(h) <= 0 for h in heads_of(f, folded=True)):
        return 0.0
    return math.inf


def _reaction(h: Head) -> float:
    u = _reactive_direction(h)
    value = (h.V @ u).norm().item() - gamma(4 * h.steps) * h.V_size
    score = (h.A.T @ u).norm().item() - gamma(4 * h.steps) * h.A_size
    return min(value, score)


TIED = Hypothesis(
    "queries and keys are the same: K = Q with the same bias (untied, a query need not be near its own key)",
    lambda f, _: f.groups == f.heads and torch.equal(f.Q, f.K) and _tied_biases(f),
)
FACTORED = Hypothesis(
    "the values factor through the queries, V = M Q in every head",
    lambda f, _: all(value_factor(h) is not None for h in heads_of(f, folded=False)),
)
ONE_SEES_ALL = Hypothesis("some token sees all tokens", lambda f, d: bool((sight(f, d.n).counts == d.n).any()))


def _tied_biases(f: SelfAttention) -> bool:
    bq, bk, _ = f.biases or (None, None, None)
    return (bq is None and bk is None) or (bq is not None and bk is not None and torch.equal(bq, bk))


L2_HYPOTHESES = (DISTANCE, PLAIN_SCORES, NO_ADDITIVE, TIED, SELF_SEEN, FACTORED)
DOT_HYPOTHESES = (DOT, PLAIN_SCORES, NO_ROPE, NO_ADDITIVE, NO_QUERY_BIAS, HEADS_APART, TWO_TOKENS, ONE_SEES_ALL)

BOUNDS = (
    Bound(
        "Kim et al., L2 attention",
        "upper",
        "2",
        Everywhere,
        L2_HYPOTHESES,
        "kim2021",
        "Theorem 3.2 (2-norm), with the fourth power: docs/theory/bounds.md#l2-attention",
        distance_upper,
    ),
    Bound(
        "L2 attention",
        "upper",
        "2",
        Everywhere,
        L2_HYPOTHESES,
        "lipscope",
        "docs/theory/bounds.md#l2-attention",
        tighter_distance_upper,
    ),
    Bound(
        "Kim et al., L2 attention, largest coordinate",
        "upper",
        "inf",
        Everywhere,
        L2_HYPOTHESES,
        "kim2021",
        "Theorem 3.2 (infinity-norm)",
        largest_coordinate_upper,
    ),
    Bound(
        "Kim et al., rate R^2",
        "lower",
        "2",
        Ball,
        DOT_HYPOTHESES,
        "kim2021",
        "Theorem 3.1 (not Lipschitz), its sequence: docs/theory/bounds.md#kim-et-al-no-global-constant",
        quadratic_lower,
        quadratic_witness,
    ),
    Bound(
        "Kim et al., no global constant",
        "lower",
        "2",
        Everywhere,
        DOT_HYPOTHESES,
        "kim2021",
        "Theorem 3.1 (not Lipschitz)",
        no_global_constant,
    ),
)
