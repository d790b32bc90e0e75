"""The command line: `main` runs one command and returns its exit code."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

STOPPED = "Stopped; what was saved is kept. Run the same command again."
"""The message after Ctrl-C or SIGTERM, where the exception carries no more specific note."""


class Interruption:
    """The handler of Ctrl-C and SIGTERM while a command runs.

    It raises KeyboardInterrupt, always the same object, to which code on its way may add a note on
    what has been saved. Libraries being imported may swallow it or raise their own error instead,
    so the handler also remembers that a signal came.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.error = KeyboardInterrupt()
        self.over = True
        self._before: dict[int, Any] = {}
        self._hook = sys.unraisablehook

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.over:
            self.signal = self.signal or number
            raise self.error

    def install(self) -> None:
        self.signal = 0
        self.error = KeyboardInterrupt()
        self.over = False
        self._before = {}
        self._hook = sys.unraisablehook
        if threading.current_thread() is not threading.main_thread():
            return  # signals are the business of the main thread alone
        for number in (signal.SIGINT, signal.SIGTERM):
            # A process started in the background is told to ignore Ctrl-C, and goes on doing so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self)
        # Python prints exceptions that are raised while an object is deleted; this one is ours.
        sys.unraisablehook = self._unraisable

    def remove(self, at_exit: bool) -> None:
        """Restore the handlers, or ignore signals: they would interrupt Python's own shutdown."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if at_exit else handler)
        sys.unraisablehook = self._hook
        # If the signal arrived inside the exec of a string (dataclasses run one), Python kills
        # itself by SIGINT at exit instead of returning our exit code, even if the exception was
        # handled. The flag behind this is cleared by the next exec.
        exec("")

    def check(self) -> None:
        """Raise the exception again if somebody has swallowed it."""
        if self.signal:
            raise self.error

    def _unraisable(self, unraisable: Any) -> None:
        if unraisable.exc_value is not self.error:
            self._hook(unraisable)


interruption = Interruption()
"""The handler of the command that is running."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; Ctrl-C and SIGTERM print one line.

    Args:
        arguments: The command line as a list of words; by default, that of this process.

    Returns:
        The exit code, one of `lipscope.cli.terminal.ExitCode`.
    """
    code = 0
    stop = interruption
    try:
        stop.install()
        from lipscope.cli.commands import run  # late: a signal may come during imports

        code = run(arguments)
    except BaseException as error:
        if not stop.signal and not isinstance(error, KeyboardInterrupt):
            raise
        code = 128 + signal.SIGINT
    finally:
        stop.over = True
        stop.remove(at_exit=arguments is None)
    # Without a signal, typer reports a KeyboardInterrupt of another origin by this code.
    if stop.signal or code == 128 + signal.SIGINT:
        from lipscope._files import for_terminal

        note = " ".join(getattr(stop.error, "__notes__", [STOPPED])[0].split())
        print(f"lipscope: {for_terminal(note)}", file=sys.stderr)
        code = 128 + (stop.signal or signal.SIGINT)
    return code
