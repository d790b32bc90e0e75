"""Castin, Ablin, Peyre: on tokens in a ball, attention has a constant of order R^2 sqrt(n).

Their bounds from above and below, sharper versions of both, and the limit of large radii.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope._types import Ball, Domain, Point
from lipscope.attention.layer import SelfAttention
from lipscope.theorems.input_dependent import features, terms
from lipscope.theorems.rounding import TINY, U, down, gamma, length_up, norm_up, up
from lipscope.theorems.statement import (
    DOT,
    FULL_OR_CAUSAL,
    HEADS_APART,
    NO_ADDITIVE,
    NO_QUERY_BIAS,
    PLAIN_DOT,
    PLAIN_SCORES,
    ROTATION,
    SINKS_UNBIASED,
    TWO_TOKENS,
    Bound,
    Head,
    Hypothesis,
    best_head,
    heads_of,
    over_heads,
    reach,
    visibility,
)


def theorem_upper(f: SelfAttention, domain: Domain) -> float:
    """sqrt(3) sum_h ||O_h V_h|| (a^2 + 4n a_b^2 + n)^(1/2).

    Without a query bias a_b = a = ||A|| R^2, as published.
    """
    assert isinstance(domain, Ball)
    n = domain.n
    R = domain.R

    def head(h: Head) -> float:
        a = reach(h, R)
        return up(
            math.sqrt(3) * h.V_norm * math.hypot(a.query, 2 * math.sqrt(n) * a.key, math.sqrt(n))
        )

    return over_heads(f, head)


def compact_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| [a + sqrt(kappa) + a_b min(sqrt(kappa), 4 sqrt(N) / (3 sqrt 3))].

    It covers both regimes: kappa is at most n, and bounded as n grows (mean field).
    """
    assert isinstance(domain, Ball)
    seen = visibility(f, domain.n)
    viewers = seen.largest_column(torch.ones_like(seen.counts))

    def head(h: Head) -> float:
        a = reach(h, domain.R)
        # kappa = max_j sum over the i that see j of 1 / (1 + (n_i - 1) e^(-range - spread_i)), the
        # largest column sum of P; query i sees n_i keys.
        least = torch.exp(-(a.range + seen.spread) * (1 + gamma(8))) * (1 - 16 * U)
        # Beyond 700 the exponential is near underflow and its rounding is no longer relative.
        least = torch.where(a.range + seen.spread > 700, 0.0, least)
        most = 1 / (1 + (seen.counts - 1).clamp_min(0) * least * (1 - 4 * U * 700))
        root = math.sqrt(up(seen.largest_column(most), seen.n + 16)) * (1 + gamma(8))
        keys = a.key * min(root, 4 * math.sqrt(viewers) / (3 * math.sqrt(3)))
        return up(h.V_norm * (a.query + root + keys))

    return over_heads(f, head)


@dataclass(frozen=True, eq=False)
class Adversary:
    """A family of inputs: a token at R u, A u = eigenvalue u, against a crowd at `crowd` R u.

    gamma: half the gap between the scores of token and crowd, over R^2.
    """

    family: str
    eigenvalue: float
    u: Tensor
    crowd: float
    gamma: float


def adversaries(
    A: Float[Tensor, "k k"], lift: Float[Tensor, "d k"] | None = None
) -> tuple[Adversary, ...]:
    """Return the families of the least and the largest real eigenvalue of A; none if none is real.

    Args:
        A: A square matrix, not symmetric: only real eigenvalues have a direction u.
        lift: If given, its products with the eigenvectors take their place.

    Returns:
        "opposite" and "same side", with vectors u of any length.
    """
    values, vectors = torch.linalg.eig(A)
    # Eigenvalues come in floating point: a real one may carry a tiny imaginary part.
    real = values.imag.abs() <= 1e-12 * values.abs().max()
    values = values[real].real
    vectors = vectors[:, real].real
    if len(values) == 0:
        return ()
    vectors = vectors if lift is None else lift @ vectors
    places = (("opposite", int(values.argmin()), -1.0), ("same side", int(values.argmax()), 0.5))
    return tuple(
        Adversary(
            family=family,
            eigenvalue=values[i].item(),
            u=vectors[:, i],
            crowd=crowd,
            gamma=crowd * (1 - crowd) / 2 * values[i].item(),
        )
        for family, i, crowd in places
    )


def _theorem_case(_: SelfAttention, h: Head, domain: Domain) -> tuple[float, Tensor]:
    """|Vu| sqrt(n - 1) / (1 + (n - 1) e^(-2 gamma R^2)), gamma = max(-gamma_min, gamma_1 / 8).

    The input is one token at R u, placed first, and the crowd at -R u (or at R u / 2).
    """
    assert isinstance(domain, Ball)
    n = domain.n
    R = domain.R
    worst = max(adversaries(h.A), key=lambda one: one.gamma)
    u = worst.u / length_up(worst.u)
    # The proof uses A only through <u, A u>: a computed u does as well as an exact eigenvector.
    gap = worst.crowd * (1 - worst.crowd) * (u @ h.A @ u).item() * R * R
    X = worst.crowd * R * u.repeat(n, 1)
    X[0] = R * u
    p = 1 / (1 + (n - 1) * math.exp(min(-gap, 700.0)))
    slack = 1 - 4 * _gap_error(h, R)
    value = h.factor * _value_length(h, u) * math.sqrt(n - 1) * p * max(slack, 0.0)
    # The theorem drops the factor 1 + (1 - p) gap, which is at least 1 for gap >= 0. Near 0,
    # however, the sign of a computed eigenvalue need not be that of its quotient <u, A u>. Below
    # -1/2 nothing is claimed, because rounding errors would be large relative to the factor.
    value *= 1.0 if gap >= 0 else 1 + gap if gap >= -0.5 else 0.0
    return down(value, n + 64), X


theorem_lower, theorem_witness = best_head(_theorem_case)


def _tuned_case(f: SelfAttention, h: Head, domain: Domain) -> tuple[float, Tensor]:
    """|Vu| max over G of (sum_i [p_i (1 + (1 - p_i) G)]^2)^(1/2), p_i = 1 / (1 + n_i e^(-G)).

    The theorem's lower bound with the score gap G tuned to n: the special token R u where most
    tokens see it, the crowd at c u, |c| <= R, G = <A c u + beta, R u - c u>, u an eigenvector of
    A + A'.
    """
    assert isinstance(domain, Ball)
    n = domain.n
    R = domain.R
    special, others = visibility(f, n).most_seen()
    # Without a mask all rows see equally many keys: each distinct count is computed only once.
    crowd, times = others.double().unique(return_counts=True)
    if crowd.numel() == 0:
        return 0.0, h.A.new_zeros(n, h.d)
    _, vectors = torch.linalg.eigh((h.A + h.A.T) / 2)
    ends = vectors[
        :, torch.unique(torch.tensor([*range(min(4, h.d)), *range(max(0, h.d - 4), h.d)]))
    ].T
    units = torch.cat([ends, -ends])
    units = units / length_up(units)[:, None]
    # Coarser for many distinct counts, to bound the memory of the table below.
    grid = max(17, min(257, (1 << 18) // len(crowd)))
    c = torch.linspace(-R, R, grid, dtype=torch.float64, device=units.device)
    quotients = ((units @ h.A.T) * units).sum(1)
    tilts = units @ h.beta
    G = ((quotients[:, None] * c + tilts[:, None]) * (R - c)).clamp(-700, 700)
    gains = crowd_gain(G, crowd, times).sqrt()
    lengths = units.new_tensor([_value_length(h, u) for u in units])
    # For G < 0, 1 + (1 - p) G is a difference whose rounding the slack below does not cover.
    gains = gains * lengths[:, None] * (G >= 0)
    best = int(gains.argmax())
    u = units[best // grid]
    where = c[best % grid]
    X = where * u.repeat(n, 1)
    X[special] = R * u
    value = h.factor * gains.flatten()[best].item() * max(0.0, 1 - 4 * _gap_error(h, R))
    return down(value, n + 64), X


tuned_lower, tuned_witness = best_head(_tuned_case)


def crowd_gain(G: Tensor, crowd: Tensor, times: Tensor) -> Tensor:
    """sum_i [p_i (1 + (1 - p_i) G)]^2 for score gaps G [...], p_i = 1 / (1 + n_i e^(-G)).

    p_i is the weight that row i gives to the special token; crowd are the distinct n_i, and times
    how often each occurs.
    """
    p = 1 / (1 + crowd * torch.exp(-G)[..., None])
    return ((p * (1 + (1 - p) * G[..., None])).square() * times).sum(-1)


def _gap_error(h: Head, R: float) -> float:
    """Bound the error of a computed score gap in B_R, and the relative error of p and 1 - p."""
    return 4 * gamma(2 * h.steps) * R * (h.A_size * R + h.beta_size)


def _value_length(h: Head, u: Tensor) -> float:
    """Return a lower bound of |Vu|."""
    return max(0.0, (h.V @ u).norm().item() * (1 - gamma(h.d + 8)) - gamma(h.steps) * h.V_size)


def large_radius_limit(f: SelfAttention, X: Tensor) -> float:
    """lim ||D_{RX} f|| for R -> inf, ||V|| sqrt(max_j #{i : i attends most to j}); no ties."""
    (h,) = heads_of(f.double(), folded=True)
    return h.factor * h.V_norm * math.sqrt(_selection(h, X.double()).sum(dim=0).max().item())


def _selection(h: Head, X: Tensor) -> Tensor:
    """[n, n], 1 where j is the token that i attends to most."""
    weights = features(h, X).P
    chosen = torch.zeros_like(weights).scatter(1, weights.argmax(dim=1, keepdim=True), 1.0)
    return chosen * weights.any(dim=1)[:, None]


def saturated_upper(f: SelfAttention, domain: Domain) -> float:
    """Return the large-radius limit at X plus the distance of D_X f from it."""
    limit, rest, factor = _saturated(f, domain)
    return up(factor * (limit + rest))


def saturated_lower(f: SelfAttention, domain: Domain) -> float:
    """Return the large-radius limit at X minus the distance of D_X f from it."""
    limit, rest, factor = _saturated(f, domain)
    return down(factor * (limit * (1 - gamma(f.Q.shape[1] ** 2 + 64)) - rest))


def _saturated(f: SelfAttention, domain: Domain) -> tuple[float, float, float]:
    """||D_X f - Sel (x) V|| <= max ||V C_i A|| + ||V|| ||P - Sel|| + key term."""
    assert isinstance(domain, Point)
    (h,) = heads_of(f, folded=True)
    # P tends to the selection of the largest score, and the query and key terms vanish.
    seen = features(h, domain.X)
    query, _, keys = terms(h, domain.X)
    chosen = _selection(h, domain.X)
    away = norm_up(seen.P - chosen).item() + (seen.P_slack.square().sum().sqrt().item() + TINY) * (
        1 + gamma(64)
    )
    limit = h.V_norm * math.sqrt(chosen.sum(dim=0).max().item())
    # V_norm is an upper bound; used from below, the limit must not exceed the true norm.
    excess = 2 * gamma(h.d**2 + h.steps) * (h.V_norm + h.V_size) * math.sqrt(domain.n)
    return limit, up(query + h.V_norm * away + keys + excess), h.factor


ONE_HEAD = Hypothesis("one head", lambda f, _: f.heads == 1)
REAL_EIGENVALUE = Hypothesis(
    "A = K'Q/sqrt(k) has a real eigenvalue (in every head)",
    lambda f, _: all(adversaries(h.A) for h in heads_of(f, folded=True)),
)

BOUNDS = (
    Bound(
        name="Castin et al., ball",
        domain=Ball,
        hypotheses=(*PLAIN_DOT, FULL_OR_CAUSAL),
        cite="castin2024",
        where="Theorem 1, under a causal mask Theorem 2 (slides, January 2025), upper bound: "
        "docs/theory/bounds.md#castin-et-al-on-a-ball",
        fn=theorem_upper,
    ),
    Bound(
        name="compact",
        domain=Ball,
        hypotheses=(DOT, SINKS_UNBIASED, ROTATION),
        where="docs/theory/bounds.md#compact-bound",
        fn=compact_upper,
    ),
    Bound(
        name="Castin et al., ball, from below",
        kind="lower",
        domain=Ball,
        hypotheses=(
            *PLAIN_DOT,
            NO_QUERY_BIAS,
            FULL_OR_CAUSAL,
            HEADS_APART,
            TWO_TOKENS,
            REAL_EIGENVALUE,
        ),
        cite="castin2024",
        where="Theorem 1, under a causal mask Theorem 2 (slides, January 2025), lower bound: "
        "docs/theory/bounds.md#castin-et-al-on-a-ball",
        fn=theorem_lower,
        witness=theorem_witness,
    ),
    Bound(
        name="tuned gap",
        kind="lower",
        domain=Ball,
        hypotheses=(*PLAIN_DOT, NO_ADDITIVE, HEADS_APART, TWO_TOKENS),
        where="docs/theory/bounds.md#tuned-gap",
        fn=tuned_lower,
        witness=tuned_witness,
    ),
    Bound(
        name="large-radius limit with its error",
        domain=Point,
        hypotheses=(DOT, PLAIN_SCORES, ROTATION, ONE_HEAD),
        cite="castin2024",
        where="large-radius regime; its error: "
        "docs/theory/bounds.md#large-radius-limit-with-its-error",
        fn=saturated_upper,
    ),
    Bound(
        name="large-radius limit with its error, from below",
        kind="lower",
        domain=Point,
        hypotheses=(DOT, PLAIN_SCORES, ROTATION, ONE_HEAD),
        cite="castin2024",
        where="large-radius regime; its error: "
        "docs/theory/bounds.md#large-radius-limit-with-its-error",
        fn=saturated_lower,
    ),
)
