"""Norms of weight matrices that are never too small, and differentiable: what a guaranteed scale is divided by."""

from __future__ import annotations

import torch
from torch import Tensor

SQUARINGS = 8


def spectral_upper(W: Tensor) -> Tensor:
    """Upper bounds of the spectral norms of W [..., p, q], at most 0.7 % above them up to size 1000.

    A GPU multiplies matrices far faster than it finds their eigenvalues.
    """
    W = widened(W)
    with torch.autocast(W.device.type, enabled=False):
        G = W @ W.mT if W.shape[-2] <= W.shape[-1] else W.mT @ W
        largest = by_squaring(G) if G.is_cuda else by_eigenvalues(G)
        rounding = 4 * sum(W.shape[-2:]) * torch.finfo(W.dtype).eps
        return largest.clamp_min(torch.finfo(W.dtype).tiny).sqrt() * (1 + rounding)


def by_eigenvalues(G: Tensor) -> Tensor:
    """The largest eigenvalues of symmetric G; NaN where G is not finite, as in any other layer that has diverged."""
    finite = G.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    return torch.linalg.eigvalsh(G.where(finite, 0.0))[..., -1].where(finite[..., 0, 0], torch.nan)


def by_squaring(G: Tensor) -> Tensor:
    """||G^m||_F^(1/m) >= ||G||, m a power of two, for symmetric G; at most size^(1/2m) times it."""
    log_norm = torch.zeros(G.shape[:-2], dtype=G.dtype, device=G.device)
    for step in range(SQUARINGS + 1):
        size = torch.linalg.matrix_norm(G).clamp_min(torch.finfo(G.dtype).tiny)
        log_norm = log_norm + size.log() / 2**step
        if step < SQUARINGS:
            G = G / size[..., None, None]
            G = G @ G
    return log_norm.exp()


def row_sum(W: Tensor) -> Tensor:
    """The largest absolute row sums of W [..., p, q]: norms for the largest coordinate, rounded up."""
    W = widened(W)
    return W.abs().sum(dim=-1).amax(dim=-1) * (1 + W.shape[-1] * torch.finfo(W.dtype).eps)


def widened(W: Tensor) -> Tensor:
    """In float64 where the device has it: the scale of a layer must not depend on the dtype that it runs in."""
    return W.float() if W.device.type == "mps" else W.double()
