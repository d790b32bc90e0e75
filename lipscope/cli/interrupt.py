"""Ctrl-C, remembered: libraries that are being loaded swallow it, or turn it into an error of their own."""

from __future__ import annotations

import signal
from types import FrameType

FAREWELL = "Stopped; what is on disk stays there. Give the same command again."
"""What Ctrl-C says where nobody has left a note that knows better."""


class Remembered:
    """A handler of SIGINT that raises KeyboardInterrupt like Python's own, and knows that it has."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


def interrupted() -> bool:
    """Whether Ctrl-C has come since a Remembered was put in charge."""
    handler = signal.getsignal(signal.SIGINT)
    return isinstance(handler, Remembered) and handler.came


def too_late() -> None:
    """From here on Ctrl-C changes nothing: what is left is Python's tidying up, which it would end half-way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Python ends itself by SIGINT, and not with our exit code, when a Ctrl-C has come within the exec of a string, as
    # dataclasses have it, even one that was dealt with. It forgets at the next string.
    exec("")
