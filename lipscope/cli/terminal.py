"""What the commands share: parsing of arguments, the progress bar, tables, error messages."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lipscope._types import UserError
from lipscope.cli import interruption

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress


class ExitCode(IntEnum):
    """How a command ends."""

    DONE = 0
    SOME_FAILED = 1
    BAD_INPUT = 2
    INTERRUPTED = 130
    TERMINATED = 143


def tell(message: str, code: int) -> int:
    from lipscope._files import for_terminal

    typer.echo("lipscope: " + for_terminal(" ".join(message.split())), err=True)
    return code


def numbers(name: str, value: str | None) -> list[int] | None:
    """Parse 0,2,5-7 into a list of integers."""
    if value is None:
        return None
    found: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(
                f"--{name} takes integers and ranges such as 0,2,5-7; {part.strip()!r} is neither"
            )
        if dash and int(last) < int(first):
            raise UserError(
                f"--{name}: the range {part.strip()} is empty; write the smaller number first"
            )
        found += range(int(first), int(last or first) + 1)
    return found


def read_text(source: str) -> str | Path:
    """The path of a file, or the text on stdin with line endings translated as for a file."""
    if source != "-":
        return Path(source)
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
        # Path.read_text translates line endings; bytes from a pipe need it done by hand.
        return io.IncrementalNewlineDecoder(None, translate=True).decode(text, final=True)
    except UnicodeDecodeError as error:
        raise UserError(
            f"the text on stdin is not UTF-8 (byte {error.start}); convert it first"
        ) from error


class Report:
    """Updates the progress bar; also raises a Ctrl-C that a library has swallowed."""

    def __init__(self, bar: Progress, doing: str) -> None:
        self.doing, self._bar, self._task = doing, bar, bar.add_task("loading", total=None)

    def __call__(self, done: float, total: float) -> None:
        # Some libraries catch KeyboardInterrupt while they load; the handler remembers it for us.
        interruption.check()
        self._bar.update(self._task, description=self.doing, completed=done, total=total)


@contextmanager
def progress(doing: str = "measuring") -> Iterator[Report]:
    """A progress bar on stderr, shown on a terminal only; stdout stays clean."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    # On stderr, so that stdout can be piped into a file or another program.
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield Report(bar, doing)


def show_table(table: RenderableType) -> None:
    from rich.console import Console

    Console(highlight=False).print(table)
