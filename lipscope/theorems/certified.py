"""A certified bound on a ball around X: the norm at X plus an integral of the second derivative.

    ||Y - X||_F <= r   =>   ||D_Y f|| <= ||D_X f|| + int_0^r B(rho) d rho,    B nondecreasing,

B(rho) a bound of ||D^2 f|| at distance rho; or, where it is smaller, an interval bound of the three
blocks of D_Y f. Notation and proof: docs/theory/certified.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipscope._types import Around, Domain
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import jacobian
from lipscope.linalg.estimate import as_single
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.theorems.input_dependent import Centred, centred, features, narrow
from lipscope.theorems.rounding import TINY, U, frobenius_up, gamma, length_up, norm_up, up
from lipscope.theorems.statement import (
    PLAIN_DOT,
    Bound,
    Head,
    over_heads,
)

STEPS = 8
"""Number of steps of the right Riemann sum of B, each one evaluation."""

GRAM = 128
"""Sequence length up to which the third cumulant is bounded by an n x n Gram matrix per query."""


class Base:
    """What B(rho) needs from X: weights, b_i, centred V x_j and A' x_j, each with its error.

    b: [n, .], coordinates with the lengths and inner products of b_i; own: |b_i + A' (x_i - c_i)|
    """

    def __init__(self, h: Head, X: Tensor) -> None:
        seen = features(h, X)
        s = h.scale
        n = len(X)
        K, K_off = narrow(h.one.K)
        Q, Q_off = narrow(h.one.Q)
        K_error = seen.q_slack + length_up(seen.q) * (K_off + gamma(h.steps))
        Q_error = seen.k_slack + length_up(seen.k) * (Q_off + gamma(h.steps))
        a_slack = abs(s) * frobenius_up(h.one.Q) * Q_error * (1 + gamma(16))
        whole_a = s * (seen.k @ h.one.Q)
        own = length_up(s * (seen.q @ h.one.K) + whole_a - seen.P @ whole_a)
        self.h = h
        self.seen = seen
        self.b = s * (seen.q @ K)
        self.b_slack = abs(s) * frobenius_up(h.one.K) * K_error * (1 + gamma(16))
        self.b_long = length_up(self.b) + self.b_slack
        self.v = centred(seen, seen.v, seen.v_slack)
        self.a = centred(seen, s * (seen.k @ Q), a_slack)
        # The centre is computed in two coordinate systems, and may differ by the errors of both.
        self.own = (
            own
            + self.b_slack
            + a_slack
            + 4 * a_slack.max()
            + 4 * gamma(n + 8) * length_up(whole_a).max()
        )

    @property
    def v_far(self) -> Tensor:
        """Upper bounds of |V x'_ij| [n, n]; 0 for invisible keys."""
        return torch.where(self.seen.seen, self.v.length + self.v.slack, 0.0)

    @property
    def a_far(self) -> Tensor:
        return torch.where(self.seen.seen, self.a.length + self.a.slack, 0.0)


def weights_within(x: Base, rho: float) -> Tensor:
    """P-bar: upper bounds of the weights P_ij(Z) over all Z with ||Z - X||_F <= rho."""
    seen = x.seen
    A = x.h.A_norm
    n = len(seen.P)
    delta = rho * torch.sqrt(x.b_long[:, None].square() + x.a_far.square()) + A * rho * rho / 2
    # On the diagonal query and key are one token, and both derivatives act together.
    delta[range(n), range(n)] = rho * x.own + A * rho * rho
    # delta bounds the change of every score, to which the error of the computed score is added.
    delta = delta * (1 + 20 * U) + seen.log_slack[:, None]
    rise = torch.exp(delta) * (1 + 8 * U + 4 * U * delta)
    fall = torch.exp(-delta) * (1 - 8 * U - 4 * U * delta).clamp_min(0)
    high = torch.where(seen.seen, seen.P.clamp_min(TINY), 0.0) * rise
    low = torch.where(seen.P > TINY, seen.P, 0.0) * fall
    others = (
        (low.sum(1, keepdim=True) * (1 - gamma(n + 4)) - low * (1 + 4 * U)) * (1 - 4 * U)
    ).clamp_min(0)
    # The smaller of two bounds: own score up and all others down, or the denominator bounded
    # by Jensen's inequality.
    monotone = torch.where(high.isinf(), 1.0, high / (high + others).clamp_min(TINY))
    row = length_up(seen.P) * torch.exp(seen.log_slack) * (1 + gamma(n + 8))
    mean = (x.b_long * row * rho + A * rho * rho + x.a.mean * rho) * (1 + 20 * U)
    jensen = high * (torch.exp(mean) * (1 + 8 * U + 4 * U * mean))[:, None]
    most = torch.fmin(monotone, jensen) * (1 + 16 * U)
    return torch.where(seen.seen, most.nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0), 0.0)


class AtRadius:
    """The quantities of docs/theory/certified.md at radius rho, in its notation.

    P is P-bar, b is b-bar, pi the root of the largest weight of each row.
    """

    def __init__(self, x: Base, rho: float) -> None:
        A = x.h.A_norm
        V = x.h.V_norm
        P = weights_within(x, rho)
        n = len(P)
        root = P.sqrt() * (1 + 4 * U)
        pi = root.amax(dim=1)
        b = (x.b_long + A * rho) * (1 + 8 * U)
        self.v_size = _weighted_norm(root, x.v)  # ||(sqrt P-bar V x')||
        self.a_size = _weighted_norm(root, x.a)
        sigma = self.v_size + V * pi * rho
        q = self.a_size + A * pi * rho
        tau = torch.sqrt((pi * b).square() + (root.diagonal() * b + q).square()) * (1 + 16 * U)
        columns = norm_up(root.T[..., None] * x.b)
        columns = columns + length_up(root.T * (x.b_slack + 4 * U * x.b_long)) * (1 + gamma(n + 8))
        self.P = P
        self.root = root
        self.pi = pi
        self.b = b
        self.sigma = sigma
        self.q = q
        self.tau = tau
        self.k_b = columns.max() + A * pi.max() * rho
        self.T = self.k_b + q.max()
        self.e_v = rho * (V * pi + sigma * tau) + x.v.mean
        self.e_a = rho * (A * pi + q * tau) + x.a.mean


def _weighted_norm(root: Tensor, y: Centred) -> Tensor:
    """||(sqrt(P-bar_ij) y_ij)_j|| for each i."""
    return norm_up(root[..., None] * y.y) + length_up(root * (y.slack + 4 * U * y.length))


def third_cumulant(x: Base, s: AtRadius, rho: float) -> Tensor:
    """lambda_i: a bound of the norm of kappa_3(s, V z, A' z) for scores s of unit variance."""
    A = x.h.A_norm
    V = x.h.V_norm
    v_max = x.v_far.amax(dim=1)
    a_max = x.a_far.amax(dim=1)
    core = torch.minimum(v_max * s.a_size, a_max * s.v_size)
    if len(s.P) <= GRAM:
        # The root of the largest eigenvalue of sqrt(P_j P_l) <V x'_j, V x'_l> <A' x'_j, A' x'_l>.
        steps = x.v.y.shape[-1] + x.a.y.shape[-1] + 16
        G = (x.v.y @ x.v.y.mT) * (x.a.y @ x.a.y.mT) * s.root[:, :, None] * s.root[:, None, :]
        size = length_up(s.root * x.v_far * x.a_far)
        slack = length_up(s.root * (x.v_far * x.a.slack + x.a_far * x.v.slack))
        square = norm_up(G) + 2 * size * slack + gamma(steps) * size.square()
        core = torch.minimum(core, square.sqrt() * (1 + 4 * U))
    shifts = (
        V * rho * (s.root * x.a_far).amax(1)
        + A * rho * (s.root * x.v_far).amax(1)
        + V * A * rho * rho * s.pi
    )
    return core + shifts + s.sigma * s.e_a + s.e_v * s.q


def second_derivative(x: Base, rho: float) -> float:
    """B(rho): an upper bound of ||D^2 f|| at every Z with ||Z - X||_F <= rho (V scaled)."""
    A = x.h.A_norm
    V = x.h.V_norm
    s = AtRadius(x, rho)
    n = len(s.P)
    d = x.h.d
    # One term per way in which D f depends on X: queries, values, keys (through scores, through
    # tokens), and the dependence of b_i on its own token.
    query = (V * s.pi * s.q + s.sigma * s.pi * A + s.tau * third_cumulant(x, s, rho)).max()
    values = V * torch.minimum(
        s.pi.max() * s.T, (s.P * s.tau[:, None].square()).sum(0).max().sqrt()
    )
    total = (
        query
        + values
        + _keys_through_scores(x, s, rho)
        + V * _keys_through_tokens(s)
        + (s.sigma * s.pi).max() * A
    )
    return up(total.item(), 2 * n + d + x.h.V.shape[0] + 200)


def _keys_through_scores(x: Base, s: AtRadius, rho: float) -> Tensor:
    """c_1, a bound of kappa_3(s, V z, <b, eps>): the least of three."""
    V = x.h.V_norm
    row = s.P.norm(dim=1)
    omega = (s.root * x.v_far).amax(1) + s.pi * (V * rho + s.e_v)
    v_bar = x.v_far + (V * rho + s.e_v)[:, None]
    through_all = (s.b * (omega + s.sigma * row)).max() * s.T
    through_keys = (s.tau * (x.v_far.amax(1) + V * rho + s.e_v)).max() * s.k_b
    apart = (
        (s.b.square()[:, None] * s.P * v_bar).norm(dim=0).max()
        + (s.b.square() * s.sigma * s.pi).max() * norm_up(s.P)
        + (s.b * omega * s.q).max()
        + (s.sigma * s.b * row).max() * s.T
    )
    return torch.minimum(apart, torch.minimum(through_all, through_keys))


def _keys_through_tokens(s: AtRadius) -> Tensor:
    """c_2 / ||V||, a bound of Cov(eta, <b, eps>): the least of three."""
    direct = (s.b[:, None] * s.P).norm(dim=0).max() + (s.b * s.P.norm(dim=1)).max() * norm_up(s.P)
    mass = s.P.sum(0).max().sqrt() * (s.b * s.pi).max()
    return torch.minimum(direct, torch.minimum(s.pi.max() * s.k_b, mass))


def interval(x: Base, rho: float) -> float:
    """Bound the three blocks of D_Z f over the whole ball at once (V scaled)."""
    A = x.h.A_norm
    V = x.h.V_norm
    s = AtRadius(x, rho)
    n = len(s.P)
    d = x.h.d
    weight = (s.root * s.sigma[:, None]).T
    columns = norm_up(weight[..., None] * x.b) + length_up(weight * (x.b_slack + 8 * U * x.b_long))
    keys = columns.max() + A * rho * (s.sigma * s.pi).max()
    # ||P|| over the ball: of the matrix of upper bounds, or by column sums (rows of P sum to one).
    weights = torch.minimum(norm_up(s.P), s.P.sum(0).max().sqrt())
    return up(((s.sigma * s.q).max() + V * weights + keys).item(), 2 * n + d + x.h.V.shape[0] + 200)


def certified_upper(f: SelfAttention, domain: Domain) -> float:
    """Take the smaller of Taylor and interval bound; ||D_X f|| enters by its upper bound."""
    assert isinstance(domain, Around)
    X = domain.X
    r = domain.r
    radii = [r * (i + 1) / STEPS * (1 + 4 * U) for i in range(STEPS)]

    known: dict[Head, Base] = {}

    def at_center(h: Head) -> Base:
        if h not in known:
            known[h] = Base(h, X)
        return known[h]

    def rise(h: Head) -> float:
        x = at_center(h)
        # B is nondecreasing, so the right end of each step bounds it over the step.
        return up(math.fsum(_finite(second_derivative, x, rho) for rho in radii) * r / STEPS)

    at_X = as_single(spectral_norm(jacobian(f, X), tol=1e-6, gap=1e-4)).upper
    taylor = up(at_X + over_heads(f, rise))
    return min(taylor, over_heads(f, lambda h: _finite(interval, at_center(h), r)))


def _finite(part: Callable[[Base, float], float], x: Base, rho: float) -> float:
    """Return the value, or infinity if it is NaN or linear algebra failed to converge."""
    try:
        value = part(x, rho)
    except RuntimeError:
        return math.inf
    return math.inf if math.isnan(value) else value


BOUNDS = (
    Bound(
        name="certified",
        domain=Around,
        hypotheses=PLAIN_DOT,
        where="docs/theory/certified.md#b",
        fn=certified_upper,
        confidence=1 - Solver().failure,
    ),
)
