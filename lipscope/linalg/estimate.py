"""A number with its certificate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from torch import Tensor

from lipscope._display import html_table, short
from lipscope._types import Status


@dataclass(frozen=True, eq=False)
class Estimate:
    """The largest singular value of one operator, and how accurate it is.

    All numbers are Python numbers. The shape of the input decides between this and
    :class:`BatchEstimate`: tokens [n, d] give an Estimate, [B, n, d] a BatchEstimate, also for
    B = 1, whose `[0]` is an Estimate.

    Attributes:
        value: ``||J right|| / ||right||``, evaluated.
        lower: `value` less its rounding: what the operator states, what a comparison with float64
            showed (float32 and half precision), or what repeating the map showed (maps that only
            autograd knows). It is at most the largest singular value as long as that rounding is
            not exceeded; chance plays no part in it.
        upper: At least the largest singular value with probability `confidence` over the random
            start, provided that the input was not chosen with knowledge of the seed, that every
            product is within four times the error seen, and that the rounding is not exceeded.
            Infinity, with confidence 0, where no such bound is available: `note` says why.
        residual: ``||J' left - value right|| / value``, from the recurrence, plus the rounding
            seen in the products.
        steps: Number of Golub-Kahan steps.
        status: How the solve ended.
        left: Left unit singular vector, in the shape of the operator's outputs.
        right: Right unit singular vector, in the shape of the operator's inputs.
        confidence: Probability with which `upper` holds.
        note: What `upper` rests on, or why there is none.
        missed: Why a requested gap was not reached; empty where it was, or none was requested.

    Example:
        >>> import torch, lipscope as ls
        >>> A = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> J = ls.LinearOperator(lambda x: A @ x, lambda u: A.T @ u, in_shape=(2,), out_shape=(2,))
        >>> e = ls.spectral_norm(J)
        >>> round(e.value, 6), e.lower <= 3 <= e.upper, e.status.ok
        (3.0, True, True)
    """

    value: float
    lower: float
    upper: float
    residual: float
    steps: int
    status: Status
    left: Tensor
    right: Tensor
    confidence: float
    note: str
    missed: str = ""

    def _repr_html_(self) -> str:
        return _table([self])

    def __repr__(self) -> str:
        known = f"in [{self.lower:.10g}, {self.upper:.10g}] at confidence {self.confidence:.10g}"
        if self.upper == math.inf:
            known = f"at least {self.lower:.10g}"
        return (
            f"Estimate({self.value:.10g}, {known}, residual {self.residual:.1e}, "
            f"{self.steps} steps, {self.status.name.lower()}{_unbounded([self])})"
        )


@dataclass(frozen=True, eq=False)
class BatchEstimate:
    """The largest singular values of a batch of operators, solved together.

    Every field is that of :class:`Estimate` for each member: numbers are float64 vectors of length
    B on the CPU, `status` and `missed` are tuples. `confidence` holds for all upper bounds jointly.
    Index or iterate to get the Estimate of one member.

    Example:
        >>> import torch, lipscope as ls
        >>> f = ls.SelfAttention(*(torch.eye(2, dtype=torch.float64) for _ in range(3)))
        >>> e = ls.local_lipschitz(f, torch.zeros(4, 3, 2, dtype=torch.float64))
        >>> len(e), round(e[0].value, 6)
        (4, 1.0)
    """

    value: Tensor
    lower: Tensor
    upper: Tensor
    residual: Tensor
    steps: Tensor
    status: tuple[Status, ...]
    left: Tensor
    right: Tensor
    confidence: float
    note: str
    missed: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.status)

    def __iter__(self) -> Iterator[Estimate]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Estimate:
        missed = self.missed[i] if self.missed else ""
        return Estimate(
            value=self.value[i].item(),
            lower=self.lower[i].item(),
            upper=self.upper[i].item(),
            residual=self.residual[i].item(),
            steps=int(self.steps[i]),
            status=self.status[i],
            left=self.left[i],
            right=self.right[i],
            confidence=self.confidence,
            note=f"{self.note}; {missed}" if missed else self.note,
            missed=missed,
        )

    def _repr_html_(self) -> str:
        return _table(list(self))

    def __repr__(self) -> str:
        unbounded = _unbounded(list(self))
        return f"BatchEstimate({len(self)} members, value={short(self.value)}{unbounded})"


def as_single(e: Estimate | BatchEstimate) -> Estimate:
    """The result of a solve that was not a batch; for callers that know it was not."""
    assert isinstance(e, Estimate)
    return e


def as_batch(e: Estimate | BatchEstimate) -> BatchEstimate:
    """The result of a batched solve; for callers that know it was one."""
    assert isinstance(e, BatchEstimate)
    return e


def _unbounded(members: Sequence[Estimate]) -> str:
    """Why members have no upper bound, and what to do about it; empty if all have one."""
    without = [e for e in members if e.upper == math.inf]
    if not without:
        return ""
    # How rounding was measured is a matter of the bounds that there are.
    why = without[0].note.partition("; rounding was measured")[0]
    if not why.startswith("no ") or (
        math.isnan(without[0].value) and not why.startswith("no bounds")
    ):
        why = f"no bounds: {without[0].status.value}"
    count = f"{len(without)} of {len(members)} members: " if len(members) > 1 else ""
    return f"; {count}{why}"


def _table(members: Sequence[Estimate]) -> str:
    """A table for notebooks: one row per member."""
    rows = [
        (
            f"{e.value:.10g}",
            f"{e.lower:.10g}",
            f"{e.upper:.10g}",
            f"{e.residual:.1e}",
            e.steps,
            e.status.name.lower(),
        )
        for e in members
    ]
    table = html_table(("σ", "lower", "upper", "residual", "steps", "status"), rows)
    confidence = next((e.confidence for e in members if e.upper < math.inf), None)
    said = "" if confidence is None else f"upper bounds at confidence {confidence:.10g}"
    said = f"{said}{_unbounded(members)}".removeprefix("; ")
    return f"<div>{table}<p>{escape(said)}</p></div>"
