"""Mean-field attention, on measures: Geshkovski et al.'s constant, a sharper one, masked, and the largest token's."""

from __future__ import annotations

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


def largest_token_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (1 + a + a_b): neither sqrt(n) nor an exponential, for any mask."""
    return _over_heads(f, domain, lambda a, b: 1 + a + b)


def _over_heads(f: SelfAttention, domain: Domain, formula: Callable[[float, float], float]) -> float:
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
        masked_wasserstein_upper,
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
