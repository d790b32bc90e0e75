"""The command line: `main` runs one command and returns its exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from lipscope.cli.interrupt import FAREWELL, Remembered, too_late


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; Ctrl-C prints one line and exits with 130.

    Args:
        arguments: The command line as a list of words; by default, that of this process.
    """
    try:
        if arguments is None:
            signal.signal(signal.SIGINT, Remembered())
        from lipscope.cli.commands import run  # late: Ctrl-C may come during imports

        return run(arguments)
    except KeyboardInterrupt:
        print(f"lipscope: {FAREWELL}", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if arguments is None:
            too_late()
