"""Norms of weight matrices that are never too small, and differentiable: what a guaranteed scale is divided by."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SQUARINGS = 8

NEGLIGIBLE = 1e-4
"""What may be lost of a norm without asking whether less would do."""

FLOOR = 2.0**-10
"""Norms below it are divided by as if they were it: weights that are zero then stay zero, and the slope there is a
thousand in every dtype, float16 included. The quotient is smaller for it, never larger."""


def spectral_upper(W: Tensor) -> Tensor:
    """Upper bounds of the spectral norms of W [..., p, q], at most 0.7 % above them up to size 1000.

    A GPU multiplies matrices far faster than it finds their eigenvalues.
    """
    W, size = unit(widened(W), (-2, -1))
    with torch.autocast(W.device.type, enabled=False):
        G = W @ W.mT if W.shape[-2] <= W.shape[-1] else W.mT @ W
        largest = by_squaring(G) if G.is_cuda else by_eigenvalues(G)
        rounding = 4 * sum(W.shape[-2:]) * torch.finfo(W.dtype).eps
        return (
            largest.clamp_min(torch.finfo(W.dtype).tiny).sqrt() * (1 + rounding) * size[..., 0, 0]
        )


def unit(W: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """W over its largest entry along dims, and that entry, held fixed: squares neither overflow nor vanish."""
    size = W.detach().abs().amax(dim=dims, keepdim=True)
    size = size.where(size != 0, 1.0)
    return W / size, size


def of_norm(target: float | Tensor, W: Tensor) -> Tensor:
    """W target / ||W|| in the dtype of W: what it is rounded to has a spectral norm of at most |target|.

    In exact arithmetic S = W target / ||W|| has the norm |target|, and rounding may add to it. In a dtype of unit
    roundoff u the entries move by at most u of their size, so the norm by at most u ||S||_F <= u sqrt(rank) |target|.
    For float32 that much is given away. For bfloat16 it would be 10 % at size 1000, where the true error E of nearly
    every matrix is below u |target|: 2 u is given away, if the norm of E itself proves that to be enough.
    """
    wide, p, q = widened(W), *W.shape[-2:]
    S = wide * (target / spectral_upper(wide).clamp_min(FLOOR))[..., None, None]
    size = torch.as_tensor(target, dtype=S.dtype, device=S.device).detach().abs()
    dtype, root = torch.finfo(W.dtype), math.sqrt(min(p, q))
    u, in_scaling = dtype.eps / 2, (8 + root) * torch.finfo(S.dtype).eps
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
    """S to the digits of a 16-bit dtype. By bits, since compilers skip a conversion there and back."""
    drop = round(math.log2(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps))
    bits = S.float().view(torch.int32)
    return ((bits + (1 << (drop - 1))) & -(1 << drop)).view(torch.float32).to(S.dtype)


def _schatten(E: Tensor) -> Tensor:
    """(sum of the 8th powers of the singular values)^(1/8) >= ||E||: at size 1000 about twice it, for two products."""
    E, size = unit(E, (-2, -1))
    with torch.autocast(E.device.type, enabled=False):
        G = E @ E.mT if E.shape[-2] <= E.shape[-1] else E.mT @ E
        return torch.linalg.matrix_norm(G @ G).sqrt().sqrt() * size[..., 0, 0]


def by_eigenvalues(G: Tensor) -> Tensor:
    """The largest eigenvalues of symmetric G; NaN where G is not finite, as in any other layer that has diverged."""
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
    # A logarithm of many digits before the point has lost as many behind it.
    return (log_norm + 4 * torch.finfo(G.dtype).eps * (1 + rounding)).exp()


def row_sum(W: Tensor) -> Tensor:
    """The largest absolute row sums of W [..., p, q]: norms for the largest coordinate, rounded up."""
    W = widened(W)
    return W.abs().sum(dim=-1).amax(dim=-1) * (1 + W.shape[-1] * torch.finfo(W.dtype).eps)


def widened(W: Tensor) -> Tensor:
    """In float64 where the device has it: the scale of a layer must not depend on the dtype that it runs in."""
    return W.float() if W.device.type == "mps" else W.double()
