"""The command line: `main` runs one command and gives its exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from lipscope.cli.interrupt import FAREWELL, Remembered, too_late


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, or that of this process, where Ctrl-C ends in a line and exit code 130 whenever it comes."""
    try:
        if arguments is None:
            signal.signal(signal.SIGINT, Remembered())
        from lipscope.cli.commands import run  # late: Ctrl-C may come while commands are loaded

        return run(arguments)
    except KeyboardInterrupt:
        print(f"lipscope: {FAREWELL}", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if arguments is None:
            too_late()
