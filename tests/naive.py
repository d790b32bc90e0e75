"""Plain attention, differentiated by autograd: an independent truth for the closed forms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import lipscope as ls


def naive_attend(
    q,
    k,
    v,
    scale=None,
    causal=False,
    window=None,
    mask=None,
    padding=None,
    softcap=None,
    sinks=None,
):
    """Same contract as lipscope.attend, with repeated keys for groups and an explicit softmax."""
    repeat = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(repeat, -3), v.repeat_interleave(repeat, -3)
    n, m = q.shape[-2], k.shape[-2]
    S = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return naive_softmax(S, n, m, causal, window, mask, padding, softcap, sinks) @ v


def naive_softmax(S, n, m, causal, window, mask, padding, softcap, sinks):
    """Softmax over the visible keys of each row; zero where there are none."""
    if softcap:
        S = softcap * torch.tanh(S / softcap)
    i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)[None]
    seen = torch.ones(n, m, dtype=torch.bool)
    seen = seen & (j <= i) if causal else seen
    seen = seen & (j > i - window) if window else seen
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        S, seen = S + mask.clamp_min(-1e300), seen & (mask > -math.inf)
    if padding is not None:
        seen = (
            seen & padding[..., None, None, :] & (padding[..., None, :, None] if n == m else True)
        )
    seen = seen.expand(S.shape)
    top = torch.where(seen, S, -math.inf).amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks[:, None, None])
    top = torch.where(top.isinf(), 0.0, top).detach()
    E = torch.where(seen, torch.exp(torch.where(seen, S - top, 0.0)), 0.0)
    Z = E.sum(-1, keepdim=True)
    if sinks is not None:
        Z = Z + torch.exp(sinks[:, None, None] - top)
    return torch.where(Z > 0, E / torch.where(Z > 0, Z, 1.0), 0.0)


def naive_layer(f: ls.SelfAttention, X: Tensor) -> Tensor:
    """The layer from its definition: f(X) for X [n, d]."""
    bq, bk, bv = f.biases or (None, None, None)

    def project(W, b, heads):
        y = X @ W.T + (0 if b is None else b)
        return y.unflatten(-1, (heads, -1)).transpose(-3, -2)

    q, k, v = project(f.Q, bq, f.heads), project(f.K, bk, f.groups), project(f.V, bv, f.groups)
    if isinstance(f.kernel, ls.Dot) and f.kernel.rope is not None:
        q, k = rotate(q, f.kernel.rope), rotate(k, f.kernel.rope)
    k, v = k.repeat_interleave(f.heads // f.groups, 0), v.repeat_interleave(f.heads // f.groups, 0)
    scale = f.kernel.scale or 1 / math.sqrt(q.shape[-1])
    S = (
        -scale * (q[:, :, None] - k[:, None]).square().sum(-1)
        if isinstance(f.kernel, ls.L2)
        else scale * (q @ k.mT)
    )
    n = X.shape[0]
    P = naive_softmax(
        S, n, n, f.causal, f.window, f.mask, f.padding, f.kernel.softcap, f.kernel.sinks
    )
    joined = (P @ v).transpose(0, 1).flatten(1)
    return joined if f.O is None else joined @ f.O.T


def rotate(x: Tensor, rope: ls.Rope) -> Tensor:
    """Rotate coordinates j and j + k/2 of token i by its angle j, one plane at a time."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for j in range(half):
        c, s = rope.cos[: x.shape[-2], j], rope.sin[: x.shape[-2], j]
        out[..., j] = c * x[..., j] - s * x[..., j + half]
        out[..., j + half] = s * x[..., j] + c * x[..., j + half]
    return out


def dense_jacobian(f: ls.SelfAttention, X: Tensor) -> Tensor:
    """The whole Jacobian [n d', n d] by autograd through the plain layer."""
    J = torch.autograd.functional.jacobian(lambda Z: naive_layer(f, Z), X, vectorize=True)
    return J.reshape(-1, X.numel())
