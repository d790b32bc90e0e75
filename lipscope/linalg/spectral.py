"""The largest singular value of an operator, with a two-sided certificate."""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipscope._checks import check_fields, check_whole, explained
from lipscope._types import Status, UserError
from lipscope.linalg.basis import HALF_UNIT, STORAGES, memory_of
from lipscope.linalg.certificate import (
    NO_VALUE,
    UNCERTIFIED,
    Gap,
    check_gap,
    perturbation,
    polynomial_bound,
    smallest_overlap,
    why_missed,
    widening,
)
from lipscope.linalg.estimate import BatchEstimate, Estimate
from lipscope.linalg.golub_kahan import GolubKahan, norms
from lipscope.linalg.operator import LinearOperator, Product

NOT_FLOAT64 = "no upper bound: it needs float64 products; use precision='exact' or float64 inputs"
NOT_RANDOM = "no upper bound: the start vector was given, not drawn at random"
ROUNDED_BASIS = (
    "no upper bound: it needs Krylov vectors with all their digits; use basis='native' or 'host'"
)
NO_BOUND = (
    "no upper bound: too few steps for the requested failure probability; set gap to continue"
)
NO_BOUND_AT_ALL = "no upper bound"
CERTIFIED = (
    "the upper bound holds unless the random start was unlucky, provided that the input was not "
    "chosen with knowledge of the seed and that every product is within four times the error seen"
)
MEASURED = (
    "; rounding was measured, not proved: {draws} repetitions with every operation moved by one "
    "unit in the last place, their spread widened {times} times"
)
UNMEASURED = "no bounds: rounding inside the map is not known ({why})"
OVERWHELMED = (
    "no bounds: rounding may exceed the value itself; use precision='exact' or scale the input down"
)

ROUGH = 1e-2
"""Residual to which a rough operator is iterated: its vectors are no better than its products."""

COARSEST = 0.1
"""Residual that is asked for even where products are coarser: it still tells a singular vector from
any other.
"""

DRAWS, WIDENED = 3, 32
"""Repetitions by which rounding is measured where it is not stated, and the factor on what they
show.

The rounding of one evaluation is a draw of the same kind: of four normal ones, the first exceeds 32
times the largest of the others in about one case of 40,000. """

IMPRECISE = 0.01
"""Share of the value beyond which its rounding is said in the status."""

SMALL = 1 << 16
"""Numbers in one vector of the whole batch, below which a product is cheaper than a look at the
small matrix.
"""


@dataclass(frozen=True)
class Solver:
    """What the solver may spend, and the failure probability of its upper bound.

    Attributes:
        max_steps: Maximum number of steps.
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


@explained
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
    found: Any = 0  # steps taken before the last run
    if J.rough is not None and start is None:
        near = spectral_norm(J.rough, max(tol, ROUGH), solver=solver)
        found = near.steps
        # A rough operator may overflow where J does not: then it has nothing to say.
        size = norms(near.right.reshape(J.batch or 1, -1), J.ranks)
        start = near.right if (size.isfinite() & (size > 0)).all() else None
    members = J.batch or 1
    v = (
        _random_start(J, members, solver.seed)
        if start is None
        else start.reshape(members, -1).to(J.dtype)
    )
    run = _Run(J, tol, gap, solver, random=start is None)
    run.solve(v)
    while not run.settled:
        taken, v = int(run.steps.max()), run.right
        found += taken
        solver = replace(solver, max_steps=solver.max_steps - taken)
        run = _Run(J, tol, gap, solver, random=False)
        run.solve(v)
    note = ROUNDED_BASIS if run.rounded else CERTIFIED if start is None else NOT_RANDOM
    estimate = run.evaluate(note if J.dtype == torch.float64 else NOT_FLOAT64)
    estimate = replace(estimate, steps=estimate.steps + found)
    return estimate if J.batch is not None else estimate[0]


class _Run:
    """One solve: which members are still open, and what the finished ones left behind."""

    def __init__(
        self, J: LinearOperator, tol: float, gap: float | None, solver: Solver, random: bool
    ):
        self.J, self.tol, self.solver = J, tol, solver
        self.ratio = None if gap is None else 1 + gap
        self.rounded = solver.basis == "bfloat16"
        self.random, self.certify = random, random and J.dtype == torch.float64 and not self.rounded
        B = J.batch or 1
        self.resolution = J.resolution.reshape(B)
        self.overlap = smallest_overlap(J.domain_size, solver.failure / B)
        self.aim = (
            Gap(self.ratio, self.overlap, B) if self.ratio is not None and self.certify else None
        )
        self.right = torch.zeros(B, J.in_size, dtype=J.dtype, device=J.device)
        self.left = torch.zeros(B, J.out_size, dtype=J.dtype, device=J.device)
        self.back = torch.zeros_like(self.right)  # J' left, as the recurrence has it
        self.theta, self.scale, self.residual = torch.full((3, B), torch.nan, dtype=torch.float64)
        self.steps = torch.zeros(B, dtype=torch.float64)
        self.a = torch.full((B, solver.max_steps), torch.nan, dtype=torch.float64)
        self.b, self.drift = self.a.clone(), torch.zeros(B, dtype=torch.float64)
        self.status: list[Status] = [Status.MAX_STEPS] * B

    def solve(self, start: Tensor) -> None:
        J, storage = self.J, self.solver.basis
        vectors = (
            start.shape[0]
            * (J.in_size + J.out_size)
            * (2 if self.rounded else start.element_size())
        )
        basis = GolubKahan(J, start, _budget(self.solver, J.device) // vectors, storage)
        exhausted = min(J.domain_size, J.range_size + 1)
        index = torch.arange(start.shape[0])
        open_ = torch.ones(len(index), dtype=torch.bool)
        for step in range(1, self.solver.max_steps + 1):
            basis.step()
            last = step == self.solver.max_steps or (step >= exhausted and not basis.restarted)
            last = last or (self.rounded and step == basis.capacity)
            if not last and not self.rounded and not _worth_checking(step, basis):
                continue
            theta, p, q = basis.ritz()
            theta = torch.where(self.resolution[index].isfinite(), theta, torch.nan)
            residual = basis.b * p[:, -1].abs() / theta
            broken = (basis.b == 0) | theta.isnan() | (theta == 0)
            norm = torch.full_like(self.theta, torch.nan)
            norm[index] = theta / basis.scale
            goal = self._goal(norm, index, q)
            done = broken | (residual <= goal)
            asked = done & open_ & ~broken
            if self.aim is not None and not basis.restarted and asked.any():
                relative = (J.error(norm) / norm)[index]
                done &= broken | self.aim.closed(basis, (theta, p, q), index, asked, relative)
            if last:
                done = torch.ones_like(done)
            for i in torch.nonzero(done & open_)[:, 0].tolist():
                self._close(int(index[i]), i, step, basis, (theta, p, q, residual, goal))
            open_ &= ~done
            if not open_.any():
                return
            if J.take is not None and 4 * open_.sum() <= 3 * len(open_):
                remaining = torch.nonzero(open_)[:, 0]
                basis.keep(remaining)
                index, open_ = index[remaining], open_[remaining]

    def _goal(self, norm: Tensor, index: Tensor, q: Tensor) -> Tensor:
        """The residual to stop at: tol, or what products can resolve of a norm that large.

        Vectors in bfloat16 leave more, in the part of `right` that is not the start.
        """
        # Weights that are off are off in all products alike and do not keep the residual up; scores
        # that react to a tangent before they cancel do, and so do blocks.
        cancelled = 8 * torch.finfo(self.J.dtype).eps * self.J.uncancelled(norm) / norm
        noise = torch.maximum(self.resolution, cancelled.nan_to_num(posinf=0.0))[index]
        goal = torch.clamp(noise.nan_to_num(nan=1.0, posinf=1.0), max=COARSEST).clamp_min(self.tol)
        if not self.rounded or q.shape[1] == 1:
            return goal
        return torch.maximum(goal / 2, HALF_UNIT * q[:, 1:].norm(dim=1))

    @property
    def settled(self) -> bool:
        """Whether `right` is as good as its residual says; in bfloat16: whether it is the start,
        put to the test.
        """
        longest = self.steps.max()
        return not self.rounded or bool(longest == 1) or bool(longest >= self.solver.max_steps)

    def _close(
        self, member: int, i: int, step: int, basis: GolubKahan, ritz: tuple[Tensor, ...]
    ) -> None:
        """Take member i of the basis as finished."""
        theta, p, q, residual, goal = (x[i] for x in ritz)
        self.theta[member], self.scale[member], self.steps[member] = theta, basis.scale[i], step
        self.residual[member], self.drift[member] = residual, basis.drift[i]
        if theta.isnan():
            overflow = not self.resolution[member].isfinite()
            self.status[member] = Status.OVERFLOW if overflow else Status.NON_FINITE
            return
        self.right[member] = basis.V.combine(q[None, None], slice(i, i + 1))[0, 0]
        self.left[member] = basis.U.combine(p[None, None], slice(i, i + 1))[0, 0]
        self.back[member] = basis.pulled_back(p[None], slice(i, i + 1))[0]
        if basis.b[i] == 0 or theta == 0:
            # An invariant space holds the top vector if the start was random; a given start may
            # have missed it.
            self.status[member] = Status.BREAKDOWN if self.random else Status.CONVERGED
        elif residual <= goal:
            self.status[member] = Status.CONVERGED if residual <= self.tol else Status.RESOLUTION
        for j, (a, b) in enumerate(basis.coefficients):
            self.a[member, j], self.b[member, j] = a[i], b[i]

    def evaluate(self, note: str) -> BatchEstimate:
        """The Ritz triplets put to the test with one more product each way."""
        J, B = self.J, len(self.status)
        finite = ~self.theta.isnan()
        scale = torch.where(finite, self.scale, 1.0)
        w, rescale = (
            self._product(J.mv, self.right, J.in_shape, scale),
            scale.to(self.right)[:, None],
        )
        both = self.certify or J.perturbed is not None  # else nothing rests on products with J'
        z = self._product(J.rmv, self.left, J.out_shape, scale) if both else self.back
        # What the recurrence says J v and J' u are, against what they are: the rounding of a
        # product, measured.
        forward = norms(w - self.theta.to(w)[:, None] * self.left, J.ranks)
        noise = torch.maximum(forward, norms(z - self.back, J.ranks)) / self.theta
        sigma = norms(w, J.ranks) / norms(self.right, J.ranks).clamp_min(0.5)
        left = torch.where(sigma.to(w)[:, None] > 0, w / sigma.to(w)[:, None], self.left)
        residual = torch.where(sigma == 0, 0.0, self.residual + noise)
        value = sigma / scale
        for i in torch.nonzero(finite & value.isinf())[:, 0].tolist():
            self.status[i] = Status.OVERFLOW
        finite = finite & value.isfinite()
        value = torch.where(finite, value, torch.nan)
        # What the operator states, what was seen in its products, and what repeating them shows.
        stated = J.error(value) if J.compared is None else self._compared(w / rescale)
        stated = stated.nan_to_num(nan=torch.inf, posinf=torch.inf)
        error = torch.maximum(stated, 4 * noise.nan_to_num() * value)
        measured, unknown = self._measured(w, z, scale)
        error = torch.maximum(error, measured)
        known = finite & error.isfinite()
        lower = torch.where(known, (value - error).clamp_min(0.0), 0.0)
        upper = torch.full_like(value, torch.inf)
        if self.certify:
            # A random start that J sends to zero leaves nothing but rounding.
            at_most = torch.where(sigma == 0, 0.0, self._upper(noise, sigma) / scale)
            upper = torch.where(known, at_most + error, torch.inf)
        upper = torch.maximum(upper, value.nan_to_num(nan=torch.inf))
        certified = self.certify and bool(upper.isfinite().any())
        if unknown:
            note = UNMEASURED.format(why=unknown)
        elif not known[finite].any() and finite.any():
            note = OVERWHELMED
        elif self.certify and not certified:
            note = NO_BOUND if self.ratio is None else NO_BOUND_AT_ALL
        if J.perturbed is not None and not unknown:
            note += MEASURED.format(draws=DRAWS, times=WIDENED)
        coarse = error > IMPRECISE * value
        if J.dtype in (torch.bfloat16, torch.float16):
            # Seen at these vectors; in half precision the norm may be larger along others.
            coarse |= self.resolution > IMPRECISE
        # A given start that J sends to zero has missed whatever there is: nothing is claimed of it.
        coarse &= finite & ((value > 0) | self.random)
        for i in torch.nonzero(coarse)[:, 0].tolist():
            self.status[i] = Status.IMPRECISE if self.status[i].ok else self.status[i]
        return BatchEstimate(
            value=value,
            lower=lower,
            upper=upper,
            residual=residual,
            steps=self.steps,
            status=tuple(self.status),
            left=left.reshape((B, *J.out_shape)),
            right=self.right.reshape((B, *J.in_shape)),
            confidence=1 - self.solver.failure if certified else 0.0,
            note=note,
            missed=tuple(
                self._missed(i, lower[i], upper[i], error[i] / value[i]) for i in range(B)
            ),
        )

    def _product(
        self, product: Product, x: Tensor, shape: tuple[int, ...], scale: Tensor
    ) -> Tensor:
        y = product(x.reshape((*self.J.leading, *shape))).reshape(len(self.status), -1)
        return y * scale.to(y)[:, None]

    def _compared(self, product: Tensor) -> Tensor:
        """Four times what the product of `right` is off by, seen in float64, and at least its last
        digits.
        """
        J = self.J
        assert J.compared is not None
        shape = J.leading
        off = J.compared(
            self.right.reshape((*shape, *J.in_shape)), product.reshape((*shape, *J.out_shape))
        )
        size = norms(product, J.ranks)
        return 4 * off.reshape(-1) + 4 * torch.finfo(J.dtype).eps * size

    def _measured(self, w: Tensor, z: Tensor, scale: Tensor) -> tuple[Tensor, str]:
        """The rounding of a map that states none: how far J v and J' u move when every operation is
        off by a unit in the last place, widened; and why that could not be seen, if so."""
        J, spread = self.J, torch.zeros_like(scale)
        if J.perturbed is None:
            return spread, ""
        try:
            for i in range(DRAWS):
                mv, rmv = J.perturbed(i)
                forward = self._product(mv, self.right, J.in_shape, scale) - w
                backward = self._product(rmv, self.left, J.out_shape, scale) - z
                forward, backward = norms(forward, J.ranks), norms(backward, J.ranks)
                spread = torch.maximum(
                    spread, torch.maximum(forward, backward).nan_to_num(torch.inf, torch.inf)
                )
        except torch.OutOfMemoryError:
            return torch.full_like(scale, torch.inf), "no memory to repeat it"
        return WIDENED * spread / scale, ""

    def _missed(self, i: int, lower: Tensor, upper: Tensor, rounding: Tensor) -> str:
        """Why the gap asked for is not reached by member i; nothing where it is, or none was asked
        for.
        """
        if self.ratio is None or upper <= self.ratio * lower:
            return ""
        if not self.certify or self.theta[i].isnan() or lower.isnan():
            return UNCERTIFIED if not self.certify else NO_VALUE
        kept = int((~self.a[i].isnan()).sum())
        return why_missed(
            self.ratio / float(widening(rounding)), kept, int(self.steps[i]), self.solver.max_steps
        )

    def _upper(self, noise: Tensor, sigma: Tensor) -> Tensor:
        """The polynomial bound on the norm of J as its products have it, with the noise seen in
        them.
        """
        source = perturbation(noise, self.drift / self.theta)
        usable = source.isfinite() & ~self.a[:, 0].isnan() & (sigma > 0)
        width = int((~self.a.isnan()).sum(dim=1).max())
        upper = torch.full_like(sigma, torch.inf)
        if width and usable.any():
            upper[usable] = polynomial_bound(
                self.a[usable, :width], self.b[usable, :width], self.overlap, source[usable]
            )
        return upper


def _worth_checking(step: int, basis: GolubKahan) -> bool:
    """The small SVD costs as much as a product on small problems: there, look at every second step
    only.
    """
    return (
        step % 2 == 0
        or basis.members * basis.J.domain_size > SMALL
        or bool((basis.b == 0).any())
        or not bool(basis.b.isfinite().all())
    )


def _budget(solver: Solver, device: torch.device) -> int:
    if solver.memory is not None:
        return solver.memory
    if solver.basis == "host":
        return memory_of(torch.device("cpu")) // 2
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2 << 30


def _random_start(J: LinearOperator, members: int, seed: int | None) -> Tensor:
    """Uniform directions, drawn where the operator lives.

    The seed is hashed: an input that was itself drawn with it must not be the start.
    """
    number = secrets.randbits(63) if seed is None else fresh_seed(seed, "start")
    # One draw for all ranks, of which each keeps its part: the same start as a single process has.
    number = int(J.ranks.agreed(torch.tensor(number)))
    generator = torch.Generator(device=J.device).manual_seed(number)
    dtype = torch.float64 if J.device.type == "cpu" else J.dtype
    start = torch.randn(members, J.domain_size, generator=generator, dtype=dtype, device=J.device)
    return J.ranks.own(start.to(J.dtype))


def fresh_seed(seed: int, purpose: str) -> int:
    """The seed for one purpose, derived from the user's: the same every time, unrelated to the
    others.

    An upper bound holds for inputs that were chosen without knowledge of the solver's random start.
    A search knows every start it climbed with, and inputs drawn by a generator with the seed of the
    solver hold the very numbers of its start. So what is found is measured with
    Solver(seed=fresh_seed(seed, "measure")), and no search may draw from that seed.
    """
    digest = hashlib.sha256(f"lipscope {purpose} {seed}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


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
        start.isfinite().all() and J.ranks.norm(start.reshape(J.batch or 1, -1).norm(dim=1)).all()
    ):
        raise UserError("start must be finite and not zero")
