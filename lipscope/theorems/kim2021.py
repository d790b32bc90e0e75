"""Kim, Papamakarios, Mnih: dot-product attention has no global constant, L2 attention has one.

Their values are V = W_V' A with A made of the query weights, so that V = M Q: what moves a value
also moves the distances. The bounds below are stated for any M; ||M_h|| ||Q_h|| is at most their
||W_Q||^2 ||W_V|| / sqrt(k), which enters the 2-norm bound squared: the fourth power of ||W_Q||
under the root, not the second as it is often quoted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from scipy.special import lambertw
from torch import Tensor

from lipscope._types import Ball, Domain, Everywhere
from lipscope.attention.layer import SelfAttention
from lipscope.theorems.factored_values import Split, splits
from lipscope.theorems.rounding import (
    TINY,
    down,
    gamma,
    norm_down,
    norm_up,
    row_sum_up,
    up,
)
from lipscope.theorems.statement import (
    DISTANCE,
    HEADS_APART,
    NO_ADDITIVE,
    NO_QUERY_BIAS,
    PLAIN_DOT,
    PLAIN_SCORES,
    SELF_SEEN,
    TWO_TOKENS,
    Bound,
    Head,
    Hypothesis,
    best_head,
    heads_of,
    hypotenuse,
    visibility,
)


def phi_inverse(keys: int) -> float:
    """Return phi^-1(N - 1) with phi(x) = x e^(x + 1).

    It is the largest mean score distance of a query that sees itself among N keys.
    """
    return up(float(lambertw((keys - 1) / math.e).real), 64) if keys > 1 else 0.0


def distance_upper(f: SelfAttention, domain: Domain) -> float:
    """(sum_i (4 phi_i + 1)^2)^(1/2) ||M|| ||Q||, phi_i = phi^-1(n_i - 1), query i sees n_i keys.

    Values V = M Q + E add ||E|| (1 + 4 sqrt(s phi_i) ||Q|| R) to the row of query i.
    """
    means = [phi_inverse(c) for c in visibility(f, domain.n).counts.tolist() if c > 0] or [0.0]

    def head(h: Head, split: Split) -> float:
        through = up((spectral(split.M) + split.drift) * spectral(h.one.Q))
        far = longest_query(h, domain, spectral) if split.spectral > 0 else 0.0
        rest = split.spectral
        rows = [through * (4 * p + 1) + rest * (1 + 4 * math.sqrt(p) * far) for p in means]
        return h.factor * hypotenuse(rows)

    apart = [hypotenuse([head(h, split) for h, split in way]) for way in splits(f, domain)]
    return up(min(apart, default=math.inf) * output_norm(f, spectral))


def longest_query(h: Head, domain: Domain, norm: Callable[[Tensor], float]) -> float:
    """sqrt(s) ||Q|| R."""
    R = domain.R if isinstance(domain, Ball) else math.inf
    size = norm(h.one.Q)
    return max(TINY, up(math.sqrt(h.scale) * size * R)) if size > 0 else 0.0


def output_norm(f: SelfAttention, norm: Callable[[Tensor], float]) -> float:
    return 1.0 if f.O is None else norm(f.O)


def spectral(M: Tensor) -> float:
    return norm_up(M).item()


def largest_coordinate_upper(f: SelfAttention, domain: Domain) -> float:
    """(4 sqrt(k) phi^-1(N - 1) + 1) ||O||_inf max_h ||M_h||_inf ||Q_h||_inf.

    Norms are largest absolute row sums. Values V = M Q + E add
    ||E_h||_inf + 4 sqrt(k s phi) ||Q_h||_inf R |E_h| to a head, |E_h| being the longest row of E_h.
    """
    mean = phi_inverse(visibility(f, domain.n).most_keys)

    def head(h: Head, split: Split) -> float:
        through = (row_sum_up(split.M) + split.drift) * row_sum_up(h.one.Q)
        # The constant of identity weights, times the norms of M and Q.
        value = up(4 * math.sqrt(h.k) * mean + 1) * through
        if split.row_sum > 0:
            far = longest_query(h, domain, row_sum_up)
            value += split.row_sum + 4 * math.sqrt(h.k * mean) * far * split.row
        return h.factor * up(value)

    largest = [max(head(h, split) for h, split in way) for way in splits(f, domain)]
    return up(min(largest, default=math.inf) * output_norm(f, row_sum_up))


def _quadratic_case(f: SelfAttention, h: Head, domain: Domain) -> tuple[float, Tensor]:
    """||V (c R^2 u u' A + I / n)||, c about 1.

    The input is 0 for a token that sees all others, R u and -R u in turn for the rest.
    """
    assert isinstance(domain, Ball)
    n = domain.n
    R = domain.R
    u = _reactive_direction(h)
    # The covariance of 0 and n - 1 tokens +-R u; an odd one out moves the mean off 0.
    odd = (n - 1) % 2
    covariance = R * R * ((n - 1) / n - odd / n**2)
    one = torch.eye(h.d, dtype=torch.float64, device=u.device)
    M = h.V @ (covariance * torch.outer(u, u @ h.A) + one / n)
    slack = 4 * gamma(2 * h.steps + 32) * h.V_size * (covariance * h.A_size + 1)
    signs = 1 - 2 * (torch.arange(n - 1, device=u.device) % 2).double()
    centre = int((visibility(f, n).counts == n).nonzero()[0])
    order = [i for i in range(n) if i != centre]
    X = u.new_zeros(n, h.d)
    X[order] = R * signs[:, None] * u
    return down(h.factor * (norm_down(M) - slack)), X


quadratic_lower, quadratic_witness = best_head(_quadratic_case)


def _reactive_direction(h: Head) -> Tensor:
    """Return a unit vector u with large |Vu| |A'u|."""
    v = torch.linalg.svd(h.V)[2][0]
    a = torch.linalg.svd(h.A)[0][:, 0]
    candidates = [v, a, *(x / x.norm() for x in (v + a, v - a) if x.norm() > 1e-3)]
    best = max(candidates, key=lambda u: ((h.V @ u).norm() * (h.A.T @ u).norm()).item())
    # Slightly shorter than one, so that R u is in the ball whatever the rounding.
    return best * (1 - gamma(h.d + 8))


def no_global_constant(f: SelfAttention, domain: Domain) -> float:
    """Infinity if some direction u moves both a value and a score (Vu, A'u not 0), else 0."""
    for h in heads_of(f, folded=True):
        u = _reactive_direction(h)
        value = (h.V @ u).norm().item() - gamma(4 * h.steps) * h.V_size
        score = (h.A.T @ u).norm().item() - gamma(4 * h.steps) * h.A_size
        if not min(value, score) <= 0:
            return math.inf
    return 0.0


TIED = Hypothesis(
    "queries and keys are the same: K = Q with the same bias "
    "(untied, a query need not be near its own key)",
    lambda f, _: f.groups == f.heads and torch.equal(f.Q, f.K) and _tied_biases(f),
)
FACTORED = Hypothesis(
    "on inputs of any size, the values factor through the queries exactly: V = M Q in every head, "
    "by definition, because Q is invertible on the tokens, or to the last bit",
    lambda f, domain: not isinstance(domain, Everywhere) or bool(splits(f, domain)),
)
ONE_SEES_ALL = Hypothesis(
    "some token sees all tokens", lambda f, d: bool((visibility(f, d.n).counts == d.n).any())
)


def _tied_biases(f: SelfAttention) -> bool:
    bq, bk, _ = f.biases or (None, None, None)
    return (bq is None and bk is None) or (
        bq is not None and bk is not None and torch.equal(bq, bk)
    )


RESIDUAL = (
    "and, where V is not M Q, a term that grows with the tokens: "
    "docs/theory/bounds.md#values-that-do-not-factor"
)
L2_HYPOTHESES = (DISTANCE, PLAIN_SCORES, NO_ADDITIVE, TIED, SELF_SEEN, FACTORED)
DOT_HYPOTHESES = (
    *PLAIN_DOT,
    NO_ADDITIVE,
    NO_QUERY_BIAS,
    HEADS_APART,
    TWO_TOKENS,
    ONE_SEES_ALL,
)

BOUNDS = (
    Bound(
        name="Kim et al., L2 attention",
        domain=(Ball, Everywhere),
        hypotheses=L2_HYPOTHESES,
        cite="kim2021",
        where="Theorem 3.2 (2-norm), with the fourth power: docs/theory/bounds.md#l2-attention "
        + RESIDUAL,
        fn=distance_upper,
    ),
    Bound(
        name="Kim et al., L2 attention, largest coordinate",
        norm="inf",
        domain=(Ball, Everywhere),
        hypotheses=L2_HYPOTHESES,
        cite="kim2021",
        where="Theorem 3.2 (infinity-norm) " + RESIDUAL,
        fn=largest_coordinate_upper,
    ),
    Bound(
        name="Kim et al., rate R^2",
        kind="lower",
        domain=Ball,
        hypotheses=DOT_HYPOTHESES,
        cite="kim2021",
        where="Theorem 3.1 (not Lipschitz), its sequence: "
        "docs/theory/bounds.md#kim-et-al-no-global-constant",
        fn=quadratic_lower,
        witness=quadratic_witness,
    ),
    Bound(
        name="Kim et al., no global constant",
        kind="lower",
        domain=Everywhere,
        hypotheses=DOT_HYPOTHESES,
        cite="kim2021",
        where="Theorem 3.1 (not Lipschitz)",
        fn=no_global_constant,
    ),
)
