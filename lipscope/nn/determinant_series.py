"""log det(I + J) = tr J - tr J^2 / 2 + tr J^3 / 3 - ..., with traces from random sign vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def remainder(constant: float, terms: int, size: int) -> float:
    """size c^(m+1) / ((m+1) (1-c)) >= sum_{k>m} |tr J^k| / k, since |tr J^k| <= size c^k."""
    return size * constant ** (terms + 1) / ((terms + 1) * (1 - constant))


def power_series(
    g: Callable[[Tensor], Tensor], x: Tensor, signs: Tensor, weights: Tensor, keep: bool
) -> Tensor:
    """sum_k weights[k] v'J^k v with J = D_x g, for every v in signs: [probes] or [probes, B].

    signs is [probes, *x.shape]. keep: whether the result is differentiable.
    """
    # Every probe gets its own copy of x in one batch: a term costs one backward pass for all.
    many = (x if keep else x.detach()).expand_as(signs).reshape(-1, *x.shape[-2:])
    many = many if many.requires_grad else many.requires_grad_(True)
    y = g(many)
    v = w = signs.reshape(many.shape)
    total = torch.zeros(signs.shape[:-2], dtype=x.dtype, device=x.device)
    for weight in weights:
        if not y.requires_grad:  # g does not depend on x
            break
        (w,) = torch.autograd.grad(
            y, many, w, create_graph=keep, retain_graph=True, materialize_grads=True
        )
        inner = (w * v).sum(dim=(-2, -1)).reshape(total.shape)
        total = total + weight.reshape(-1, *[1] * (total.ndim - 1)) * inner
    return total


def series_weights(terms: int, probes: int, going_on: float) -> Tensor:
    """(-1)^(k+1) / k for `terms` terms, [k, probes], and a tail of random length for each probe.

    The tail continues with probability going_on after each term. Its j-th term is divided by
    going_on^j, the probability of reaching it, which keeps the sum unbiased.
    """
    tails = torch.zeros(probes, dtype=torch.long)
    walking = torch.rand(probes) < going_on
    while bool(walking.any()):
        tails += walking
        walking = walking & (torch.rand(probes) < going_on)
    k = torch.arange(1, terms + int(tails.max()) + 1, dtype=torch.float64)[:, None]
    late = (k - terms).clamp_min(0)
    return torch.where(late <= tails, (-1.0) ** (k + 1) / k / (going_on or 1.0) ** late, 0.0)
