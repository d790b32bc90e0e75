"""Monitor the local Lipschitz constants of layers while a model trains, without affecting it."""

from __future__ import annotations

import csv
import io
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from html import escape
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipscope._ambient import entry_point, unaffected
from lipscope._checks import check_whole
from lipscope._display import html_table
from lipscope._files import whole_file
from lipscope._types import Status, UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import Map, jacobian
from lipscope.linalg.estimate import as_single
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.train.watched_modules import GoneError, ModuleWatch, Watch

Log = Callable[[dict[str, float], int], None]
"""Takes {"sigma/<layer>": number} and the step, like the log function of most trackers."""

RESTART_EVERY = 8
"""A layer's solve starts from a random vector once in this many solves: only a random start is sure
to notice that another singular value has overtaken the remembered one."""

MAX_PRODUCTS = 40
"""Maximum number of steps per solve: an ill-separated layer gives a lower bound rather than a pause
in training."""

NOT_RUN = (
    "it did not run in this step; if it runs inside torch.compile, "
    "pass the module returned by torch.compile to SmoothnessMonitor"
)


@dataclass(frozen=True)
class Reading:
    """The local constant of one layer at one step.

    sigma:    ||J v|| / ||v|| at the vector found: a lower bound of ||D_X f||_2 (up to rounding);
              NaN if there is none
    residual: ||J' u - sigma v|| / sigma: how far that vector is from a singular vector
    tokens:   number of tokens the layer was measured at, without padding that attention ignores
    products: number of pairs of products with J and J'
    status:   how the solve ended, or why there is no number
    """

    step: int
    layer: str
    sigma: float
    residual: float
    tokens: int
    products: int
    status: str


class SmoothnessWarning(UserWarning):
    """Warning of a :class:`SmoothnessMonitor`; the training is never interrupted by it.

    It is issued when a constant exceeds ``max_sigma``, when a layer cannot be measured, and when
    readings cannot be written or replace earlier ones.

    Example:
        >>> import warnings
        >>> import torch
        >>> import lipscope as ls
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> monitor = ls.SmoothnessMonitor(layer, every=1, max_sigma=1e-9)
        >>> X = torch.ones(1, 4, 8)
        >>> _ = layer(X, X, X)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", ls.SmoothnessWarning)
        ...     _ = monitor.step()
        >>> caught[0].category.__name__
        'SmoothnessWarning'
    """


class SmoothnessMonitor:
    """Measures ||D_X f||_2 of each layer f every few training steps, at tokens X it has just read.

    A solve starts from the last right singular vector, so its value is a lower bound with a
    residual: the upper bound of :func:`local_lipschitz` needs a random start, which only every
    eighth solve has. torch's random state and the gradients, modes and buffers of the model are not
    touched: the training is bitwise identical to one without a monitor. The model is not kept
    alive: the monitor of a deleted one warns once and has no more readings.

    Args:
        model: A module, or a watch of one (see :func:`watch` for transformers models).
        layers: Modules, names or name patterns. Default: every lipscope attention layer and every
            ``nn.MultiheadAttention``. Attention is differentiated in closed form, any other module
            of tokens by autograd.
        every: Measure the steps that are multiples of this; the first step has number 0.
        csv: A file for the readings. An existing file is continued: steps without numbers resume
            after its last step, and steps that are measured again are replaced, with a warning in
            both cases.
        log: Called with ``{"sigma/<layer>": number}`` and the step; an exception it raises becomes
            a warning.
        max_sigma: Raise an alarm when a constant exceeds this, or has no value at all.
        alarm: Called with the Reading on an alarm. Default: issue a :class:`SmoothnessWarning`.
        stop: Whether an alarm sets the attribute `stopped`, so that the loop can end; the callbacks
            end their trainers.
        tol: Relative residual at which a solve stops.

    Raises:
        UserError: If an argument is invalid, or a layer does not exist.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> _ = torch.manual_seed(0)
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> monitor = ls.SmoothnessMonitor(layer, every=2)
        >>> for _ in range(4):
        ...     X = torch.randn(1, 5, 8)
        ...     Y, _ = layer(X, X, X)  # backward() and optimizer.step() would follow
        ...     readings = monitor.step()
        >>> [(reading.step, reading.layer, reading.tokens) for reading in monitor.readings]
        [(0, 'MultiheadAttention', 5), (2, 'MultiheadAttention', 5)]
    """

    @entry_point
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
        check_whole("every", every, 1)
        if not _is_number(max_sigma) or not max_sigma > 0:
            raise UserError(f"max_sigma must be a positive number, got {max_sigma!r}")
        if not _is_number(tol) or not 0 < tol < 1:
            raise UserError(
                f"tol must lie between 0 and 1 (the relative residual to reach), got {tol!r}"
            )
        if not isinstance(model, nn.Module | Watch):
            raise UserError(
                "SmoothnessMonitor takes a torch module or a watch of one, "
                f"got {type(model).__name__}"
            )
        if not isinstance(model, nn.Module) and layers is not None:
            raise UserError(
                "a watch already has its layers; pass layers to lipscope.watch, "
                "not to SmoothnessMonitor"
            )
        self.watch: Watch = ModuleWatch(model, layers) if isinstance(model, nn.Module) else model
        self.every = every
        self.tol = tol
        self.log = log
        self.max_sigma = max_sigma
        self.stop = stop
        self.alarm = alarm or _warn
        self.table = None if csv is None else SigmaTable(csv)
        self.readings: list[Reading] = []
        self.stopped = False
        # Unknown until the first step is done, which may come with a number of its own.
        self._next: int | None = None
        # By layer: the number of solves so far, and the last right singular vector.
        self._remembered: dict[str, tuple[int, Tensor | None]] = {}
        self._complained: set[str] = set()
        self._announced = False
        self.watch.arm()

    def before(self, number: int) -> None:
        """Announce that a training step is about to begin.

        Hooks are then active from here to `step`, so that other passes (a validation) are ignored;
        without this call they are active from the end of the previous step.

        Args:
            number: The number of the step that begins.
        """
        check_whole("the number of a step", number, 0)
        self._announced = True
        self._next = number
        self._look(number)

    @unaffected
    def step(self, number: int | None = None) -> list[Reading]:
        """Announce that a training step is done, and measure it if it is due.

        Args:
            number: The number of the step, needed if training resumes or does not count from 0.
                Default: the number that `before` announced, or the next one, or the one after the
                last step of an existing CSV file.

        Returns:
            The readings of this step; empty if it was not due.
        """
        number = self._default_number() if number is None else number
        check_whole("the number of a step", number, 0)
        self._next = number + 1
        try:
            readings = self._measure(number) if number % self.every == 0 else []
            self._record(number, readings)
        finally:
            self.watch.release()
        if not self._announced:
            self._look(self._next)
        return readings

    def close(self) -> None:
        """Remove all hooks from the model."""
        self.watch.release()

    def plot(self, ax: Any = None) -> Any:
        """Plot the constants measured so far, one curve per layer; returns matplotlib Axes."""
        from lipscope.report.figures import draw_readings

        return draw_readings(self.readings, ax)

    def __repr__(self) -> str:
        layers = self.watch.names
        count = len(self.readings)
        last = f", the last at step {self.readings[-1].step}" if count else ""
        often = "step" if self.every == 1 else f"{self.every} steps"
        return (
            f"SmoothnessMonitor({len(layers)} layer{'' if len(layers) == 1 else 's'}, every "
            f"{often}: {count} reading{'' if count == 1 else 's'}{last})"
        )

    def _repr_html_(self) -> str:
        rows = []
        for name in self.watch.names:
            own = [reading for reading in self.readings if reading.layer == name]
            sigmas = [reading.sigma for reading in own if math.isfinite(reading.sigma)]
            numbers = (
                (f"{x:.4g}" for x in (sigmas[0], sigmas[-1], max(sigmas))) if sigmas else "–––"
            )
            rows.append((name, len(own), *numbers, own[-1].status if own else "–"))
        head = ("layer", "readings", "σ, first", "σ, last", "σ, largest", "last status")
        return f"<div><p>{escape(repr(self))}</p>{html_table(head, rows)}</div>"

    def _default_number(self) -> int:
        """The number of a step that came without one; it never overwrites rows of the file."""
        if self._next is not None:
            return self._next
        last = -1 if self.table is None else self.table.last
        if self.table is not None and last >= 0:
            warnings.warn(
                f"{self.table.path} ends at step {last}: steps without numbers continue from "
                f"{last + 1}; use monitor.step(number) to number them yourself and replace "
                "steps that are measured again",
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
                    found = self.watch.measured_map(name)
                    if found is not None:
                        readings.append(self._reading(step, name, *found))
                    else:
                        self._complain(step, f"of {name}", NOT_RUN)
                except GoneError as error:
                    self._complain(step, "of deleted layers", str(error))
                # Out of memory, a random map, ...: the training must continue.
                except Exception as error:
                    why = _on_one_line(error)
                    self._complain(step, f"of {name}", why)
                    readings.append(_no_reading(step, name, tokens=0, status=why))
        return readings

    def _reading(self, step: int, name: str, f: Map, X: Tensor) -> Reading:
        # Padding neither attends nor is attended to.
        padding = f.padding if isinstance(f, SelfAttention) else None
        tokens = X.shape[0] if padding is None else int(padding.sum())
        if not X.isfinite().all():
            return _no_reading(step, name, tokens, Status.NON_FINITE.name.lower())
        done, start = self._remembered.get(name, (0, None))
        # Weights change little between steps, so the last vector is a very good start. It would
        # also follow its singular value after another one has grown larger: restart now and then.
        if start is not None and (done % RESTART_EVERY == 0 or start.shape != X.shape):
            start = None
        solver = Solver(max_steps=MAX_PRODUCTS, seed=done)
        estimate = as_single(spectral_norm(jacobian(f, X), self.tol, start=start, solver=solver))
        usable = math.isfinite(estimate.value) and estimate.value > 0
        self._remembered[name] = done + 1, estimate.right if usable else None
        return Reading(
            step=step,
            layer=name,
            sigma=estimate.value,
            residual=estimate.residual,
            tokens=tokens,
            products=estimate.steps,
            status=estimate.status.name.lower(),
        )

    def _record(self, step: int, readings: list[Reading]) -> None:
        """Write the readings to the table and the log, and raise the alarm where one is due."""
        self.readings += readings
        if self.table is not None:
            try:
                replaced = self.table.write(readings)
            except Exception as error:  # a full disk, a file changed by another program
                self._complain(
                    step, f"in {self.table.path}", f"it cannot be written ({_on_one_line(error)})"
                )
            else:
                if replaced:
                    rows = f"{replaced} row{'s' * (replaced > 1)} of {self.table.path}"
                    warnings.warn(
                        f"step {step} was measured again: replaced {rows}",
                        SmoothnessWarning,
                        stacklevel=3,
                    )
        if self.log is not None and readings:
            try:
                self.log(logged(readings), step)
            except Exception as error:  # a tracker that is no longer reachable
                self._complain(step, "in the log", f"{type(error).__name__}, {_on_one_line(error)}")
        for reading in readings:
            # Negated, so that NaN raises an alarm too.
            if self.max_sigma < math.inf and not reading.sigma <= self.max_sigma:
                self.stopped = self.stopped or self.stop
                self.alarm(reading)

    def _complain(self, step: int, where: str, why: str) -> None:
        """Warn once per place: a long training must not end because a number is not available."""
        if where not in self._complained:
            self._complained.add(where)
            warnings.warn(
                f"step {step}: no readings {where}: {why}", SmoothnessWarning, stacklevel=4
            )


def logged(readings: Sequence[Reading]) -> dict[str, float]:
    """The readings of a step under the names used in logs."""
    return {f"sigma/{reading.layer}": reading.sigma for reading in readings}


def _no_reading(step: int, layer: str, tokens: int, status: str) -> Reading:
    return Reading(
        step=step,
        layer=layer,
        sigma=math.nan,
        residual=math.nan,
        tokens=tokens,
        products=0,
        status=status,
    )


@contextmanager
def _aside() -> Iterator[None]:
    """Disable gradients and autocast for the measurement, and restore the random state after it."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu" if accelerator is None else accelerator.type
    devices: Iterable[int] = ()
    if accelerator is not None:
        # The generators of all devices in use, without initialising an idle one.
        backend = torch.get_device_module(accelerator)
        if hasattr(backend, "is_initialized") and backend.is_initialized():
            devices = range(torch.accelerator.device_count())
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        for name in {"cpu", kind}:
            stack.enter_context(torch.autocast(name, enabled=False))
        yield


def _warn(reading: Reading) -> None:
    where = f"step {reading.step}: layer {reading.layer}"
    message = f"{where} has sigma {reading.sigma:.4g} ({reading.status})"
    warnings.warn(message, SmoothnessWarning, stacklevel=4)


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


HEADER = [field.name for field in fields(Reading)]


class SigmaTable:
    """One line per reading; the file is closed after every step.

    A step that is measured again replaces its own rows and those of all later steps.

    last: the last step in the file, -1 if there is none
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise UserError(f"the folder of {self.path} does not exist; create it first")
        if self.path.is_dir():
            raise UserError(f"{self.path} is a folder; give the path of a CSV file")
        rows = self._rows() if self.path.exists() else []
        self.last = max((int(row[0]) for row in rows), default=-1)

    def write(self, readings: Sequence[Reading]) -> int:
        """Append the readings of one step; return the number of rows they replaced."""
        if not readings:
            return 0
        step = readings[0].step
        replaced = 0
        if not self.path.exists():
            self._replace([])
        elif step <= self.last or not self._ends_well():
            rows = self._rows()
            kept = [row for row in rows if int(row[0]) < step]
            replaced = len(rows) - len(kept)
            self._replace(kept)
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(
                astuple(reading) for reading in readings
            )
        self.last = step
        return replaced

    def _rows(self) -> list[list[str]]:
        """The complete lines of the file; a last line cut short by a crash is ignored."""
        foreign = (
            f"{self.path} was not written by a SmoothnessMonitor; "
            "choose another file, or move it away"
        )
        try:
            text = self.path.read_text(encoding="utf-8")
            if not text:
                return []
            lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{foreign} ({error})") from error
        header = (lines or [[]])[0]
        rows = lines[1:]
        if header != HEADER or any(
            len(row) != len(HEADER) or not row[0].isdecimal() for row in rows
        ):
            raise UserError(foreign)
        return rows

    def _ends_well(self) -> bool:
        with open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def _replace(self, rows: Iterable[Sequence[str]]) -> None:
        """Replace the file by the header and these rows, atomically."""
        with (
            whole_file(self.path, typed=True) as draft,
            open(draft, "w", newline="", encoding="utf-8") as file,
        ):
            csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])
