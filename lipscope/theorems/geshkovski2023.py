"""Mean-field attention, on measures: Geshkovski et al.'s constant, and sharper ones for any mask."""

from __future__ import annotations

import math
from collections.abc import Callable

from lipscope._types import Ball, Domain
from lipscope.attention.layer import SelfAttention
from lipscope.theorems.heads import Head, over_heads, reach
from lipscope.theorems.rounding import exp_up, up
from lipscope.theorems.statement import (
    CAUSAL,
    DOT,
    FULL,
    NO_QUERY_BIAS,
    NO_ROPE,
    PLAIN_SCORES,
    ROTATION,
    SINKS_UNBIASED,
    Bound,
)


def wasserstein_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (1 + 3a) e^(2a)."""
    return _over_heads(f, domain, lambda a, _: (1 + 3 * a) * exp_up(2 * a))


def sharper_wasserstein_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (a + (1 + a_b) e^(a_b)): the Markov kernel's L2 norm is the square root of its column bound."""
    return _over_heads(f, domain, lambda a, b: a + (1 + b) * exp_up(b))


def masked_wasserstein_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (a + 2 (1 + 2 a_b) e^(2 a_b)), by Hardy's inequality; the distance moves mass at fixed position only."""
    return _over_heads(f, domain, lambda a, b: a + 2 * (1 + 2 * b) * exp_up(2 * b))


def sharper_masked_wasserstein_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (a + (1 + 2^(q-1) a_b) (q/(q-1) e^(2 a_b))^(q/2)), the least over 1 < q <= 2.

    At q = 2 it is masked_wasserstein_upper.
    """
    return transport_upper(2, masked_prices(2))(f, domain)


def masked_prices(p: float) -> dict[float, float]:
    """Exponents 1 < q <= p and log(q / (q - 1)), the cost of averaging over the past in L^q (Hardy)."""
    # Any q is right; the best is near p for small a and near 1 + 1/(2a) for large a.
    least = min(p - 1, 1e-4)
    tried = (min(p, 1 + least * ((p - 1) / least) ** (i / 200)) for i in range(201))
    return {q: math.log(q / (q - 1)) for q in tried if q > 1}


def transport_upper(
    p: float, prices: dict[float, float]
) -> Callable[[SelfAttention, Domain], float]:
    """In W_p or d_p, the least of ||V|| (a + (1 + c a_b) (k e^(2 a_b))^(q/p)) over q.

    c = max(1, 2^(2q/p - 1)), and log k = prices[q] is what the mask costs. Proof:
    docs/theory/mean_field.md.
    """

    def theorem(f: SelfAttention, domain: Domain) -> float:
        def formula(a: float, b: float) -> float:
            tried = ((q / p, k) for q, k in prices.items())
            return a + min(
                (1 + max(1, 2 ** (2 * t - 1)) * b) * exp_up(t * (2 * b + k)) for t, k in tried
            )

        # Heads side by side add as squares only from p = 2 on; below, as p-th powers.
        return up(f.heads ** max(0.0, 1 / p - 1 / 2) * _over_heads(f, domain, formula))

    return theorem


def largest_token_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (1 + a + a_b): neither sqrt(n) nor an exponential, for any mask."""
    return _over_heads(f, domain, lambda a, b: 1 + a + b)


def _over_heads(
    f: SelfAttention, domain: Domain, formula: Callable[[float, float], float]
) -> float:
    assert isinstance(domain, Ball)

    def head(h: Head) -> float:
        a = reach(h, domain.R)
        return up(h.V_norm * formula(a.query, a.key))

    return over_heads(f, head)


PLAIN = (DOT, PLAIN_SCORES, NO_ROPE)

BOUNDS = (
    Bound(
        "Geshkovski et al., mean field",
        "upper",
        "W2",
        Ball,
        (*PLAIN, FULL, NO_QUERY_BIAS),
        "geshkovski2023",
        "stability of attention in W2, as quoted in castin2024: docs/theory/bounds.md#mean-field",
        wasserstein_upper,
    ),
    Bound(
        "mean field",
        "upper",
        "W2",
        Ball,
        (*PLAIN, FULL),
        "lipscope",
        "docs/theory/bounds.md#mean-field",
        sharper_wasserstein_upper,
    ),
    Bound(
        "masked mean field",
        "upper",
        "W2",
        Ball,
        (*PLAIN, CAUSAL),
        "lipscope",
        "docs/theory/bounds.md#mean-field",
        sharper_masked_wasserstein_upper,
    ),
    Bound(
        "largest token",
        "upper",
        "inf2",
        Ball,
        (DOT, SINKS_UNBIASED, ROTATION),
        "lipscope",
        "docs/theory/bounds.md#largest-token",
        largest_token_upper,
    ),
)
