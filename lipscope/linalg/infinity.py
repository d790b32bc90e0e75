"""The norm of an operator for the largest coordinate, exactly: the largest absolute row sum, rows
in batches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipscope._types import Status
from lipscope.linalg.estimate import BatchEstimate, Estimate
from lipscope.linalg.operator import LinearOperator, lengths
from lipscope.linalg.solve import DRAWS, WIDENED

EXACT = "largest absolute row sum, all rows; the interval is rounding"
SEEN = (
    ", measured and not proved: that row again, with every operation moved by one unit in the "
    "last place"
)

BLOCK = 1 << 22
"""Numbers in one batch of rows."""


def infinity_norm(J: LinearOperator) -> Estimate | BatchEstimate:
    """max_i sum_j |J_ij|, the norm of J from the largest coordinate to the largest coordinate; one
    product per row.

    right is the sign vector that attains it and left the unit vector of that row. For a batch, of
    each member."""
    members = J.batch or 1
    best = torch.full((members,), -1.0, dtype=torch.float64)
    longest = torch.zeros(members, dtype=torch.float64)
    which = torch.zeros(members, dtype=torch.long)
    right = torch.zeros(members, J.in_size, dtype=J.dtype, device=J.device)
    # A product with attention holds tokens^2 weights.
    tokens = max((shape[0] for shape in (J.in_shape, J.out_shape) if len(shape) > 1), default=1)
    size = max(1, BLOCK // (members * max(J.in_size, J.out_size, tokens**2)))
    for start in range(0, J.out_size, size):
        index = torch.arange(start, min(start + size, J.out_size), device=J.device)
        rows = _rows(J, index)  # [rows, members, in_size]
        sums = rows.double().abs().sum(dim=-1).cpu()
        longest = torch.maximum(longest, lengths(rows.double()).amax(dim=0).cpu())
        top, at = sums.nan_to_num(nan=math.inf).max(dim=0)
        for m in torch.nonzero(top > best)[:, 0].tolist():
            best[m], which[m] = sums[at[m], m], start + at[m]
            right[m] = torch.where(rows[at[m], m] < 0, -1.0, 1.0).to(J.dtype)
    return _estimate(J, best, longest * math.sqrt(J.out_size), which, right)


def _rows(J: LinearOperator, index: Tensor) -> Tensor:
    """Rows of J, [len(index), members, in_size], by one vectorised product."""
    units = torch.zeros(len(index), J.out_size, dtype=J.dtype, device=J.device)
    units[torch.arange(len(index)), index] = 1
    units = units.reshape(len(index), *[1 for _ in J.leading], *J.out_shape)
    units = units.expand(len(index), *J.leading, *J.out_shape)
    return torch.func.vmap(J.rmv)(units).reshape(len(index), J.batch or 1, J.in_size)


def _measured(J: LinearOperator, which: Tensor) -> Tensor:
    """By how much the sum of the longest row moves when rounding is perturbed, widened; 0 where it
    is stated.
    """
    spread = torch.zeros(len(which), dtype=torch.float64)
    if J.perturbed is None:
        return spread
    unit = torch.zeros(len(which), J.out_size, dtype=J.dtype, device=J.device)
    unit[torch.arange(len(which)), which] = 1
    unit = unit.reshape(*J.leading, *J.out_shape)
    row = J.rmv(unit)
    for i in range(DRAWS):
        moved = (J.perturbed(i)[1](unit) - row).reshape(len(which), -1)
        spread = torch.maximum(spread, moved.double().abs().sum(dim=1).cpu())
    return WIDENED * spread


def _estimate(
    J: LinearOperator, best: Tensor, frobenius: Tensor, which: Tensor, right: Tensor
) -> Estimate | BatchEstimate:
    """A row is off by at most the rounding of ||J||_2 in length, hence by sqrt(in_size) times that
    in its sum.
    """
    off = J.error(frobenius) * math.sqrt(J.in_size)
    off, note = (
        torch.maximum(off, _measured(J, which)),
        EXACT if J.perturbed is None else EXACT + SEEN,
    )
    bad = ~(best.isfinite() & off.isfinite())
    value = torch.where(best.isfinite(), best, torch.nan)
    lower = torch.where(bad, torch.zeros_like(best), (best - off).clamp_min(0))
    upper = torch.where(bad, torch.full_like(best, math.inf), best + off)
    left = torch.zeros(len(best), J.out_size, dtype=J.dtype, device=J.device)
    left[torch.arange(len(best)), which] = 1
    many = BatchEstimate(
        value=value,
        lower=lower,
        upper=upper,
        residual=torch.zeros_like(best),
        steps=torch.full_like(best, J.out_size),
        status=tuple(Status.NON_FINITE if b else Status.CONVERGED for b in bad.tolist()),
        left=left.reshape(-1, *J.out_shape),
        right=right.reshape(-1, *J.in_shape),
        confidence=1.0,
        note=note,
    )
    return many if J.batch is not None else many[0]
