"""Yudin et al.: a bound at X from the norm of the softmax's Jacobian, and a tighter version."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope._types import Domain, Point
from lipscope.attention.layer import SelfAttention
from lipscope.theorems.input_dependent import Features, features
from lipscope.theorems.rounding import frobenius_up, gamma, norm_up, up
from lipscope.theorems.statement import (
    NO_QUERY_BIAS,
    PLAIN_DOT,
    Bound,
    Head,
    over_heads,
)


def softmax_jacobian_norm(P: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """g_1(p) = p_1 (1 - p_1 + p_2), p sorted: a bound of ||diag p - p p'|| for each row p of P."""
    # 1 - p_1 is computed as p_2 + p_3 + ...: a difference would round below the truth near p_1 = 1.
    p = P.sort(dim=-1, descending=True).values
    if p.shape[-1] == 1:
        return torch.zeros_like(p[..., 0])
    return p[..., 0] * (p[..., 1:].sum(dim=-1) + p[..., 1]) * (1 + gamma(p.shape[-1] + 8))


def data_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (||P|| + 2 ||X||^2 ||A|| max_i g_1(P_i))."""
    assert isinstance(domain, Point)
    X = domain.X

    def head(h: Head) -> float:
        seen = features(h, X)
        return up(
            h.V_norm
            * (_weights_norm(seen) + 2 * norm_up(X).item() ** 2 * h.A_norm * _sharpness(seen))
        )

    return over_heads(f, head)


def centred_upper(f: SelfAttention, domain: Domain) -> float:
    """||V|| (||P|| + max_i g_1(P_i) ||X_c|| (||X_c A|| + ||X A' + 1 beta'||)).

    X_c are the tokens minus a common point, here their mean; no covariance depends on it.
    """
    assert isinstance(domain, Point)
    X = domain.X
    Xc = X - X.mean(dim=0)

    def head(h: Head) -> float:
        seen = features(h, X)
        size = frobenius_up(Xc).item()
        long = frobenius_up(X).item()
        spread = norm_up(Xc).item() + gamma(4) * size
        queries = norm_up(Xc @ h.A).item() + gamma(h.steps) * h.A_size * size
        b = X @ h.A.T + h.beta
        keys = norm_up(b).item() + gamma(h.steps) * (h.A_size * long + h.beta_size * len(X) ** 0.5)
        return up(h.V_norm * (_weights_norm(seen) + _sharpness(seen) * spread * (queries + keys)))

    return over_heads(f, head)


def _weights_norm(seen: Features) -> float:
    return up(norm_up(seen.P).item() + frobenius_up(seen.P_slack).item())


def _sharpness(seen: Features) -> float:
    """max_i g_1 of the exact rows; g_1 grows with each entry, so upper bounds of P suffice."""
    return up(softmax_jacobian_norm(seen.P_up).max().item())


BOUNDS = (
    Bound(
        name="Yudin et al.",
        domain=Point,
        hypotheses=(*PLAIN_DOT, NO_QUERY_BIAS),
        cite="yudin2025",
        where="Theorem 3 (local bound of attention through g_1)",
        fn=data_upper,
    ),
    Bound(
        name="Yudin et al., centred",
        domain=Point,
        hypotheses=PLAIN_DOT,
        where="docs/theory/bounds.md#yudin-et-al-and-a-tightening",
        fn=centred_upper,
    ),
)
