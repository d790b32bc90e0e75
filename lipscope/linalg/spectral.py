"""The largest singular value of an operator, with a two-sided certificate."""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._checks import check_fields, check_whole
from lipscope._types import Status, UserError
from lipscope.linalg.certificate import (
    MEMORY,
    NO_VALUE,
    NOISE,
    SCORES,
    SEARCHED,
    STEPS,
    UNCERTIFIED,
    bounded_by,
    check_gap,
    perturbation,
    polynomial_bound,
    smallest_overlap,
    widening,
)
from lipscope.linalg.estimate import BatchEstimate, Estimate
from lipscope.linalg.golub_kahan import HALF_UNIT, STORAGES, GolubKahan, norms
from lipscope.linalg.operator import LinearOperator
from lipscope.linalg.rounding_noise import DRAWS, UNITS, WIDENED, UnseenRoundingError

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
"""Residual to which low precision is iterated: its vectors are no better than its products."""

MARGIN = 0.9
"""Share of that residual left to low precision: the exact operator then seldom needs a second step,
which takes as long as several in low precision.
"""

NO_BOUND = (
    "no upper bound: too few steps for the requested failure probability; set gap to continue"
)
NO_BOUND_AT_ALL = "no upper bound"
MEASURED = (
    f"; rounding was measured, not proved: {DRAWS} repetitions with every operation moved by up to "
    f"{UNITS} units in the last place, their spread widened {WIDENED} times"
)
UNMEASURED = "no bounds: rounding inside the map is not known ({why})"
OVERWHELMED = (
    "no bounds: rounding may exceed the value itself; use precision='exact' or scale the input down"
)

COARSEST = 0.01
"""Largest residual of a solve whose status is ok, even where products may be coarser."""

IMPRECISE = 0.01
"""Relative rounding above which the status is IMPRECISE."""

SMALL = 1 << 16
"""Numbers in a vector of the batch below which a product is cheaper than the small SVD."""

Ritz = tuple[Tensor, Tensor, Tensor]


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

    Raises:
        UserError: If an option is out of range.

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

    def __post_init__(self) -> None:
        check_fields(self)
        if self.basis not in STORAGES:
            raise UserError(
                f"basis must be one of {', '.join(map(repr, STORAGES))}, got {self.basis!r}"
            )
        if not 0 < self.failure < 1:
            raise UserError(f"failure must be a probability between 0 and 1, got {self.failure!r}")
        check_whole("max_steps", self.max_steps, 1, 1_000_000)  # memory is taken for all of them


DEFAULT = Solver()


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
    solver = solver or DEFAULT
    _check_options(J, tol, gap, start, solver)
    if J.compressed is not None and start is None:
        small: Any = spectral_norm(J.compressed.core, tol, gap=gap, solver=solver)
        return replace(small, right=J.compressed.lift(small.right))
    searched: Tensor | int = 0  # steps in low precision
    if J.low_precision is not None and start is None:
        near, searched = _iterate(J.low_precision, MARGIN * max(tol, ROUGH), None, None, solver)
        # It may overflow where the exact operator does not.
        size = norms(near.right, J.space)
        start = near.right if (size.isfinite() & (size > 0)).all() else None
    run, taken = _iterate(J, tol, gap, start, solver)
    note = ROUNDED_BASIS if run.rounded else CERTIFIED if start is None else NOT_RANDOM
    estimate = run.evaluate(note if J.dtype == torch.float64 else NOT_FLOAT64)
    estimate = replace(estimate, steps=searched + taken)
    return estimate if J.batch is not None else estimate[0]


def _iterate(
    J: LinearOperator, tol: float, gap: float | None, start: Tensor | None, solver: Solver
) -> tuple[Run, Tensor]:
    """A finished run, whose bounds are not drawn yet, and how many steps each member took."""
    members = J.batch or 1
    earlier = 0
    run = Run(J, tol, gap, solver, random=start is None)
    run.solve(
        random_start(J, members, solver.seed)
        if start is None
        else start.reshape(members, -1).to(J.device, J.dtype)
    )
    # In bfloat16, `right` is as good as its residual only if it is the start, put to the test.
    while run.rounded and 1 < run.steps.max() < solver.max_steps:
        taken = int(run.steps.max())
        v = run.right
        earlier += taken
        solver = replace(solver, max_steps=solver.max_steps - taken)
        run = Run(J, tol, gap, solver, random=False)
        run.solve(v)
    return run, run.steps + earlier


def random_start(J: LinearOperator, members: int, seed: int | None) -> Tensor:
    """Uniform directions, drawn where the operator lives.

    The seed is hashed: an input that was itself drawn with it must not be the start.
    """
    # One draw for all ranks, of which each keeps its part: the same start as a single process has.
    number = int(J.space.broadcast(torch.tensor(fresh_seed(seed, "start"))))
    generator = torch.Generator(device=J.device).manual_seed(number)
    dtype = torch.float64 if J.device.type == "cpu" else J.dtype
    start = torch.randn(members, J.domain_size, generator=generator, dtype=dtype, device=J.device)
    return J.space.shard(start.to(J.dtype).view(-1, *J.space.global_shape(J.in_shape)), 1).flatten(
        1
    )


def _check_options(
    J: LinearOperator, tol: float, gap: float | None, start: Tensor | None, solver: Solver
) -> None:
    if not (math.isfinite(tol) and tol > 0):
        raise UserError(
            f"tol must be a positive number (the relative residual to reach), got {tol!r}"
        )
    if gap is not None:
        check_gap(gap)
    if gap is not None and J.dtype != torch.float64:
        raise UserError(
            f"gap needs an upper bound, which needs float64, but the operator is {J.dtype}; "
            "use precision='exact'"
        )
    if gap is not None and solver.basis == "bfloat16":
        raise UserError(
            "gap needs an upper bound, which basis='bfloat16' does not give; "
            "use basis='native' or 'host'"
        )
    if start is not None and start.numel() != (J.batch or 1) * J.in_size:
        raise UserError(f"start must have shape {J.leading + J.in_shape}, got {tuple(start.shape)}")
    if start is not None and not (
        start.isfinite().all() and J.space.norm(start.reshape(J.batch or 1, -1).norm(dim=1)).all()
    ):
        raise UserError("start must be finite and not zero")


class Run:
    """One solve: `solve` iterates until every member is done, `evaluate` draws the bounds."""

    def __init__(
        self, J: LinearOperator, tol: float, gap: float | None, solver: Solver, random: bool
    ):
        self.J = J
        self.tol = tol
        self.solver = solver
        self.ratio = None if gap is None else 1 + gap
        self.rounded = solver.basis == "bfloat16"
        self.random = random
        self.certify = random and J.dtype == torch.float64 and not self.rounded
        B = J.batch or 1
        self.resolution = J.resolution.reshape(B)
        self.overlap = smallest_overlap(J.domain_size, solver.failure / B)
        self.right = torch.zeros(B, J.in_size, dtype=J.dtype, device=J.device)
        self.left = torch.zeros(B, J.out_size, dtype=J.dtype, device=J.device)
        self.back = torch.zeros_like(self.right)  # J' left, as the recurrence has it
        self.images: tuple[Tensor, Tensor] | None = None  # J right and J' left, evaluated
        self.tested = torch.zeros(B, dtype=torch.bool)
        self.theta, self.scale, self.residual = torch.full((3, B), torch.nan, dtype=torch.float64)
        self.steps, self.noise = torch.zeros(2, B, dtype=torch.float64)
        self.a = torch.full((B, solver.max_steps), torch.nan, dtype=torch.float64)
        self.b = self.a.clone()
        self.drift = torch.zeros(B, dtype=torch.float64)
        self.status: list[Status] = [Status.MAX_STEPS] * B

    def solve(self, start: Tensor) -> None:
        """Iterate until every member is done."""
        J = self.J
        basis = GolubKahan(J, start, self.solver.basis, self.solver.memory)
        exhausted = min(J.domain_size, J.range_size + 1)
        index = torch.arange(start.shape[0])
        open_ = torch.ones(len(index), dtype=torch.bool)
        for step in range(1, self.solver.max_steps + 1):
            basis.step()
            last = step == self.solver.max_steps or (step >= exhausted and not basis.restarted)
            last = last or (self.rounded and step == basis.capacity)
            # On small problems the small SVD costs as much as a product: there, look at every
            # second step only.
            worth_checking = (
                step % 2 == 0
                or basis.members * basis.J.domain_size > SMALL
                or bool((basis.b == 0).any())
                or not bool(basis.b.isfinite().all())
            )
            if not last and not self.rounded and not worth_checking:
                continue
            theta, p, q = basis.ritz()
            theta = torch.where(self.resolution[index].isfinite(), theta, torch.nan)
            residual = basis.b * p[:, -1].abs() / theta
            broken = (basis.b == 0) | theta.isnan() | (theta == 0)
            norm = torch.full_like(self.theta, torch.nan)
            norm[index] = theta / basis.scale
            # The goal is tol, or what products can resolve. Weights that are off are off in all
            # products alike and do not keep the residual up; scores that react to a tangent before
            # they cancel do, and so do blocks.
            cancelled = 8 * torch.finfo(J.dtype).eps * J.rounding_scale(norm) / norm
            noise = torch.maximum(self.resolution, cancelled.nan_to_num(posinf=0.0))[index]
            goal = noise.nan_to_num(nan=1.0, posinf=1.0).clamp(max=COARSEST).clamp_min(self.tol)
            if self.rounded and q.shape[1] > 1:
                # Rounded vectors leave more, in the part of `right` that is not the start.
                goal = torch.maximum(goal / 2, HALF_UNIT * q[:, 1:].norm(dim=1))
            done = broken | (residual <= goal)
            asked = done & open_ & ~broken
            aimed = self.ratio is not None and self.certify
            if aimed and not basis.restarted and asked.any():
                rounding = (J.error(norm) / norm)[index]
                done &= broken | self._gap_closed(basis, (theta, p, q), index, asked, rounding)
            if last:
                done = torch.ones_like(done)
            for i in torch.nonzero(done & open_)[:, 0].tolist():
                member = int(index[i])
                if not self.tested[member]:
                    self._draw(member, i, basis, (theta, p, q))
                self._close(member, i, step, basis, residual[i], goal[i])
            open_ &= ~done
            if not open_.any():
                return
            if J.take is not None and 4 * open_.sum() <= 3 * len(open_):
                remaining = torch.nonzero(open_)[:, 0]
                basis.keep(remaining)
                index = index[remaining]
                open_ = open_[remaining]

    def _gap_closed(
        self, basis: GolubKahan, ritz: Ritz, index: Tensor, asked: Tensor, rounding: Tensor
    ) -> Tensor:
        """Which of those asked for need no further steps to bring their bounds together.

        Nothing is settled before the noise of the very vectors that the bounds will be drawn from
        has been measured. The products are needed at the end anyway: one pair for each member.

        rounding: by how much, relative to the norm, both bounds will be widened at the end.
        """
        assert self.ratio is not None
        ratio = self.ratio
        a, b = (torch.stack(x, dim=1) for x in zip(*basis.coefficients, strict=True))

        def settled(some: Tensor) -> tuple[Tensor, Tensor]:
            """Which members are done, if products are that noisy, and which can reach the ratio."""
            theta = ritz[0][some]
            noise = perturbation(self.noise[index[some]], basis.drift[some] / theta)
            known = a[some], b[some], self.overlap, noise

            def reaches(distance: Tensor) -> tuple[Tensor, Tensor]:
                return bounded_by(theta * (1 + SEARCHED * distance), *known)

            reached, possible = reaches(ratio / widening(rounding[some]) - 1)
            if not possible.all():
                # Rounding in the products sets a floor that no further step gets below. Where the
                # ratio lies under it, twice the distance of the floor is good enough.
                floor = polynomial_bound(*known, decaying=False)
                near, _ = reaches(2 * (floor / theta - 1))
                reached |= ~possible & (near | floor.isinf())
            return reached, possible

        near = torch.nonzero(asked)[:, 0]
        reached, possible = settled(near)
        near = near[reached | ~possible & (self.noise[index[near]] == 0)]
        if len(near):
            for i in near.tolist():
                self._draw(int(index[i]), i, basis, ritz)
            # An operator that consists of these members already need not be made again.
            self._test(index[near], basis.J if len(near) == basis.members else None)
            near = near[settled(near)[0]]
            self.tested[index[near]] = True
        closed = torch.zeros_like(asked)
        closed[near] = True
        return closed

    def _draw(self, member: int, i: int, basis: GolubKahan, ritz: Ritz) -> None:
        """Form the vectors of member i of the basis."""
        theta, p, q = (x[i] for x in ritz)
        self.theta[member], self.scale[member] = theta, basis.scale[i]
        if theta.isnan():
            return
        self.right[member], self.left[member], self.back[member] = basis.vectors(i, p, q)

    def _close(
        self, member: int, i: int, step: int, basis: GolubKahan, residual: Tensor, goal: Tensor
    ) -> None:
        """Take member i of the basis, whose vectors are drawn, as finished."""
        theta = self.theta[member]
        self.steps[member], self.residual[member], self.drift[member] = (
            step,
            residual,
            basis.drift[i],
        )
        if theta.isnan():
            overflow = not self.resolution[member].isfinite()
            self.status[member] = Status.OVERFLOW if overflow else Status.NON_FINITE
            return
        if basis.b[i] == 0 or theta == 0:
            # An invariant space holds the top vector if the start was random; a given start may
            # have missed it.
            self.status[member] = Status.BREAKDOWN if self.random else Status.CONVERGED
        elif residual <= goal:
            self.status[member] = Status.CONVERGED if residual <= self.tol else Status.RESOLUTION
        if self.certify and basis.coefficients:
            a, b = (
                torch.stack([x[i] for x in each]) for each in zip(*basis.coefficients, strict=True)
            )
            self.a[member, : len(a)], self.b[member, : len(b)] = a, b

    def _test(self, members: Tensor, J: LinearOperator | None = None) -> None:
        """Evaluate J right and J' left of some members, whose operator is J.

        What the recurrence says they are, against what they are: the rounding of a product, seen.
        """
        B = len(self.status)
        if J is None and self.J.take is not None and len(members) < B:
            J = self.J.take(members)
        elif J is None:
            J = self.J
            members = torch.arange(B)
        theta = self.theta[members]
        scale = torch.where(theta.isnan(), 1.0, self.scale[members])
        right = self.right[members]
        left = self.left[members]
        back = self.back[members]
        w = J.product(J.mv, right, J.in_shape, scale)
        # Products with J' enter the upper bound. Nothing is stated of those that are measured, so
        # that residual and status rest on what is seen of them.
        both = self.certify or J.rounding.perturbed is not None
        z = J.product(J.rmv, left, J.out_shape, scale) if both else back
        forward = norms(w - theta.to(w)[:, None] * left, J.space)
        noise = torch.maximum(forward, norms(z - back, J.space)) / theta
        self.noise[members] = torch.where(theta.isnan(), 0.0, noise)
        if len(members) == B:
            self.images = w, z
        else:
            self.images = self.images or (torch.zeros_like(self.left), torch.zeros_like(self.right))
            self.images[0][members], self.images[1][members] = w, z

    def evaluate(self, note: str) -> BatchEstimate:
        """The Ritz triplets put to the test with one more product each way."""
        J = self.J
        B = len(self.status)
        precise = J.dtype in (torch.float32, torch.float64)
        one_step = int(self.steps.max()) == 1 and bool(self.theta.isfinite().all())
        if one_step and precise and not self.certify:
            # A single step says all: no upper bound, no overflow, no product in few digits. The
            # vectors are those of the only step, and so are their products: asking for them again
            # would repeat half of it.
            self.images = self.theta.to(self.left)[:, None] * self.left, self.back
        elif not self.tested.all():
            self._test(torch.nonzero(~self.tested)[:, 0])
        assert self.images is not None
        w, z = self.images
        noise = self.noise
        # The power of two by which each member was multiplied.
        scale = torch.where(self.theta.isnan(), 1.0, self.scale)
        finite = ~self.theta.isnan()
        sigma = norms(w, J.space) / norms(self.right, J.space).clamp_min(0.5)
        left = torch.where(sigma.to(w)[:, None] > 0, w / sigma.to(w)[:, None], self.left)
        residual = torch.where(sigma == 0, 0.0, self.residual + noise)
        value = sigma / scale
        for i in torch.nonzero(finite & value.isinf())[:, 0].tolist():
            self.status[i] = Status.OVERFLOW
        finite = finite & value.isfinite()
        value = torch.where(finite, value, torch.nan)
        error, unknown = self._error(w, z, scale, value)
        known = finite & error.isfinite()
        lower = torch.where(known, (value - error).clamp_min(0.0), 0.0)
        upper = torch.full_like(value, torch.inf)
        if self.certify:
            # The polynomial bound on the norm of J as its products have it, with their noise.
            source = perturbation(noise, self.drift / self.theta)
            usable = source.isfinite() & ~self.a[:, 0].isnan() & (sigma > 0)
            width = int((~self.a.isnan()).sum(dim=1).max())
            if width and usable.any():
                upper[usable] = polynomial_bound(
                    self.a[usable, :width], self.b[usable, :width], self.overlap, source[usable]
                )
            # A random start that J sends to zero leaves nothing but rounding.
            at_most = torch.where(sigma == 0, 0.0, upper / scale)
            upper = torch.where(known, at_most + error, torch.inf)
        upper = torch.maximum(upper, value.nan_to_num(nan=torch.inf))
        certified = self.certify and bool(upper.isfinite().any())
        if unknown:
            note = UNMEASURED.format(why=unknown)
        elif not known[finite].any() and finite.any():
            note = OVERWHELMED
        elif self.certify and not certified:
            note = NO_BOUND if self.ratio is None else NO_BOUND_AT_ALL
        if J.rounding.perturbed is not None and not unknown:
            note += MEASURED
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
            missed=("",) * B if self.ratio is None else self._missed(lower, upper, error / value),
        )

    def _error(self, w: Tensor, z: Tensor, scale: Tensor, value: Tensor) -> tuple[Tensor, str]:
        """Absolute error bounds on the values, and why they are unknown, if they are.

        The largest of three: what the operator states, or a comparison with float64 shows; what was
        seen in its products; and, for maps that state nothing, how far J v, and J' u if an upper
        bound rests on it, move when every operation is off by units in the last place.
        """
        J = self.J
        rounding = J.rounding
        if rounding.compared is None:
            stated = J.error(value)
        else:
            product = w / scale.to(w)[:, None]
            off = rounding.compared(
                self.right.reshape((*J.leading, *J.in_shape)),
                product.reshape((*J.leading, *J.out_shape)),
                int(J.space.broadcast(torch.tensor(fresh_seed(self.solver.seed, "rows")))),
            )
            # At least the last digits, which float64 may share by chance.
            digits = torch.finfo(J.dtype).eps * norms(product, J.space)
            stated = 4 * off.reshape(-1) + 4 * digits
        stated = stated.nan_to_num(nan=torch.inf, posinf=torch.inf)
        error = torch.maximum(stated, 4 * self.noise.nan_to_num() * value)
        if rounding.perturbed is None:
            return error, ""
        spread = torch.zeros_like(scale)
        try:
            for i in range(DRAWS):
                mv, rmv = rounding.perturbed(i)
                off = norms(J.product(mv, self.right, J.in_shape, scale) - w, J.space)
                if self.certify:
                    back = J.product(rmv, self.left, J.out_shape, scale) - z
                    off = torch.maximum(off, norms(back, J.space))
                spread = torch.maximum(spread, off.nan_to_num(torch.inf, torch.inf))
        except torch.OutOfMemoryError:
            return torch.full_like(scale, torch.inf), "no memory to repeat it"
        except UnseenRoundingError as unseen:
            return torch.full_like(scale, torch.inf), str(unseen)
        return torch.maximum(error, WIDENED * spread / scale), ""

    def _missed(self, lower: Tensor, upper: Tensor, rounding: Tensor) -> tuple[str, ...]:
        """Why each member misses the requested ratio; empty if it does not."""
        ratio = self.ratio
        assert ratio is not None

        def reason(i: int) -> str:
            if upper[i] <= ratio * lower[i]:
                return ""
            if not self.certify:
                return UNCERTIFIED
            if self.theta[i].isnan() or lower[i].isnan():
                return NO_VALUE
            if ratio / float(widening(rounding[i])) <= 1:
                return SCORES
            kept = int((~self.a[i].isnan()).sum())  # steps that the upper bound could be drawn from
            if kept < self.steps[i]:
                return MEMORY
            return STEPS if self.steps[i] >= self.solver.max_steps else NOISE

        return tuple(map(reason, range(len(lower))))


def fresh_seed(seed: int | None, purpose: str) -> int:
    """The seed for one purpose, derived from the user's and unrelated to those of other purposes.

    Without a seed, a random one.

    An upper bound holds for inputs that were chosen without knowledge of the solver's random start.
    A search knows every start it climbed with, and inputs drawn by a generator with the seed of the
    solver hold the very numbers of its start. So what is found is measured with
    Solver(seed=fresh_seed(seed, "measure")), and no search may draw from that seed.
    """
    if seed is None:
        return secrets.randbits(63)
    digest = hashlib.sha256(f"lipscope {purpose} {seed}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
