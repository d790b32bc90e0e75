"""Adaptive integration that ends with a time and a reason, never with NaN or a hang."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torchdiffeq import odeint

from lipscope._types import UserError

Field = Callable[[float, Tensor], Tensor]
Progress = Callable[[float, float], None]
Watch = Callable[[float, Tensor], "Ending | None"]


class Ending(Enum):
    """Why an integration ended; the value is a message to the user."""

    FINISHED = "reached the requested time"
    BLOW_UP = "the solution blows up in finite time"
    OVERFLOW = "numbers overflow this dtype; use a shorter time or smaller tokens"
    STALLED = "the steps became too small: the solution blows up, or the tolerance is too fine"
    MAX_STEPS = "reached the maximum number of steps; raise max_steps or the tolerance"


@dataclass(frozen=True, eq=False)
class Path:
    """States [T, ...] at the requested times [T] up to the end of the solution, and at its end."""

    times: Tensor
    states: Tensor
    ending: Ending
    steps: int
    evaluations: int


class _HaltError(Exception):
    def __init__(self, ending: Ending):
        self.ending = ending


class _Watched:
    """The field for the solver, which calls `callback_step` at every accepted or retried state."""

    def __init__(
        self,
        field: Field,
        end: float,
        watch: Watch | None,
        max_steps: int,
        progress: Progress | None,
    ):
        self.field = field
        self.end = end
        self.watch = watch
        self.progress = progress
        self.max_steps = max_steps
        self.steps = self.evaluations = 0
        self.last: tuple[float, Tensor] | None = None

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        self.evaluations += 1
        velocity = self.field(t.item(), y) if bool(y.isfinite().all()) else None
        if velocity is None or not bool(velocity.isfinite().all()):
            raise _HaltError(Ending.OVERFLOW)
        return velocity

    def callback_step(self, t: Tensor, y: Tensor, dt: Tensor) -> None:
        now = t.item()
        if self.last is None or now > self.last[0]:
            self.last = now, y
            ending = self.watch(now, y) if self.watch else None
            if ending is not None:
                raise _HaltError(ending)
        if self.steps >= self.max_steps:
            raise _HaltError(Ending.MAX_STEPS)
        if not now + dt.item() > now:  # the solver itself would loop forever
            raise _HaltError(Ending.STALLED)
        self.steps += 1
        if self.progress:
            self.progress(now, self.end)


def integrate(
    field: Field,
    y: Tensor,
    times: Tensor,
    *,
    rtol: float,
    atol: float,
    watch: Watch | None = None,
    max_steps: int = 10_000,
    progress: Progress | None = None,
) -> Path:
    """Solve dy/dt = field(t, y) by Dormand-Prince 5(4).

    The error of every step is at most atol + rtol |y| in every component. times [T] is increasing,
    in float64; `watch` is called with every accepted state and may end the path there.
    """
    check_tolerance(rtol)
    check_count("max_steps", max_steps)
    times = times.to(y.device)
    watched = _Watched(field, times[-1].item(), watch, max_steps, progress)
    try:
        states = _solve(watched, y, times, times[-1], rtol, atol)
        ending = Ending.FINISHED
    except _HaltError as halt:
        ending = halt.ending
        last, state = watched.last or (times[0].item(), y)
        kept = times[times < last]
        # Repeat the same steps without a watch: the solver returns nothing of an unfinished path.
        plain = _Watched(field, times[-1].item(), None, max_steps, None)
        before = (
            _solve(plain, y, kept, times[-1], rtol, atol) if len(kept) > 1 else y[None][: len(kept)]
        )
        times = torch.cat([kept, kept.new_tensor([last])])
        states = torch.cat([before, state[None]])
    if progress:
        progress(watched.end, watched.end)
    return Path(
        times=times.cpu(),
        states=states,
        ending=ending,
        steps=watched.steps,
        evaluations=watched.evaluations,
    )


def instants(time: float, frames: int) -> Tensor:
    """Return equidistant times [frames] from 0 to `time`, in float64."""
    check_time(time, frames)
    return torch.linspace(0, time, frames, dtype=torch.float64)


def check_time(time: float, frames: int) -> None:
    """Raise UserError unless `time` is positive and `frames` times up to it are distinct."""
    if (
        isinstance(time, bool)
        or not isinstance(time, int | float)
        or not (math.isfinite(time) and time > 0)
    ):
        raise UserError(f"time, the depth to integrate to, must be a positive number, got {time!r}")
    check_count("frames", frames, 2, "the start and the end")
    if not bool((torch.linspace(0, time, frames, dtype=torch.float64).diff() > 0).all()):
        raise UserError(f"time must be large enough for {frames} distinct times, got {time!r}")


def check_count(name: str, value: int, least: int = 1, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(
            f"{name} must be an integer of at least {least}{why and ', ' + why}, got {value!r}"
        )


def check_tolerance(tol: float) -> None:
    if isinstance(tol, bool) or not isinstance(tol, int | float) or not 0 < tol < 1:
        raise UserError(f"the tolerance must be a number between 0 and 1, got {tol!r}")


def _solve(
    field: _Watched, y: Tensor, times: Tensor, end: Tensor, rtol: float, atol: float
) -> Tensor:
    # The largest error, not the root mean square: a single token among thousands may be the one
    # that jumps.
    options = {"norm": lambda error: error.abs().max(), "step_t": end[None]}
    with torch.no_grad():
        return odeint(field, y, times, rtol=rtol, atol=atol, method="dopri5", options=options)
