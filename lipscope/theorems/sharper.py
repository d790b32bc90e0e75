"""L2 attention, sharper: its constant over inputs of any size is logarithmic in n.

The weights are those of a Gaussian kernel, and K_ij = exp(-d_ij) is a Gram matrix of unit vectors.
If many queries are near one key they are near each other, and queries that see each other share
their weight. So a column of P sums to at most sqrt(n) in any number of coordinates, and to at most
(2 / sqrt 3)^k in k coordinates, however many tokens there are. Every quantity below is the smallest
of several such bounds; proofs: docs/theory/bounds.md#columns-of-a-gaussian-kernel.
"""

from __future__ import annotations

import math

import torch

from lipscope._types import Ball, Domain, Everywhere
from lipscope.attention.layer import SelfAttention
from lipscope.theorems.factored_values import Way, splits, whole_rest
from lipscope.theorems.kim2021 import (
    L2_HYPOTHESES,
    RESIDUAL,
    longest_query,
    output_norm,
    phi_inverse,
    spectral,
)
from lipscope.theorems.rounding import exp_up, frobenius_up, gamma, scaled_up, times_power, up
from lipscope.theorems.statement import (
    Bound,
    Visibility,
    heads_of,
    hypotenuse,
    of_order_one,
    visibility,
)

COORDINATE = 0.5 * math.log(4 / 3)
"""ln(2 / sqrt 3), the price of one more coordinate for the logarithm of a column sum."""

PAST = 0.75 - 0.5 * math.log(2.5)
PAST_SQUARE = 19 / 12 + 0.5 * math.log(0.576)
"""What a coordinate adds to 1 + ln n under a causal mask, plainly and where t^2 is summed."""


def query_size(f: SelfAttention) -> int:
    """Return the number of coordinates in which the queries of one head can differ."""
    return min(f.Q.shape[0] // f.heads, f.Q.shape[1])


def largest_share(others: int, power: float) -> float:
    """max over a > 0 of a ln(m / a) / (1 + a)^p for m = others, rounded up.

    A query among keys with sum_{j != i} K_ij = a is at mean distance D <= a ln(m / a) / (1 + a)
    from them, and its softmax has the denominator Z = 1 + a: the powers p = 1, 3/2, 2 bound
    D, D / sqrt(Z), D / Z.
    """
    if others < 1:
        return 0.0
    low = 0.0
    high = min(float(others), 1 / (power - 1) if power > 1 else math.inf)
    for _ in range(128):
        a = (low + high) / 2
        # Bisection: the derivative is positive below its only root.
        if (1 - (power - 1) * a) * math.log(others / a) > 1 + a:
            low = a
        else:
            high = a
    # Every factor at the end of the interval where it is larger, so that the maximum is not missed.
    return up(high * math.log(others / low) / (1 + low) ** power)


def column_sum(seen: Visibility, size: int) -> float:
    """kappa, an upper bound of every column sum of P for queries of `size` coordinates.

    The least of 1 + N/2, sqrt(r (N + 1)) and (2 / sqrt 3)^k, where N other queries see a key.
    """
    N = seen.others
    return up(min(1 + N / 2, math.sqrt(seen.overlap * (N + 1)), _crowd(seen, size, PAST)))


def column_square(seen: Visibility, size: int) -> float:
    """rho, an upper bound of every sum_i P_ij t_i^2, t_i the distance of query i along one line.

    The least of omega N, sqrt(2 r N) / e and (2/3) (2 / sqrt 3)^k.
    """
    N = seen.others
    if N < 1:
        return 0.0
    gram = math.sqrt(2 * seen.overlap * N) / math.e
    return up(min(largest_share(1, 1) * N, gram, 2 / 3 * _crowd(seen, size, PAST_SQUARE)))


def key_reaction(seen: Visibility, size: int) -> float:
    """tau, an upper bound of every sum_i D_i P_ij t_i^2, D_i the mean distance of query i.

    The least of phi rho, N beta / e and sqrt(2 N) alpha / e.
    """
    N = seen.others
    keys = seen.most_keys - 1
    if N < 1 or keys < 1:
        return 0.0
    mean, rooted, divided = (largest_share(keys, power) for power in (1, 1.5, 2))
    # Cauchy-Schwarz over the queries that see a key: alpha bounds D / sqrt(Z) if all of them see
    # each other; if of two one sees the other, it is a geometric mean.
    alpha = rooted if seen.overlap == 1 else math.sqrt(seen.overlap * mean * divided)
    gram = math.sqrt(2 * N) * alpha / math.e
    return up(min(mean * column_square(seen, size), N * divided / math.e, gram))


def _crowd(seen: Visibility, size: int, first: float) -> float:
    """(2 / sqrt 3)^k for queries that see each other; more, if each sees only those before it."""
    # N queries and the key that they see span at most N directions.
    k = min(size, seen.others)
    power = exp_up(k * COORDINATE)
    if seen.overlap == 1:
        return power
    if not seen.ordered:
        return math.inf
    return up(power * (1 + math.log(seen.others + 1) + first + (k - 1) * PAST))


def distance_reaction(seen: Visibility, size: int) -> float:
    """Return an upper bound of the 2-norm constant of L2 attention with identity weights.

    Args:
        seen: The number of tokens and which of them attend to which.
        size: Number of coordinates of the queries of one head.
    """
    return up(
        math.sqrt(column_sum(seen, size))
        + 2 * phi_inverse(seen.most_keys)
        + 2 * math.sqrt(key_reaction(seen, size))
    )


def tighter_distance_upper(f: SelfAttention, domain: Domain) -> float:
    """(sqrt(kappa) + 2 phi + 2 sqrt(tau)) ||O diag(M_h / m_h)|| ||diag(m_h) Q||, m_h = ||M_h||.

    kappa bounds the column sums of P (`column_sum`), tau the reaction of the keys (`key_reaction`).
    Values V = M Q + E add
    ||O|| (sum_h ||E_h||^2 (sqrt(kappa) + 2 (sqrt(phi) + sqrt(rho)) sqrt(s) ||Q_h|| R)^2)^(1/2),
    rho bounds sum_i P_ij t_i^2 (`column_square`). Every M gives a bound; V Q^+ and 0 are tried.
    """
    seen = visibility(f, domain.n)
    size = query_size(f)
    found = [math.inf]
    for way in splits(f, domain):
        # Values that factor through the queries, plus a remainder.
        norms, power = _through_heads(f, way)
        through = scaled_up(up(distance_reaction(seen, size) * norms), power)
        found.append(through + _left_over(f, domain, seen, way))
    if isinstance(domain, Ball):
        way = [(h, whole_rest(h)) for h in heads_of(f, folded=False)]
        found.append(_left_over(f, domain, seen, way))
    return up(min(value for value in found if not math.isnan(value)))


def _left_over(f: SelfAttention, domain: Domain, seen: Visibility, way: Way) -> float:
    """What the values E x that do not factor through the queries add, for all heads together."""
    size = query_size(f)
    root = math.sqrt(column_sum(seen, size))
    rho = column_square(seen, size)
    spread = 2 * (math.sqrt(phi_inverse(seen.most_keys)) + math.sqrt(rho))
    sizes = [
        h.factor * (split.spectral * (root + spread * longest_query(h, domain, spectral)))
        for h, split in way
        if split.spectral > 0
    ]
    return up(hypotenuse(sizes) * output_norm(f, spectral)) if sizes else 0.0


def _through_heads(f: SelfAttention, way: Way) -> tuple[float, int]:
    """||O diag(M_h / m_h)|| ||diag(m_h) Q|| for all heads, as s and p of s 2^p."""
    # Powers of two are kept apart as integers: weights of any size neither under- nor overflow.
    rights = []
    lefts = []
    powers = []
    rest = 0.0
    for h, split in way:
        M = split.M
        drift = split.drift
        m = up(spectral(M) + drift)
        if math.inf in (m, h.factor):
            return math.inf, 0
        Q, power = of_order_one(h.one.Q)
        share, own = math.frexp(m)
        rights.append(share * Q)
        powers.append(power + own + h.power)
        lefts.append(M / m if m > 0 else M)
        rest = max(rest, drift / m if m > 0 else 0.0)
    # All heads relative to the largest power.
    top = max(powers)
    right = torch.cat(
        [times_power(Q, power - top) for Q, power in zip(rights, powers, strict=True)]
    )
    rounding = gamma(2 * sum(M.shape[0] for M in lefts) + 16)
    across = up(spectral(right) + rounding * frobenius_up(right).item())
    if f.O is None:
        return across, top
    O, power = of_order_one(f.O)
    left = O @ torch.block_diag(*lefts)
    sizes = frobenius_up(O).item() * math.hypot(*(frobenius_up(M).item() for M in lefts))
    error = rounding * sizes + rest * spectral(O)
    return up(across * (spectral(left) + error)), top + power


BOUNDS = (
    Bound(
        name="L2 attention",
        domain=(Ball, Everywhere),
        hypotheses=L2_HYPOTHESES,
        where="docs/theory/bounds.md#l2-attention " + RESIDUAL,
        fn=tighter_distance_upper,
    ),
)
