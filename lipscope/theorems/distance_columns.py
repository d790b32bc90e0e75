"""How much weight many queries of L2 attention can put on one key: column sums of P.

The weights are those of a Gaussian kernel, and K_ij = exp(-d_ij) is a Gram matrix of unit vectors.
If many queries are near one key they are near each other, and queries that see each other share
their weight. So a column of P sums to about sqrt(n), whereas P_ij <= 1/2 alone gives (n + 1) / 2,
and the constant of L2 attention grows like n^(1/4), up to logarithms (docs/theory/bounds.md).
"""

from __future__ import annotations

import math

from lipscope.theorems.heads import Sight
from lipscope.theorems.rounding import up


def largest_share(others: int, power: float) -> float:
    """max over a > 0 of a ln(m / a) / (1 + a)^p for m = others, rounded up.

    A query among keys with sum_{j != i} K_ij = a is at mean distance D <= a ln(m / a) / (1 + a)
    from them, and its softmax has the denominator Z = 1 + a: the powers p = 1, 3/2, 2 bound
    D, D / sqrt(Z), D / Z.
    """
    if others < 1:
        return 0.0
    low, high = 0.0, min(float(others), 1 / (power - 1) if power > 1 else math.inf)
    for _ in range(128):
        a = (low + high) / 2
        # Bisection: the derivative is positive below its only root.
        if (1 - (power - 1) * a) * math.log(others / a) > 1 + a:
            low = a
        else:
            high = a
    # Every factor at the end of the interval where it is larger, so that the maximum is not missed.
    return up(high * math.log(others / low) / (1 + low) ** power)


def column_sum(seen: Sight) -> float:
    """An upper bound of all column sums of P: 1 + N/2 or sqrt(r (N + 1)), N others see a key."""
    return up(min(1 + seen.others / 2, math.sqrt(seen.regard * (seen.others + 1))))


def key_reaction(seen: Sight) -> float:
    """An upper bound of every sum_i D_i P_ij d_ij, D_i the mean distance of query i.

    It is omega N phi, or about sqrt(N) (ln N)^2 where queries see each other.
    """
    others, keys = seen.others, seen.most_keys - 1
    if others < 1 or keys < 1:
        return 0.0
    mean, rooted, divided = (largest_share(keys, power) for power in (1, 1.5, 2))
    plain = largest_share(1, 1) * others * mean
    if seen.regard == math.inf:
        return up(plain)
    # alpha sqrt(N) if all queries see each other, else (2 phi beta N)^(1/2): Cauchy-Schwarz over
    # the queries that see a key, in the notation of docs/theory/bounds.md.
    size = math.sqrt(others) * (rooted if seen.regard == 1 else math.sqrt(2 * mean * divided))
    # Any cut >= 0 gives a bound; this one is the best.
    cut = max(0.0, math.log(others * divided / size) - 1)
    return up(min(plain, size * cut + others * divided * math.exp(-cut - 1)))


def column_distance(seen: Sight) -> float:
    """An upper bound of every sum_i P_ij d_ij: omega N, or about sqrt(N) ln(N) / 2."""
    others = seen.others
    plain = largest_share(1, 1) * others
    if others < 1 or seen.regard == math.inf:
        return up(plain)
    size = math.sqrt(seen.regard * others)
    # Any cut >= 0 gives a bound; this one is the best.
    cut = max(0.0, math.log(others / size) - 1)
    return up(min(plain, size * cut + others * math.exp(-cut - 1)))
