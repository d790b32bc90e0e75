"""Differentiable upper bounds on norms of weight matrices, for scales with a guarantee."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SQUARINGS = 8

NEGLIGIBLE = 1e-4
"""A relative loss of norm that is accepted without a tighter test."""

FLOOR = 2.0**-10
"""Smaller norms count as this one when divided by: zero weights then stay zero, and the gradient
there is about a thousand in every dtype, float16 included. The quotient only becomes smaller."""


def spectral_upper(W: Tensor) -> Tensor:
    """Upper bounds on the spectral norms of W [..., p, q], at most 0.7 % too large to size 1000."""
    W, size = unit(widened(W), (-2, -1))
    with torch.autocast(W.device.type, enabled=False):
        G = W @ W.mT if W.shape[-2] <= W.shape[-1] else W.mT @ W
        # A GPU multiplies matrices far faster than it finds their eigenvalues.
        largest = by_squaring(G) if G.is_cuda else by_eigenvalues(G)
        rounding = 4 * sum(W.shape[-2:]) * torch.finfo(W.dtype).eps
        return (
            largest.clamp_min(torch.finfo(W.dtype).tiny).sqrt() * (1 + rounding) * size[..., 0, 0]
        )


def unit(W: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """W divided by its largest entry along dims, and that entry, detached: squares stay finite."""
    size = W.detach().abs().amax(dim=dims, keepdim=True)
    size = size.where(size != 0, 1.0)
    return W / size, size


def of_norm(target: float | Tensor, W: Tensor) -> Tensor:
    """W target / ||W|| in the dtype of W; the rounded matrix has spectral norm at most |target|."""
    # In exact arithmetic S = W target / ||W|| has the norm |target|, to which rounding may add. In
    # a dtype of unit roundoff u the entries change by at most u of their size, hence the norm by at
    # most u ||S||_F <= u sqrt(rank) |target|. In float32 the target is lowered by that much. In
    # bfloat16 this would cost 10 % at size 1000, where the true error E of nearly every matrix is
    # below u |target|: there the target is lowered by 2 u, if the norm of E proves that sufficient.
    wide, p, q = widened(W), *W.shape[-2:]
    S = wide * (target / spectral_upper(wide).clamp_min(FLOOR))[..., None, None]
    # Filled on the device: a copy from the host cannot be captured in a CUDA graph.
    given = target.detach() if isinstance(target, Tensor) else S.new_full((), target)
    size = given.to(S).abs()
    dtype = torch.finfo(W.dtype)
    root = math.sqrt(min(p, q))
    u = dtype.eps / 2
    in_scaling = (8 + root) * torch.finfo(S.dtype).eps
    below_normal = dtype.tiny * u * math.sqrt(p * q)
    lost = in_scaling + u * root + below_normal / size.clamp_min(torch.finfo(S.dtype).tiny)
    sure = S * (1 - lost).clamp_min(0.0)[..., None, None]
    if u * (root - 2) < NEGLIGIBLE:
        return sure.to(W.dtype)
    tight = S * (1 - in_scaling - 2 * u)
    E = _rounded(tight.detach(), W.dtype) - tight.detach()
    enough = 1.01 * _schatten(E) + below_normal <= 2 * u * size
    return torch.where(enough[..., None, None], tight + E, sure).to(W.dtype)


def _rounded(S: Tensor, dtype: torch.dtype) -> Tensor:
    """S rounded to a 16-bit dtype, by bits: compilers may remove a conversion there and back."""
    drop = round(math.log2(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps))
    bits = S.float().view(torch.int32)
    return ((bits + (1 << (drop - 1))) & -(1 << drop)).view(torch.float32).to(S.dtype)


def _schatten(E: Tensor) -> Tensor:
    """The Schatten 8-norm of E, at least ||E||: about twice it at size 1000, for two products."""
    E, size = unit(E, (-2, -1))
    with torch.autocast(E.device.type, enabled=False):
        G = E @ E.mT if E.shape[-2] <= E.shape[-1] else E.mT @ E
        return torch.linalg.matrix_norm(G @ G).sqrt().sqrt() * size[..., 0, 0]


def by_eigenvalues(G: Tensor) -> Tensor:
    """The largest eigenvalues of symmetric G; NaN where G is not finite, instead of an error."""
    finite = G.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    return torch.linalg.eigvalsh(G.where(finite, 0.0))[..., -1].where(finite[..., 0, 0], torch.nan)


def by_squaring(G: Tensor) -> Tensor:
    """||G^m||_F^(1/m) >= ||G||, m a power of two, for symmetric G; at most size^(1/2m) times it."""
    log_norm = rounding = torch.zeros(G.shape[:-2], dtype=G.dtype, device=G.device)
    for step in range(SQUARINGS + 1):
        size = torch.linalg.matrix_norm(G).clamp_min(torch.finfo(G.dtype).tiny)
        log_norm = log_norm + size.log() / 2**step
        rounding = rounding + size.detach().log().abs() / 2**step
        if step < SQUARINGS:
            G = G / size[..., None, None]
            G = G @ G
    # The digits of a logarithm before the decimal point are lost behind it.
    return (log_norm + 4 * torch.finfo(G.dtype).eps * (1 + rounding)).exp()


def widened(W: Tensor) -> Tensor:
    """W in float64 where available: the scale of a layer must not depend on its dtype."""
    return W.float() if W.device.type == "mps" else W.double()
