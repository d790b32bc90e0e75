"""Ctrl-C that is not lost: libraries being imported may swallow it or raise their own error."""

from __future__ import annotations

import signal
from types import FrameType

FAREWELL = "Stopped; what was saved is kept. Run the same command again."
"""The message after Ctrl-C, where the exception carries no more specific note."""


class Remembered:
    """A SIGINT handler that raises KeyboardInterrupt like Python's own, and records that it did."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


def interrupted() -> bool:
    """Whether Ctrl-C was pressed since a Remembered handler was installed."""
    handler = signal.getsignal(signal.SIGINT)
    return isinstance(handler, Remembered) and handler.came


def too_late() -> None:
    """Ignore Ctrl-C from here on: it would interrupt Python's own shutdown half-way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If Ctrl-C arrived inside the exec of a string (dataclasses run one), Python kills itself by
    # SIGINT at exit instead of returning our exit code, even if the exception was handled. The
    # flag behind this is cleared by the next exec.
    exec("")
