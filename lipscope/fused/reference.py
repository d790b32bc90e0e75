"""Dense attention and its derivatives in closed form: the reference for the other backends.

Layout: q [..., H, n, k], k [..., G, n', k], v [..., G, n', m], already scaled so that the score is
T = q k'. The H/G query heads of a group are stacked as rows, so that grouped keys and values are
never repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.fused.pattern import Pattern, without_level

Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Weights:
    """P = softmax(S) [..., G, rows, n'], and under a softcap two derivatives of S in T."""

    P: Tensor
    slope: Tensor | None = None
    bend: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """Apply a change to every tensor."""
        slope, bend = (None if x is None else change(x) for x in (self.slope, self.bend))
        return Weights(change(self.P), slope, bend)

    def dS(self, dT: Tensor) -> Tensor:
        return dT if self.slope is None else self.slope * dT


def rows(x: Tensor, groups: int) -> Tensor:
    """[..., H, n, k] -> [..., G, (H/G) n, k]."""
    return x if x.shape[-3] == groups else x.unflatten(-3, (groups, -1)).flatten(-3, -2)


def heads(x: Tensor, n_heads: int) -> Tensor:
    """[..., G, (H/G) n, k] -> [..., H, n, k], the inverse of `rows`."""
    groups = x.shape[-3]
    return x if groups == n_heads else x.unflatten(-2, (n_heads // groups, -1)).flatten(-4, -3)


def _spread(x: Tensor, groups: int, n_heads: int, n: int) -> Tensor:
    """A mask [..., H | 1, n | 1, n'] in the layout of the scores."""
    if groups == n_heads:
        return x
    return rows(x.expand(*x.shape[:-3], n_heads, n, x.shape[-1]), groups)


def scores(q: Tensor, k: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor | None]:
    """Scores [..., G, rows, n'] before any mask, and tanh(T / softcap) where there is a softcap."""
    T = rows(q, k.shape[-3]) @ k.mT
    if pattern.softcap is None:
        return T, None
    t = torch.tanh(T / pattern.softcap)
    return pattern.softcap * t, t


def logits(q: Tensor, k: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """S [..., G, rows, n'] with -inf where masked, tanh(T / softcap), and the level of each row.

    The level [..., G, rows, 1] is the largest entry of an additive mask that a row sees; None
    without such a mask. It is left out of S, and hence of the log-sum-exp: next to a large level
    the scores would lose their digits.
    """
    S, t = scores(q, k, pattern)
    n = q.shape[-2]
    n_heads = q.shape[-3]
    groups = k.shape[-3]
    seen = pattern.visible(n, k.shape[-2], q.device)
    level = None
    if pattern.bias is not None:
        bias = pattern.bias.to(torch.promote_types(pattern.bias.dtype, S.dtype))
        parts = without_level(bias, seen)
        rest, level = (_spread(x.to(S.dtype), groups, n_heads, n) for x in parts)
        S = S + rest
    if seen is not None:
        S = S.masked_fill(~_spread(seen, groups, n_heads, n), -torch.inf)
    return S, t, level


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """o = P v [..., H, n, m] and the log-sum-exp of each row [..., H, n] of `logits`.

    The latter is +inf for a fully masked row, whose P is 0.
    """
    o, lse, _ = forward_and_weights(q, k, v, pattern)
    return o, lse


def forward_and_weights(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern
) -> tuple[Tensor, Tensor, Weights]:
    """`forward`, which also returns the weights."""
    S, t, level = logits(q, k, pattern)
    sinks = None
    if pattern.sinks is not None:
        # The sinks as a column [..., G, rows, 1], minus the level that was taken out of S.
        sinks = pattern.sinks[:, None, None].expand(-1, q.shape[-2], 1)
        sinks = rows(sinks, k.shape[-3]).to(S)
        if level is not None:
            # A sink that would overflow takes all the weight; inf - inf would be NaN.
            sinks = (sinks - level).clamp_max(torch.finfo(S.dtype).max)
    top = S.amax(dim=-1, keepdim=True)
    top = top if sinks is None else torch.maximum(top, sinks)
    top = top.masked_fill(top == -torch.inf, 0.0)
    # One exponential, divided by its own row sum: for scores beyond 1/eps, log(sum) would be lost
    # in top + log(sum), and the rows of exp(S - lse) would not sum to one.
    E = torch.exp(S - top)
    Z = E.sum(dim=-1, keepdim=True)
    Z = Z if sinks is None else Z + torch.exp(sinks - top)
    Z = Z.masked_fill(Z == 0, torch.inf)
    W = Weights(E / Z) if t is None else _curved(E / Z, t, pattern)
    lse = top + Z.log()
    return heads(W.P @ v, q.shape[-3]), heads(lse, q.shape[-3])[..., 0], W


def weights(q: Tensor, k: Tensor, lse: Tensor, pattern: Pattern) -> Weights:
    """P = exp(S - lse), recomputed from the saved log-sum-exp."""
    S, t, _ = logits(q, k, pattern)
    P = torch.exp(S - rows(lse[..., None], k.shape[-3]))
    return Weights(P) if t is None else _curved(P, t, pattern)


def _curved(P: Tensor, t: Tensor, pattern: Pattern) -> Weights:
    """P with the derivatives of capped scores, from t = tanh(T / softcap)."""
    assert pattern.softcap is not None
    slope = 1 - t.square()
    return Weights(P, slope, -2 * t * slope / pattern.softcap)


def jvp(W: Weights, q: Tensor, k: Tensor, v: Tensor, tangent: Triple) -> Tensor:
    """dT = dq k' + q dk';  dP = P (dS - r), r = rowsum(P dS);  do = dP v + P dv."""
    return jvp_and_drift(W, q, k, v, tangent)[0]


def jvp_and_drift(
    W: Weights, q: Tensor, k: Tensor, v: Tensor, tangent: Triple
) -> tuple[Tensor, Tensor]:
    """`jvp`, and r as a column [..., H, n, 1]."""
    # The row sum is subtracted before the product with v: for huge scores P dS v and r o nearly
    # cancel, and their difference would be all rounding.
    groups, (dq, dk, dv) = k.shape[-3], tangent
    dS = W.dS(_mixed(rows(dq, groups), rows(q, groups), k, dk))
    drift = (W.P * dS).sum(-1, keepdim=True)
    do = (W.P * (dS - drift)) @ v + W.P @ dv
    return heads(do, q.shape[-3]), heads(drift, q.shape[-3])


def vjp(W: Weights, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Triple:
    """gP = g v';  gT = slope P (gP - rowsum(P gP));  gq = gT k, gk = gT' q, gv = P' g."""
    groups = k.shape[-3]
    g = rows(g, groups)
    gP = g @ v.mT
    gT = W.dS(W.P * (gP - (W.P * gP).sum(-1, keepdim=True)))
    return heads(gT @ k, q.shape[-3]), gT.mT @ rows(q, groups), W.P.mT @ g


def _mixed(dq: Tensor, q: Tensor, k: Tensor, dk: Tensor) -> Tensor:
    """dq k' + q dk' as one product."""
    return torch.cat([dq, q], dim=-1) @ torch.cat([k, dk], dim=-1).mT


def second_vjp(W: Weights, q: Tensor, k: Tensor, v: Tensor, tangent: Triple, g: Tensor) -> Triple:
    """Gradient in q, k, v of <g, do> = sum_i Cov_i(dS, w) + E_i[y], w = g v', y = g dv'."""
    groups, (dq, dk, dv) = k.shape[-3], tangent
    do = rows(jvp(W, q, k, v, tangent), groups)
    q_ = rows(q, groups)
    dq_ = rows(dq, groups)
    g = rows(g, groups)
    dT = _mixed(dq_, q_, k, dk)
    dS = W.dS(dT)
    # Both factors of the covariance are centred, so that a common part cannot cancel later.
    s = dS - (W.P * dS).sum(-1, keepdim=True)
    w = g @ v.mT
    w = w - (W.P * w).sum(-1, keepdim=True)
    on_dS = W.P * w
    on_T = W.dS(W.P * (s * w + g @ dv.mT - (g * do).sum(-1, keepdim=True)))
    if W.bend is not None:
        on_T = on_T + W.bend * dT * on_dS
    on_dT = W.dS(on_dS)
    return (
        heads(on_T @ k + on_dT @ dk, q.shape[-3]),
        on_T.mT @ q_ + on_dT.mT @ dq_,
        (W.P * s).mT @ g,
    )


def second_jvp(W: Weights, q: Tensor, k: Tensor, v: Tensor, first: Triple, other: Triple) -> Tensor:
    """D^2 o [first, other]: with s, t the scores' derivatives and c their mixed one,

    d2P = P ((s - Es)(t - Et) - Cov(s, t) + c - Ec).
    """
    groups, (dq, dk, dv), (eq, ek, ev) = k.shape[-3], first, other
    q_ = rows(q, groups)
    dq = rows(dq, groups)
    eq = rows(eq, groups)
    dT = _mixed(dq, q_, k, dk)
    eT = _mixed(eq, q_, k, ek)
    s = W.dS(dT)
    t = W.dS(eT)
    c = W.dS(_mixed(dq, eq, ek, dk))
    if W.bend is not None:
        c = c + W.bend * dT * eT
    # A sink has score derivative 0: it enters the means only because the rows of P then sum to
    # less than one.
    mean_s = (W.P * s).sum(-1, keepdim=True)
    mean_t = (W.P * t).sum(-1, keepdim=True)
    covariance = (W.P * s * t).sum(-1, keepdim=True) - mean_s * mean_t
    d2P = W.P * ((s - mean_s) * (t - mean_t) - covariance + c - (W.P * c).sum(-1, keepdim=True))
    do = d2P @ v + (W.P * (s - mean_s)) @ ev + (W.P * (t - mean_t)) @ dv
    return heads(do, q.shape[-3])
