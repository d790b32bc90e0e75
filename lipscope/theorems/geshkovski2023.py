"""Mean-field attention: the constant of Geshkovski et al., and sharper ones for any mask."""

from __future__ import annotations

import math
from collections.abc import Callable

from lipscope._types import Ball, Domain
from lipscope.attention.layer import SelfAttention
from lipscope.theorems.rounding import exp_up, up
from lipscope.theorems.statement import (
    CAUSAL,
    DOT,
    FULL,
    NO_QUERY_BIAS,
    PLAIN_DOT,
    ROTATION,
    SINKS_UNBIASED,
    Bound,
    Head,
    over_heads,
    reach,
)


def wasserstein_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (1 + 3a) e^(2a)."""
    return _over_heads(f, domain, lambda a, _: (1 + 3 * a) * exp_up(2 * a))


def sharper_wasserstein_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (a + (1 + a_b) e^(a_b)).

    Half the exponent: the L2 norm of a Markov kernel is the square root of its column bound.
    """
    return _over_heads(f, domain, lambda a, b: a + (1 + b) * exp_up(b))


def masked_wasserstein_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (a + 2 (1 + 2 a_b) e^(2 a_b)), by Hardy's inequality.

    The distance is that of `conditional_distance`, which moves mass at a fixed position only.
    """
    return _over_heads(f, domain, lambda a, b: a + 2 * (1 + 2 * b) * exp_up(2 * b))


def sharper_masked_wasserstein_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (a + (1 + 2^(q-1) a_b) (q/(q-1) e^(2 a_b))^(q/2)), minimised over 1 < q <= 2.

    At q = 2 it is masked_wasserstein_upper.
    """
    return transport_upper(2, masked_prices(2))(f, domain)


def masked_prices(p: float) -> dict[float, float]:
    """Exponents 1 < q <= p with log(q / (q - 1)), the cost of averaging over the past in L^q."""
    # Any q gives a bound; the best is near p for small a and near 1 + 1/(2a) for large a.
    least = min(p - 1, 1e-4)
    tried = (min(p, 1 + least * ((p - 1) / least) ** (i / 200)) for i in range(201))
    return {q: math.log(q / (q - 1)) for q in tried if q > 1}


def transport_upper(
    p: float, prices: dict[float, float]
) -> Callable[[SelfAttention, Domain], float]:
    """Make the bound in W_p or d_p, ||V|| (a + (1 + c a_b) (k e^(2 a_b))^(q/p)), minimised over q.

    c = max(1, 2^(2q/p - 1)), and log k = prices[q] is what the mask costs. Proof:
    docs/theory/mean_field.md.
    """

    def theorem(f: SelfAttention, domain: Domain) -> float:
        def formula(a: float, b: float) -> float:
            # In the exponent, because k e^(2 b) alone may overflow where its power does not.
            tried = ((q / p, k) for q, k in prices.items())
            return a + min(
                (1 + max(1, 2 ** (2 * t - 1)) * b) * exp_up(t * (2 * b + k)) for t, k in tried
            )

        # Heads side by side add as squares only from p = 2 on; below, as p-th powers.
        return up(f.heads ** max(0.0, 1 / p - 1 / 2) * _over_heads(f, domain, formula))

    return theorem


def largest_token_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (1 + a + a_b), for any mask: it grows neither with n nor exponentially."""
    return _over_heads(f, domain, lambda a, b: 1 + a + b)


def _over_heads(
    f: SelfAttention, domain: Domain, formula: Callable[[float, float], float]
) -> float:
    assert isinstance(domain, Ball)

    def head(h: Head) -> float:
        a = reach(h, domain.R)
        return up(h.V_norm * formula(a.query, a.key))

    return over_heads(f, head)


BOUNDS = (
    Bound(
        name="Geshkovski et al., mean field",
        norm="W2",
        domain=Ball,
        hypotheses=(*PLAIN_DOT, FULL, NO_QUERY_BIAS),
        cite="geshkovski2023",
        where="stability of attention in W2, as quoted in castin2024: "
        "docs/theory/bounds.md#mean-field",
        fn=wasserstein_upper,
    ),
    Bound(
        name="mean field",
        norm="W2",
        domain=Ball,
        hypotheses=(*PLAIN_DOT, FULL),
        where="docs/theory/bounds.md#mean-field",
        fn=sharper_wasserstein_upper,
    ),
    Bound(
        name="masked mean field",
        norm="W2",
        domain=Ball,
        hypotheses=(*PLAIN_DOT, CAUSAL),
        where="docs/theory/bounds.md#mean-field",
        fn=sharper_masked_wasserstein_upper,
    ),
    Bound(
        name="largest token",
        norm="inf2",
        domain=Ball,
        hypotheses=(DOT, SINKS_UNBIASED, ROTATION),
        where="docs/theory/bounds.md#largest-token",
        fn=largest_token_upper,
    ),
)
