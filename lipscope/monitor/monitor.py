"""Eyes on the local Lipschitz constants of chosen layers while a model trains; the training does not notice."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from numbers import Integral, Real

import torch
from torch import Tensor, nn

from lipscope._types import Status, UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import Map, jacobian
from lipscope.linalg.estimate import Estimate
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.monitor.modules import ModuleWatch, Watch
from lipscope.monitor.sigma_table import Reading, SigmaTable

Log = Callable[[dict[str, float], int], None]
"""Takes {"sigma/<layer>": number} and the step, as the log of most trackers does."""

ANEW = 8
"""Every how many solves of a layer one starts from a random vector: only that is sure to see another singular value
overtake the remembered one."""

MAX_PRODUCTS = 40
"""Steps of one solve, at most: an ill-separated layer gives a lower bound rather than a pause in training."""


NOT_RUN = "it did not run in this step; if it runs inside torch.compile, give SmoothnessMonitor what torch.compile returned"


class SmoothnessWarning(UserWarning):
    """A constant above max_sigma, a layer that cannot be measured, readings that cannot be kept or give way."""


class SmoothnessMonitor:
    """Every `every` steps, ||D_X f||_2 of each layer f at tokens X that it has just read.

        monitor = SmoothnessMonitor(model, every=50, csv="sigma.csv", max_sigma=100.0)
        for batch in batches:
            ...                 # forward, backward, optimizer.step()
            monitor.step()

    A solve starts from the last right singular vector, so its number is a lower bound with a residual: the upper bound
    of `local_lipschitz` needs a random start, which only every eighth solve has. torch's random state, gradients, modes
    and buffers of the model stay as they are: the training is bit by bit the one without it.

    model:     a module, or a Watch of one (`lipscope.watch` makes one of a transformers model)
    layers:    modules, names or patterns of names; by default every lipscope attention and nn.MultiheadAttention.
               Attention is differentiated in closed form, any other module of tokens by autograd
    every:     the steps measured are the multiples of this; the first step is number 0
    csv:       a file for the readings; an existing one is continued: steps without numbers go on after its last, and
               steps whose numbers come again are replaced. Either is said in a warning
    log:       called with {"sigma/<layer>": number} and the step; what it raises becomes a warning
    max_sigma: above it (or where there is no number at all) `alarm` is called with the Reading, or a warning is given
    stop:      whether `stopped` turns true with the alarm, for the loop to end; the adapters end their trainers
    tol:       relative residual at which a solve stops
    """

    def __init__(
        self,
        model: nn.Module | Watch,
        layers: Sequence[str | nn.Module] | None = None,
        *,
        every: int = 50,
        csv: str | os.PathLike[str] | None = None,
        log: Log | None = None,
        max_sigma: float = math.inf,
        alarm: Callable[[Reading], None] | None = None,
        stop: bool = False,
        tol: float = 1e-2,
    ):
        _check(every, max_sigma, tol)
        if not isinstance(model, nn.Module | Watch):
            raise UserError(
                f"SmoothnessMonitor takes a torch module or a watch of one, got {type(model).__name__}"
            )
        if not isinstance(model, nn.Module) and layers is not None:
            raise UserError(
                "a watch has its layers already; give them where it is made, not to SmoothnessMonitor"
            )
        self.watch: Watch = ModuleWatch(model, layers) if isinstance(model, nn.Module) else model
        self.every, self.tol = every, tol
        self.log, self.max_sigma, self.stop = log, max_sigma, stop
        self.alarm = alarm or _warn
        self.table = None if csv is None else SigmaTable(csv)
        self.readings: list[Reading] = []
        self.stopped = False
        self._next: int | None = (
            None  # not known before the first step is done: it may come with a number
        )
        self._remembered: dict[
            str, tuple[int, Tensor | None]
        ] = {}  # solves done, and the last vector
        self._complained: set[str] = set()
        self._announced = False
        self.watch.arm()

    def before(self, number: int) -> None:
        """Say that a training step is about to begin, for a loop that lets other passes (a validation) go unseen.

        Hooks then sit on the layers from here to `step`; without it, from the end of the step before.
        """
        _check_step(number)
        self._announced, self._next = True, number
        self._look(number)

    def step(self, number: int | None = None) -> list[Reading]:
        """Say that a training step is done; the readings if it was one to be measured.

        number: which step it was, counted by one; needed where training resumes, or counts from elsewhere than 0.
                Without it, the one that `before` announced, or the next; after a file's last, if that is there already
        """
        number = self._unsaid() if number is None else number
        _check_step(number)
        self._next = number + 1
        try:
            readings = self._measure(number) if number % self.every == 0 else []
            self._tell(number, readings)
        finally:
            self.watch.release()
        if not self._announced:
            self._look(self._next)
        return readings

    def close(self) -> None:
        """Take every hook off the model."""
        self.watch.release()

    def _unsaid(self) -> int:
        """The number of a step that came without one; nothing in the file is written over for that."""
        if self._next is not None:
            return self._next
        last = -1 if self.table is None else self.table.last
        if self.table is not None and last >= 0:
            warnings.warn(
                f"{self.table.path} ends at step {last}: steps without numbers go on from {last + 1}; "
                "monitor.step(number) says which they are, and writes over those that come again",
                SmoothnessWarning,
                stacklevel=3,
            )
        return last + 1

    def _look(self, number: int) -> None:
        if number % self.every == 0:
            self.watch.arm()

    def _measure(self, step: int) -> list[Reading]:
        readings = []
        with _aside():
            for name in self.watch.names:
                try:
                    sight = self.watch.sight(name)
                    if sight is not None:
                        readings.append(self._reading(step, name, *sight))
                    else:
                        self._complain(step, f"of {name}", NOT_RUN)
                except (
                    Exception
                ) as error:  # out of memory, a map that is random...: the training goes on
                    why = _on_one_line(error)
                    self._complain(step, f"of {name}", why)
                    readings.append(Reading(step, name, math.nan, math.nan, 0, 0, why))
        return readings

    def _reading(self, step: int, name: str, f: Map, X: Tensor) -> Reading:
        tokens = _real_tokens(f, X)
        if not X.isfinite().all():
            return Reading(
                step, name, math.nan, math.nan, tokens, 0, Status.NON_FINITE.name.lower()
            )
        estimate = self._solve(name, f, X)
        status = estimate.status.name.lower()
        return Reading(
            step, name, estimate.value, estimate.residual, tokens, estimate.steps, status
        )

    def _solve(self, name: str, f: Map, X: Tensor) -> Estimate:
        done, start = self._remembered.get(name, (0, None))
        if start is not None and (done % ANEW == 0 or start.shape != X.shape):
            start = None
        solver = Solver(max_steps=MAX_PRODUCTS, seed=done)
        estimate = spectral_norm(jacobian(f, X), self.tol, start=start, solver=solver)
        usable = math.isfinite(estimate.value) and estimate.value > 0
        self._remembered[name] = done + 1, estimate.right if usable else None
        return estimate

    def _tell(self, step: int, readings: list[Reading]) -> None:
        self.readings += readings
        if self.table is not None:
            try:
                replaced = self.table.write(readings)
            except Exception as error:  # a full disk, a file that somebody else has changed
                self._complain(
                    step, f"in {self.table.path}", f"it cannot be written ({_on_one_line(error)})"
                )
            else:
                if replaced:
                    lines = f"{replaced} line{'s' * (replaced > 1)} of {self.table.path}"
                    warnings.warn(
                        f"step {step} comes again: {lines} gave way to it",
                        SmoothnessWarning,
                        stacklevel=3,
                    )
        if self.log is not None and readings:
            try:
                self.log(logged(readings), step)
            except Exception as error:  # a tracker that is gone
                self._complain(step, "in the log", f"{type(error).__name__}, {_on_one_line(error)}")
        for reading in readings:
            if self.max_sigma < math.inf and not reading.sigma <= self.max_sigma:
                self.stopped = self.stopped or self.stop
                self.alarm(reading)

    def _complain(self, step: int, where: str, why: str) -> None:
        """Once of each: a training of days is not to end for a number that cannot be had."""
        if where not in self._complained:
            self._complained.add(where)
            warnings.warn(
                f"step {step}: no readings {where}: {why}", SmoothnessWarning, stacklevel=4
            )


def logged(readings: Sequence[Reading]) -> dict[str, float]:
    """The readings of a step under the names a log gets them by."""
    return {f"sigma/{reading.layer}": reading.sigma for reading in readings}


def _real_tokens(f: Map, X: Tensor) -> int:
    """How many tokens take part: padded ones neither see nor are seen."""
    padding = f.padding if isinstance(f, SelfAttention) else None
    return X.shape[0] if padding is None else int(padding.sum())


@contextmanager
def _aside() -> Iterator[None]:
    """No gradients and no reduced precision, whatever the training has around it; its random numbers are put back."""
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_random_state_kept(accelerator))
        for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _random_state_kept(accelerator: torch.device | None) -> AbstractContextManager[None]:
    """The generators of the CPU and of every device in use. An accelerator that nobody has woken is left asleep."""
    if accelerator is None:
        return torch.random.fork_rng(devices=[])
    backend = torch.get_device_module(accelerator)
    awake = hasattr(backend, "is_initialized") and backend.is_initialized()
    devices = range(torch.accelerator.device_count()) if awake else ()
    return torch.random.fork_rng(devices=devices, device_type=accelerator.type)


def _warn(reading: Reading) -> None:
    message = f"step {reading.step}: layer {reading.layer} has sigma {reading.sigma:.4g} ({reading.status})"
    warnings.warn(message, SmoothnessWarning, stacklevel=4)


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _check(every: int, max_sigma: float, tol: float) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UserError(f"every must be a whole number of steps, at least 1, got {every!r}")
    if not _is_number(max_sigma) or not max_sigma > 0:
        raise UserError(f"max_sigma must be a positive number, got {max_sigma!r}")
    if not _is_number(tol) or not 0 < tol < 1:
        raise UserError(
            f"tol must lie between 0 and 1 (the relative residual to reach), got {tol!r}"
        )


def _check_step(number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 0:
        raise UserError(f"a step has a whole number, counted by one from 0, got {number!r}")


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)
