"""How much attention can stretch the distance of two measures in a ball; proofs in docs/theory/mean_field.md.

R is the radius of the ball and a = ||A|| R^2, A = K'Q/sqrt(k). With a query bias b_q scores range over 2 a_b in a row,
a_b = R (||A|| R + |K'b_q|/sqrt(k)).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from lipscope._types import UserError
from lipscope.attention.kernels import Dot, default_scale
from lipscope.attention.layer import SelfAttention
from lipscope.mean_field.attention_on_measures import liftable

HeadBound = Callable[[float, float], float]


def w2_bound(f: SelfAttention, R: float) -> float:
    """W2 without mask: ||V|| (a + (1 + a) e^a), half the exponent of the paper's."""
    _check_order(f, causal=False)
    return _over_heads(f, R, lambda a, a_b: a + (1 + a_b) * _exp(a_b))


def w2_bound_castin2024(f: SelfAttention, R: float) -> float:
    """W2 without mask, as published: ||V|| (1 + 3a) e^{2a}; stated without query bias."""
    _check_order(f, causal=False)
    if f.biases is not None and f.biases[0] is not None:
        raise UserError("this bound is stated without a query bias; use w2_bound")
    return _over_heads(f, R, lambda a, _: (1 + 3 * a) * _exp(2 * a))


def w_inf_bound(f: SelfAttention, R: float) -> float:
    """W_inf without mask and d_inf with one: ||V|| (1 + 2a); no exponential, whatever the weights."""
    return _over_heads(f, R, lambda a, a_b: 1 + a + a_b)


def d_p_bound(f: SelfAttention, R: float, p: float = 2) -> float:
    """d_p of causal attention, 1 < p: ||V|| (a + p/(p-1) (1 + 2a) e^{2a}); w_inf_bound at p = inf, none at p = 1."""
    _check_order(f, causal=True)
    if not p > 1:
        raise UserError(f"p must be above 1, got {p!r}: averaging over the past has no constant in d_1")
    if math.isinf(p):
        return w_inf_bound(f, R)
    return _over_heads(f, R, lambda a, a_b: a + p / (p - 1) * (1 + 2 * a_b) * _exp(2 * a_b))


def score_matrices(f: SelfAttention) -> torch.Tensor:
    """A_h = K_h' Q_h scale for every head, [heads, d, d]: the score of x_i and x_j is x_j' A x_i."""
    liftable(f)
    if not isinstance(f.kernel, Dot) or f.kernel.softcap is not None:
        raise UserError("A = K'Q/sqrt(k) belongs to dot-product scores; this map has an L2 kernel or a softcap")
    Q = f.Q.unflatten(0, (f.heads, -1))
    K = f.K.unflatten(0, (f.groups, -1)).repeat_interleave(f.heads // f.groups, dim=0)
    return K.mT @ Q * default_scale(f.kernel, Q.shape[1])


def value_matrices(f: SelfAttention) -> torch.Tensor:
    """O_h V_h for every head (V_h where there is no O), [heads, d', d]."""
    V = f.V.unflatten(0, (f.groups, -1)).repeat_interleave(f.heads // f.groups, dim=0)
    return V if f.O is None else f.O.unflatten(1, (f.heads, -1)).transpose(0, 1) @ V


def _over_heads(f: SelfAttention, R: float, one: HeadBound) -> float:
    """Heads that O adds up: sum of their bounds; heads side by side: root of the sum of squares."""
    if not (math.isfinite(R) and R >= 0):
        raise UserError(f"R must be a finite radius, got {R!r}")
    A = torch.linalg.matrix_norm(score_matrices(f), 2)
    V = torch.linalg.matrix_norm(value_matrices(f), 2)
    b_q = f.biases[0] if f.biases is not None else None
    beta = torch.zeros_like(A)
    if b_q is not None:
        K = f.K.unflatten(0, (f.groups, -1)).repeat_interleave(f.heads // f.groups, dim=0)
        shifts = (K.mT @ b_q.unflatten(0, (f.heads, -1))[..., None])[..., 0]
        beta = shifts.norm(dim=-1) * default_scale(f.kernel, K.shape[1])
    rows = zip(V.tolist(), A.tolist(), beta.tolist(), strict=True)
    each = [v * one(norm * R * R, R * (norm * R + shift)) if v else 0.0 for v, norm, shift in rows]
    return sum(each) if f.O is not None else math.hypot(*each)


def _check_order(f: SelfAttention, causal: bool) -> None:
    if f.causal != causal:
        raise UserError(
            "this bound is for attention without a mask; for causal attention use d_p_bound or w_inf_bound"
            if f.causal
            else "this bound is for causal attention; without a mask use w2_bound or w_inf_bound"
        )


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf
