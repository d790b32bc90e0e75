"""How large the error of a correct low-precision run may be at every hidden state.

With q_k = v_k' C v_k for the covariance C of the error at a hidden state and Gaussian probes v_k,
the mean of q is tr C, the expected square of the error, and its variance is 2 tr C^2: the same as
that of the squared norm of a Gaussian error with covariance C. So the spread of q over probes also
tells how far the observed error of one correct run may lie from its expectation, and
nu = 2 mean^2 / variance are the degrees of freedom of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch
from scipy.special import ndtri
from torch import Tensor

from lipscope._types import UserError
from lipscope.probes.budget.formats import DTYPES
from lipscope.probes.budget.intervals import degrees_of_freedom
from lipscope.probes.budget.parts import impossible
from lipscope.probes.budget.probing import batches
from lipscope.probes.budget.rounding import Followed, follow_run, squared_errors
from lipscope.probes.budget.subject import Subject

FALSE_ALARMS = 0.01
"""Probability that a correct run is called wrong, over all hidden states together."""


class Tolerance(TypedDict):
    """Arguments of torch.testing.assert_close."""

    atol: float
    rtol: float


@dataclass(frozen=True)
class StateBudget:
    """The expected squared error at a hidden state, over all sequences.

    squared: tr C, summed over sequences
    freedom: the degrees of freedom of the squared error of one run
    size:    the squared norm of the hidden state
    entries: the number of its entries
    peak:    the largest rms error of a token or of a channel, relative to that of all entries
    made:    the squared error of the run that the budget was made from, over all sequences
    """

    squared: float
    freedom: float
    size: float
    entries: int
    peak: float
    made: float


def state_budgets(
    subject: Subject,
    low: Subject,
    probes: int,
    seed: int,
    only: int | None = None,
    before_norm: bool = False,
    progress: Callable[[float, float], None] | None = None,
) -> tuple[list[StateBudget], list[list[Tensor]]]:
    """The budget of every hidden state (or of one), and the states of the reference.

    With `before_norm`, the last layer's output before the final norm is one more state at the end,
    if the model has such a norm.
    """
    generator = torch.Generator().manual_seed(seed)
    noise: list[Tensor] = []
    states: list[list[Tensor]] = []
    errors: list[list[Tensor]] = []
    for b, sample in enumerate(subject.sequences):
        if progress is not None:
            progress(b, len(subject.sequences))
        run = follow_run(subject, low, sample)
        pairs = list(zip(run.states, run.run[1], strict=True))
        pairs = pairs if only is None else [pairs[only]]
        if before_norm and run.before is not None:
            pairs.append(run.before)
        noise.append(_noise(run, [exact for exact, _ in pairs], probes, generator))
        states.append([exact.detach() for exact, _ in pairs])
        errors.append([made.to(subject.dtype) - exact.detach() for exact, made in pairs])
    q = torch.stack(noise, dim=-1)  # [states, probes, sequences]
    budgets = [
        StateBudget(
            squared=float(q[i].mean(dim=0).sum()),
            freedom=degrees_of_freedom(q[i]),
            size=sum(float(s[i].square().sum()) for s in states),
            entries=sum(s[i].numel() for s in states),
            peak=max(_peak(e[i]) for e in errors),
            made=sum(float(e[i].square().sum()) for e in errors),
        )
        for i in range(len(q))
    ]
    return budgets, states


def state_tolerance(subject: Subject, format: str, state: int, probes: int, seed: int) -> Tolerance:
    """Tolerances within which all entries of a hidden state of a correct run lie."""
    if format not in DTYPES:
        raise UserError(
            f"tolerances exist for runs in {', '.join(DTYPES)}; {format!r} is not one of them"
        )
    dtype = DTYPES[format]
    (budget,), _ = state_budgets(subject, subject.in_dtype(dtype), probes, seed, only=state)
    rms = (budget.squared / budget.entries) ** 0.5
    # A normal error exceeds this at one of the entries with probability FALSE_ALARMS.
    quantile = -float(ndtri(FALSE_ALARMS / 2 / budget.entries))
    return {"atol": quantile * budget.peak * rms, "rtol": torch.finfo(dtype).eps}


def _noise(run: Followed, states: list[Tensor], probes: int, generator: torch.Generator) -> Tensor:
    """q of every probe at every state, [states, probes]."""
    drawn = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)
        for y in states
        for _ in range(probes)
    ]
    q = []
    by_site = torch.zeros(len(states), len(run.roundings), dtype=torch.float64)
    # One backward pass serves probes of several states: a probe is zero at all states but its own.
    for batch in batches(len(drawn), [r.exact for r in run.roundings]):
        hit = sorted({row // probes for row in batch})
        v = [states[i].new_zeros(len(batch), *states[i].shape) for i in hit]
        for k, row in enumerate(batch):
            v[row // probes - hit[0]][k] = drawn[row]
        squares = squared_errors([states[i] for i in hit], v, run.roundings)[0]
        q.append(squares.sum(dim=1))
        by_site.index_add_(0, torch.tensor([row // probes for row in batch]), squares / probes)
    for y, sites in zip(states, by_site, strict=True):
        relative = float(sites.sum().to(y.device) / y.detach().square().sum())
        if not relative <= 1 and bool(sites.any()):  # NaN is not, either
            kind = str(run.run[1][0].dtype).removeprefix("torch.")
            worst = run.roundings[int(sites.nan_to_num(torch.inf).argmax())]
            value = relative**0.5
            raise UserError(impossible(kind, value, worst.name))
    return torch.cat(q).reshape(len(states), probes)


def _peak(error: Tensor) -> float:
    mean = error.square().mean()
    if not bool(mean > 0):
        return 1.0
    rows = error.square().mean(dim=-1)
    columns = error.square().mean(dim=-2)
    return float((torch.maximum(rows.max(), columns.max()) / mean).sqrt())
