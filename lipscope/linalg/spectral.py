"""The largest singular value of an operator, with a two-sided certificate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._checks import check_fields, check_whole
from lipscope._types import UserError
from lipscope.linalg.basis import STORAGES
from lipscope.linalg.certificate import check_gap
from lipscope.linalg.estimate import BatchEstimate, Estimate
from lipscope.linalg.golub_kahan import norms
from lipscope.linalg.operator import LinearOperator
from lipscope.linalg.solve import Run, drawn_seed

NOT_FLOAT64 = "no upper bound: it needs float64 products; use precision='exact' or float64 inputs"
NOT_RANDOM = "no upper bound: the start vector was given, not drawn at random"
ROUNDED_BASIS = (
    "no upper bound: it needs Krylov vectors with all their digits; use basis='native' or 'host'"
)
CERTIFIED = (
    "the upper bound holds unless the random start was unlucky, provided that the input was not "
    "chosen with knowledge of the seed and that every product is within four times the error seen"
)

ROUGH = 1e-2
"""Residual to which a rough operator is iterated: its vectors are no better than its products."""

MARGIN = 0.9
"""Share of that residual left to the rough operator: the exact one then seldom needs a second step,
which takes as long as several rough ones.
"""


@dataclass(frozen=True)
class Solver:
    """What the solver may spend, and the failure probability of its upper bound.

    Attributes:
        max_steps: Maximum number of steps; a search in bfloat16, where one goes first, may take as
            many again.
        memory: Bytes for the Krylov bases. By default 2 GiB on a CPU, half of the free memory on a
            GPU, half of all memory for ``basis="host"``.
        failure: Probability with which the upper bounds of a solve may fail, all members of a
            batch together.
        seed: Seed of the random start; a fresh one is drawn by default.
        basis: Where the Krylov bases are kept. "native": beside the operator. "bfloat16": there,
            in two bytes per number, which costs more steps and the upper bound, but no accuracy.
            "host": in the host's memory with all digits, brought back in blocks.

    Example:
        >>> import lipscope as ls
        >>> ls.Solver(seed=0, failure=1e-6).failure
        1e-06
    """

    max_steps: int = 500
    memory: int | None = None
    failure: float = 1e-9
    seed: int | None = None
    basis: str = "native"


@entry_point
def spectral_norm(
    J: LinearOperator,
    tol: float = 1e-6,
    *,
    gap: float | None = None,
    start: Tensor | None = None,
    solver: Solver | None = None,
) -> Estimate | BatchEstimate:
    """The spectral norm of an operator, or of each member of a batch, with a two-sided certificate.

    Golub-Kahan bidiagonalisation with full reorthogonalisation; see docs/theory/solver.md.

    Args:
        J: The operator. With ``J.batch`` set, its members are solved together.
        tol: Stop when ``||J' left - value right|| <= tol * value``. The error of a well separated
            singular value is about the square of that.
        gap: Keep iterating until ``upper / lower <= 1 + gap`` (float64 only), or as close as
            rounding allows; `missed` then says why.
        start: A first guess of the right singular vector, in the shape of J's inputs. A solve from
            a given start has no upper bound.
        solver: What the solver may spend, its seed and its failure probability.

    Returns:
        An :class:`Estimate`, or a :class:`BatchEstimate` for a batch.

    Raises:
        UserError: If an option is out of range, or `gap` is requested without float64.

    Example:
        >>> import torch, lipscope as ls
        >>> f = ls.SelfAttention(*(torch.eye(2, dtype=torch.float64) for _ in range(3)))
        >>> J = ls.jacobian(f, torch.zeros(3, 2, dtype=torch.float64))
        >>> e = ls.spectral_norm(J, gap=0.01, solver=ls.Solver(seed=0))
        >>> round(e.value, 6), e.upper / e.lower <= 1.01
        (1.0, True)
    """
    solver = solver or Solver()
    _check_options(J, tol, gap, start, solver)
    if J.compressed is not None and start is None:
        small: Any = spectral_norm(J.compressed.core, tol, gap=gap, solver=solver)
        return replace(small, right=J.compressed.lift(small.right))
    found = torch.zeros(J.batch or 1, dtype=torch.float64)  # steps with the rough operator
    if J.low_precision is not None and start is None:
        start, found = _rough_start(J.low_precision, tol, solver)
    run, taken = _iterate(J, tol, gap, start, solver)
    note = ROUNDED_BASIS if run.rounded else CERTIFIED if start is None else NOT_RANDOM
    estimate = run.evaluate(note if J.dtype == torch.float64 else NOT_FLOAT64)
    estimate = replace(estimate, steps=found + taken)
    return estimate if J.batch is not None else estimate[0]


def _iterate(
    J: LinearOperator, tol: float, gap: float | None, start: Tensor | None, solver: Solver
) -> tuple[Run, Tensor]:
    """A finished run, whose bounds are not drawn yet, and how many steps each member took."""
    members = J.batch or 1
    earlier = 0
    v = (
        random_start(J, members, solver.seed)
        if start is None
        else start.reshape(members, -1).to(J.device, J.dtype)
    )
    run = Run(J, tol, gap, solver, random=start is None)
    run.solve(v)
    while not run.settled:
        taken = int(run.steps.max())
        v = run.right
        earlier += taken
        solver = replace(solver, max_steps=solver.max_steps - taken)
        run = Run(J, tol, gap, solver, random=False)
        run.solve(v)
    return run, run.steps + earlier


def _rough_start(J: LinearOperator, tol: float, solver: Solver) -> tuple[Tensor | None, Tensor]:
    """The right vector that a rough operator finds, and in how many steps."""
    near, steps = _iterate(J, MARGIN * max(tol, ROUGH), None, None, solver)
    # A rough operator may overflow where the exact one does not: then it has nothing to say.
    size = norms(near.right, J.space)
    return near.right if (size.isfinite() & (size > 0)).all() else None, steps


def random_start(J: LinearOperator, members: int, seed: int | None) -> Tensor:
    """Uniform directions, drawn where the operator lives.

    The seed is hashed: an input that was itself drawn with it must not be the start.
    """
    # One draw for all ranks, of which each keeps its part: the same start as a single process has.
    number = drawn_seed(seed, "start", J.space)
    generator = torch.Generator(device=J.device).manual_seed(number)
    dtype = torch.float64 if J.device.type == "cpu" else J.dtype
    start = torch.randn(members, J.domain_size, generator=generator, dtype=dtype, device=J.device)
    return J.space.shard(start.to(J.dtype).view(-1, *J.space.global_shape(J.in_shape)), 1).flatten(
        1
    )


def _check_options(
    J: LinearOperator, tol: float, gap: float | None, start: Tensor | None, solver: Solver
) -> None:
    check_fields(solver)
    if not (math.isfinite(tol) and tol > 0):
        raise UserError(
            f"tol must be a positive number (the relative residual to reach), got {tol!r}"
        )
    check_gap(gap)
    if gap is not None and J.dtype != torch.float64:
        raise UserError(
            f"gap needs an upper bound, which needs float64, but the operator is {J.dtype}; "
            "use precision='exact'"
        )
    if solver.basis not in STORAGES:
        raise UserError(
            f"basis must be one of {', '.join(map(repr, STORAGES))}, got {solver.basis!r}"
        )
    if gap is not None and solver.basis == "bfloat16":
        raise UserError(
            "gap needs an upper bound, which basis='bfloat16' does not give; "
            "use basis='native' or 'host'"
        )
    if not 0 < solver.failure < 1:
        raise UserError(f"failure must be a probability between 0 and 1, got {solver.failure!r}")
    check_whole("max_steps", solver.max_steps, 1, 1_000_000)  # memory is taken for all of them
    if start is not None and start.numel() != (J.batch or 1) * J.in_size:
        raise UserError(f"start must have shape {J.leading + J.in_shape}, got {tuple(start.shape)}")
    if start is not None and not (
        start.isfinite().all() and J.space.norm(start.reshape(J.batch or 1, -1).norm(dim=1)).all()
    ):
        raise UserError("start must be finite and not zero")
