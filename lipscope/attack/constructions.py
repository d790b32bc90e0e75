"""The papers' explicit inputs, where sigma grows like sqrt(n), like sqrt(n) log(n), or like R^2.

All of them read one head through A = K'Q/sqrt(k) and V, with O multiplied in. They ignore soft
caps, sinks, rotary positions and additive masks, and all biases but the query's in the tuned gap;
sigma is measured on the actual layer. The special token is placed where most tokens see it: first
under a causal mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._types import Ball, Domain, UserError
from lipscope.attack.search import Found, measured
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot, default_scale
from lipscope.theorems.castin2024 import Adversary, adversaries, crowd_gain, tuned_witness
from lipscope.theorems.kim2021 import quadratic_witness
from lipscope.theorems.statement import once, visibility

OPPOSITE = "opposite crowd"
HALF_WAY = "crowd half way"
SPREAD = "token at zero"

GRID = 513
"""Number of positions of the crowd that are tried."""


Construction = Callable[[SelfAttention, Ball], Tensor | None]


@dataclass(frozen=True)
class Regime:
    """The length up to which a single token can dominate all others in B_R: n = 1 + e^reach.

    gamma = max(-gamma_min, gamma_1 / 8) over the real eigenvalues of A; reach = 2 gamma R^2.
    """

    gamma: float
    reach: float


@entry_point
def explicit_inputs(f: SelfAttention, ball: Domain, *, seed: int = 0) -> list[Found]:
    """Return the papers' explicit inputs for every head, measured on the whole layer in float64.

    Castin et al.: one token at Ru, the crowd at -Ru (where Au = gamma_min u) or at Ru/2 (where
    Au = gamma_1 u), if A has such an eigenvalue. "tuned": the crowd moved to where the gap between
    the scores suits n. "tuned gap": the same over other directions u as well. Kim et al.: a token
    at 0 among tokens at +-Ru.

    Args:
        f: Attention with dot-product scores.
        ball: The Ball(R, n) that the inputs lie in, n >= 2.
        seed: Seed of the measurement.

    Returns:
        The inputs with their sigma, the largest first.

    Raises:
        UserError: If f has other scores, or the domain is not a Ball with n >= 2.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> found = ls.attack.explicit_inputs(ls.SelfAttention(-eye, eye, eye), ls.Ball(R=2.0, n=4))
        >>> sorted(one.name for one in found)
        ['opposite crowd', 'opposite crowd, tuned', 'token at zero', 'tuned gap']
    """
    if not isinstance(f, SelfAttention) or not isinstance(f.kernel, Dot):
        what = (
            type(f.kernel).__name__ + " scores"
            if isinstance(f, SelfAttention)
            else type(f).__name__
        )
        raise UserError(
            f"the constructions are for a SelfAttention with dot-product scores, got {what}; "
            "use ascent instead (ls.attack.ascend, --kind ascent), which takes any map"
        )
    if not isinstance(ball, Ball):
        raise UserError(f"the constructions need a Ball(R, n), got {type(ball).__name__}")
    if ball.n < 2:
        raise UserError(
            f"the constructions place one token against a crowd and need n >= 2, got n={ball.n}"
        )
    f = f.double()
    inputs = []
    for h in range(f.heads):
        mark = f", head {h}" if f.heads > 1 else ""
        one = _plain(f, h)
        found = ((name, construct(one, ball)) for name, construct in CONSTRUCTIONS.items())
        inputs += [(name + mark, X) for name, X in found if X is not None]
    return measured(f, inputs, seed)


def regime(f: SelfAttention, R: float) -> Regime:
    """Return the regime of a single head in the ball B_R."""
    if f.heads != 1 or not isinstance(f.kernel, Dot):
        raise UserError(
            "a regime is defined for one head with dot-product scores, got "
            f"{f.heads} heads and the kernel {type(f.kernel).__name__}; use f.head(h)"
        )
    gamma = max([0.0, *(worst.gamma for worst in _adversaries(_plain(f.double(), 0)))])
    return Regime(gamma, 2 * gamma * R * R)


def _crowd(family: str, tuned: bool) -> Construction:
    """Place one token at Ru, and the crowd as the family does or where the score gap suits n."""

    def construct(one: SelfAttention, ball: Ball) -> Tensor | None:
        n = ball.n
        R = ball.R
        worst = next((w for w in _adversaries(one) if w.family == family), None)
        if worst is None or worst.gamma <= 0:
            return None
        u = worst.u / worst.u.norm().clamp_min(1e-300)
        special, others = visibility(one, n).most_seen()
        place: float | Tensor = worst.crowd * R
        if tuned:
            # G = eigenvalue c (R - c) is the gap between the scores of the special token and the
            # crowd at c u.
            c = torch.linspace(-R, R, GRID, dtype=torch.float64, device=u.device)
            G = (worst.eigenvalue * c * (R - c)).clamp_min(0.0)
            gains = crowd_gain(G, *others.double().unique(return_counts=True))
            place = c[int(gains.argmax())]
        X = (place * u).repeat(n, 1)
        X[special] = R * u
        return X

    return construct


def _token_at_zero(one: SelfAttention, ball: Ball) -> Tensor | None:
    if not bool((visibility(one, ball.n).counts == ball.n).any()):
        return None
    return quadratic_witness(replace(one, biases=None), ball)


CONSTRUCTIONS: dict[str, Construction] = {
    OPPOSITE: _crowd("opposite", tuned=False),
    f"{OPPOSITE}, tuned": _crowd("opposite", tuned=True),
    HALF_WAY: _crowd("same side", tuned=False),
    f"{HALF_WAY}, tuned": _crowd("same side", tuned=True),
    "tuned gap": tuned_witness,
    SPREAD: _token_at_zero,
}
"""The constructions by name: one head and a ball to an input [n, d], None if it has none there."""


def _plain(f: SelfAttention, h: int) -> SelfAttention:
    """Head h with O multiplied into V and plain dot-product scores; the query bias is kept."""
    one = f.head(h)
    V = one.V
    if f.O is not None:
        m = V.shape[0]
        V = f.O[:, h * m : (h + 1) * m] @ V
    bias = one.biases[0] if one.biases else None
    kernel = Dot(scale=default_scale(one.kernel, one.Q.shape[0]))
    return replace(
        one, V=V, O=None, biases=None if bias is None else (bias, None, None), kernel=kernel
    )


@once
def _adversaries(one: SelfAttention) -> tuple[Adversary, ...]:
    """Return the families of A = s K'Q."""
    # s Q K' w = g w implies A K'w = g K'w: the small matrix has the nonzero eigenvalues of A.
    k, d = one.Q.shape
    s = default_scale(one.kernel, k)
    if k < d:
        return adversaries(s * one.Q @ one.K.T, lift=one.K.T)
    return adversaries(s * one.K.T @ one.Q)
