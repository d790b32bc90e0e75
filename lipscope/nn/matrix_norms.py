"""Norms of weight matrices that are never too small, and differentiable: what a guaranteed scale is divided by."""

from __future__ import annotations

import torch
from torch import Tensor

SQUARINGS = 8

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
        return largest.clamp_min(torch.finfo(W.dtype).tiny).sqrt() * (1 + rounding) * size[..., 0, 0]


def unit(W: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """W over its largest entry along dims, and that entry, held fixed: squares neither overflow nor vanish."""
    size = W.detach().abs().amax(dim=dims, keepdim=True)
    size = size.where(size != 0, 1.0)
    return W / size, size


def of_norm(target: float | Tensor, W: Tensor) -> Tensor:
    """W target / ||W||, rounded to the dtype of W at the end: its spectral norm is at most `target`."""
    return (widened(W) * (target / spectral_upper(W).clamp_min(FLOOR))[..., None, None]).to(W.dtype)


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
