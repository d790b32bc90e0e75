"""The norm of an operator for the largest coordinate, exactly: the largest absolute row sum, rows
in batches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipscope._types import Status
from lipscope.linalg.estimate import BatchEstimate, Estimate
from lipscope.linalg.operator import LinearOperator, Product, lengths
from lipscope.linalg.rounding_noise import DRAWS, UNITS, WIDENED, UnseenRoundingError

EXACT = "largest absolute row sum, all rows; the interval is rounding"
SEEN = (
    f", measured and not proved: every row again, with every operation moved by up to {UNITS} "
    f"units in the last place, the change widened {WIDENED} times"
)
UNKNOWN = "largest absolute row sum, all rows; no bounds: {why}"
COARSE = "rounding in {dtype} is not known; use precision='exact' or float64 inputs"

BLOCK = 1 << 22
"""Numbers in one batch of rows."""


def infinity_norm(J: LinearOperator) -> Estimate | BatchEstimate:
    """max_i sum_j |J_ij|, the norm of J from the largest coordinate to the largest coordinate; one
    product per row.

    right is the sign vector that attains it and left the unit vector of that row. For a batch, of
    each member."""
    members = J.batch or 1
    repeated, unknown = _repetitions(J)
    best = torch.full((members,), -1.0, dtype=torch.float64)
    # The largest sums of any row less its rounding, and with it.
    low, high, longest = torch.zeros(3, members, dtype=torch.float64)
    which = torch.zeros(members, dtype=torch.long)
    right = torch.zeros(members, J.in_size, dtype=J.dtype, device=J.device)
    # A product with attention holds tokens^2 weights.
    tokens = max((shape[0] for shape in (J.in_shape, J.out_shape) if len(shape) > 1), default=1)
    size = max(1, BLOCK // (members * max(J.in_size, J.out_size, tokens**2)))
    for start in range(0, J.out_size, size):
        index = torch.arange(start, min(start + size, J.out_size), device=J.device)
        rows = _rows(J, J.rmv, index)  # [rows, members, in_size]
        sums = rows.double().abs().sum(dim=-1).cpu()
        spread = torch.zeros_like(sums)
        for rmv in repeated:
            moved = (_rows(J, rmv, index) - rows).double().abs().sum(dim=-1).cpu()
            spread = torch.maximum(spread, moved.nan_to_num(torch.inf, torch.inf))
        longest = torch.maximum(longest, lengths(rows.double()).amax(dim=0).cpu())
        low = torch.maximum(low, (sums - WIDENED * spread).nan_to_num().amax(dim=0))
        high = torch.maximum(high, (sums + WIDENED * spread).nan_to_num(torch.inf).amax(dim=0))
        top, at = sums.nan_to_num(nan=math.inf).max(dim=0)
        for m in torch.nonzero(top > best)[:, 0].tolist():
            best[m], which[m] = sums[at[m], m], start + at[m]
            right[m] = torch.where(rows[at[m], m] < 0, -1.0, 1.0).to(J.dtype)
    # A row is off by at most the rounding of ||J||_2 in length, hence by sqrt(in_size) times that
    # in its sum.
    stated = J.error(longest * math.sqrt(J.out_size)) * math.sqrt(J.in_size)
    known = best.isfinite() & stated.isfinite() & high.isfinite() & (not unknown)
    left = torch.zeros(members, J.out_size, dtype=J.dtype, device=J.device)
    left[torch.arange(members), which] = 1
    many = BatchEstimate(
        value=torch.where(best.isfinite(), best, torch.nan),
        lower=torch.where(known, (low - stated).clamp_min(0), 0.0),
        upper=torch.where(known, high + stated, torch.inf),
        residual=torch.zeros_like(best),
        steps=torch.full_like(best, J.out_size),
        status=tuple(_status(*each) for each in zip(best, known, strict=True)),
        left=left.reshape(-1, *J.out_shape),
        right=right.reshape(-1, *J.in_shape),
        confidence=1.0 if known.any() else 0.0,
        note=UNKNOWN.format(why=unknown) if unknown else EXACT + SEEN if repeated else EXACT,
    )
    return many if J.batch is not None else many[0]


def _status(value: Tensor, known: Tensor) -> Status:
    if not value.isfinite():
        return Status.NON_FINITE
    return Status.CONVERGED if known else Status.IMPRECISE


def _repetitions(J: LinearOperator) -> tuple[list[Product], str]:
    """J' once more with its rounding moved, for maps that state none; and why rounding is not
    known, if so.
    """
    if J.is_compared:
        return [], COARSE.format(dtype=str(J.dtype).removeprefix("torch."))
    if J.rounding.perturbed is None:
        return [], ""
    try:
        return [J.rounding.perturbed(i)[1] for i in range(DRAWS)], ""
    except torch.OutOfMemoryError:
        return [], "no memory to repeat it"
    except UnseenRoundingError as error:
        return [], f"rounding inside the map is not known ({error})"


def _rows(J: LinearOperator, rmv: Product, index: Tensor) -> Tensor:
    """Rows of J, [len(index), members, in_size], by one vectorised product with its adjoint."""
    units = torch.zeros(len(index), J.out_size, dtype=J.dtype, device=J.device)
    units[torch.arange(len(index)), index] = 1
    units = units.reshape(len(index), *[1 for _ in J.leading], *J.out_shape)
    units = units.expand(len(index), *J.leading, *J.out_shape)
    return torch.func.vmap(rmv)(units).reshape(len(index), J.batch or 1, J.in_size)
