"""The input-dependent bound: three norms at X that bound ||D_X f|| without an SVD of D_X f.

    ||D_X f|| <= max_i ||V C_i A||  +  ||V|| ||P||
                 +  ( max_j || sum_i P_ij ||V C_i V'|| b_ij b_ij' || )^(1/2)

With rope b_ij = K' R_j' R_i q_i / sqrt(k) depends on both positions; without it b_ij = b_i. Errors
of computed quantities are bounded row by row (docs/theory/bounds.md, rounding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope._types import Domain, Point
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot, Rope
from lipscope.theorems.rounding import TINY, U, frobenius_up, gamma, length_up, norm_up, up
from lipscope.theorems.statement import (
    DOT,
    PLAIN_SCORES,
    ROTATION,
    Bound,
    Head,
    once,
    over_heads,
    rope_stretch,
    visibility,
)


@dataclass(frozen=True, eq=False)
class Features:
    """Quantities of a head computed at X, with bounds of their errors.

    q, k, v:  rows with errors of length at most q_slack, k_slack, v_slack [n]
    P:        off by at most P_slack [n, n]; above underflow also right to a factor e^(+-log_slack)
              per row. Invisible keys have weight and slack 0.
    """

    q: Float[Tensor, "n k"]
    k: Float[Tensor, "n k"]
    v: Float[Tensor, "n m"]
    P: Float[Tensor, "n n"]
    q_slack: Float[Tensor, "n"]
    k_slack: Float[Tensor, "n"]
    v_slack: Float[Tensor, "n"]
    P_slack: Float[Tensor, "n n"]
    log_slack: Float[Tensor, "n"]
    seen: Bool[Tensor, "n n"]

    @property
    def P_up(self) -> Tensor:
        return (self.P + self.P_slack) * (1 + 4 * U)


@once
def features(h: Head, X: Float[Tensor, "n d"]) -> Features:
    """Queries and keys (rotated), values and attention weights of one head, with error bounds."""
    n = len(X)
    stretch = rope_stretch(h.one) or 1.0
    q, k, _ = (x[0] for x in h.one.project(X))
    long = length_up(X)
    bk = h.one.biases[1] if h.one.biases else None
    far_q = stretch * (frobenius_up(h.one.Q) * long + length_up(h.query_bias))
    far_k = stretch * (frobenius_up(h.one.K) * long + (0.0 if bk is None else length_up(bk)))
    seen = visibility(h.one, n)
    S = h.scale * (q @ k.T)
    S = S if seen.additive is None else torch.where(seen.seen, S + seen.additive, 0.0)
    visible = torch.where(seen.seen, S, 0.0).abs().amax(dim=1)
    # theta bounds the error of a score. A softmax sees differences of scores, hence the factor 2.
    theta = gamma(2 * h.steps) * abs(h.scale) * far_q * far_k.max() + 6 * U * visible
    log_slack = 2 * theta + 2 * (n + 20) * U
    off = torch.expm1(log_slack) * (1 + 4 * U)
    P = torch.where(seen.seen, torch.softmax(torch.where(seen.seen, S, -torch.inf), dim=1), 0.0)
    P_slack = torch.where(seen.seen, off[:, None] * P.clamp_min(TINY) + TINY, 0.0) * (1 + 4 * U)
    one_product = gamma(h.steps)
    v_slack = one_product * h.V_size * long
    return Features(
        q=q,
        k=k,
        v=X @ h.V.T,
        P=P,
        q_slack=one_product * far_q,
        k_slack=one_product * far_k,
        v_slack=v_slack,
        P_slack=P_slack,
        log_slack=log_slack,
        seen=seen.seen,
    )


@dataclass(frozen=True, eq=False)
class Centred:
    """y_ij = y_j - c_i [n, n, m] about computed points c_i, with lengths and errors.

    The points are only near the true means: |sum_j P_ij y_ij| is at most `mean`.
    """

    y: Float[Tensor, "n n m"]
    length: Float[Tensor, "n n"]
    slack: Float[Tensor, "n n"]
    mean: Float[Tensor, "n"]


def centred(seen: Features, y: Float[Tensor, "n m"], y_slack: Float[Tensor, "n"]) -> Centred:
    centre = seen.P @ y
    away = y[None] - centre[:, None]
    length = length_up(away)
    sizes = length_up(y)
    mean = seen.P_slack @ sizes + seen.P_up @ y_slack + gamma(len(y) + 4) * (seen.P_up @ sizes)
    return Centred(
        y=away, length=length, slack=y_slack + 2 * U * length, mean=mean * (1 + gamma(len(y) + 8))
    )


@once
def terms(h: Head, X: Float[Tensor, "n d"]) -> tuple[float, float, float]:
    """Return upper bounds of the query, value and key terms of one head."""
    seen = features(h, X)
    v = centred(seen, seen.v, seen.v_slack)
    values = up(h.V_norm * (norm_up(seen.P).item() + frobenius_up(seen.P_slack).item()))
    return _query_term(h, seen, v), values, _key_term(h, seen, v)


def _query_term(h: Head, seen: Features, v: Centred) -> float:
    """max_i ||Cov_i(v, k) R_i Q|| / sqrt(k)."""
    k = centred(seen, seen.k, seen.k_slack)
    n = len(seen.P)
    stretch = rope_stretch(h.one) or 1.0
    rope = _rope(h)
    M = torch.einsum("ij,ijm,ijk->imk", seen.P, v.y, k.y)
    # Errors of P, of the centred vectors, of the sum, and of the centres, in this order.
    size = v.length * k.length
    off = (
        (seen.P_slack * size).sum(1)
        + (seen.P_up * (v.slack * (k.length + k.slack) + v.length * k.slack)).sum(1)
        + gamma(n + 8) * (seen.P_up * size).sum(1)
        + v.mean * k.mean
    ) * (1 + gamma(n + 16))
    # R_i' is applied to the k side of M: the rotation of the query, before Q.
    turned = M if rope is None else rope.turn_back(M.transpose(0, 1)).transpose(0, 1)
    Q, Q_off = narrow(h.one.Q)
    reading = frobenius_up(M) * (Q_off + gamma(h.steps)) * _size(h.one.Q)
    norms = norm_up(turned @ Q) + stretch * (off * norm_up(h.one.Q) + reading)
    return up(abs(h.scale) * norms.max().item())


def _key_term(h: Head, seen: Features, v: Centred) -> float:
    """max_j || sum_i P_ij ||V C_i V'|| b_ij b_ij' ||^(1/2), b_ij = K' R_j' q_i / sqrt(k)."""
    n = len(seen.P)
    stretch = rope_stretch(h.one) or 1.0
    rope = _rope(h)
    spread = norm_up(seen.P.sqrt()[..., None] * v.y).square() * (1 + gamma(16))
    spread = spread + (
        (seen.P_slack * v.length.square()).sum(1)
        + (seen.P_up * v.slack * (2 * v.length + v.slack)).sum(1)
        + gamma(n + 16) * (seen.P_up * v.length.square()).sum(1)
    ) * (1 + gamma(n + 16))
    # The square roots of the weights go into the rows, so that one norm per key j remains.
    root = (seen.P_up * spread[:, None]).sqrt() * (1 + 4 * U)
    rows = root[..., None] * seen.q[:, None]
    rows = rows if rope is None else rope.turn_back(rows)
    K, K_off = narrow(h.one.K)
    norms = norm_up(rows.transpose(0, 1) @ K)
    reading = (
        (seen.q_slack + length_up(seen.q) * (K_off + gamma(h.steps) + 8 * U))
        * stretch
        * _size(h.one.K)
    )
    norms = norms + length_up((root * reading[:, None]).T)
    return up(abs(h.scale) * norms.max().item())


def narrow(W: Tensor) -> tuple[Tensor, float]:
    """W [k, d], or a smaller [k, k] with the same lengths |y W|; and its relative error."""
    k, d = W.shape
    return (W, 0.0) if k >= d else (torch.linalg.qr(W.T, mode="r")[1].T, gamma(16 * k * d))


def _size(W: Tensor) -> float:
    return frobenius_up(W).item()


def _rope(h: Head) -> Rope | None:
    return h.one.kernel.rope if isinstance(h.one.kernel, Dot) else None


def local_upper(f: SelfAttention, domain: Domain) -> float:
    assert isinstance(domain, Point)
    return over_heads(f, lambda h: up(sum(terms(h, domain.X))))


BOUNDS = (
    Bound(
        name="input-dependent",
        domain=Point,
        hypotheses=(DOT, PLAIN_SCORES, ROTATION),
        where="docs/theory/bounds.md#input-dependent-bound",
        fn=local_upper,
    ),
)
