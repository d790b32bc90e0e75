"""What every command shares: numbers and texts from arguments, the progress bar, tables, a line for a mistake."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lipscope._types import UserError
from lipscope.cli.interrupt import interrupted

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress

WRONG_INPUT, INTERRUPTED, SOME_FAILED = 2, 130, 1


def tell(message: str, code: int) -> int:
    from lipscope._files import for_terminal

    typer.echo("lipscope: " + for_terminal(" ".join(message.split())), err=True)
    return code


def numbers(name: str, value: str | None) -> list[int] | None:
    """0,2,5-7 as numbers."""
    if value is None:
        return None
    found: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(
                f"--{name} takes whole numbers and ranges, as in 0,2,5-7; {part.strip()!r} is neither."
            )
        if dash and int(last) < int(first):
            raise UserError(
                f"--{name}: the range {part.strip()} is empty; write the smaller number first."
            )
        found += range(int(first), int(last or first) + 1)
    return found


def read_text(source: str) -> str | Path:
    """A file, or what stands on stdin; its line ends are read as one character, as those of a file are."""
    if source != "-":
        return Path(source)
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
        return io.IncrementalNewlineDecoder(None, translate=True).decode(text, final=True)
    except UnicodeDecodeError as error:
        raise UserError(
            f"the text on stdin is not UTF-8 (byte {error.start}); convert it first."
        ) from error


class Report:
    """Moves a bar that says what is being done. A Ctrl-C that a library has swallowed is heard here."""

    def __init__(self, bar: Progress, doing: str) -> None:
        self.doing, self._bar, self._task = doing, bar, bar.add_task("loading", total=None)

    def __call__(self, done: float, total: float) -> None:
        if interrupted():
            raise KeyboardInterrupt
        self._bar.update(self._task, description=self.doing, completed=done, total=total)


@contextmanager
def progress(doing: str = "measuring") -> Iterator[Report]:
    """A bar with the time left, on a terminal; stdout stays clean."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

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


@contextmanager
def farewell(words: str) -> Iterator[None]:
    """What Ctrl-C says in here, unless whoever it reached first knows better."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if not hasattr(stop, "__notes__"):
            stop.add_note(words)
        raise


def show_table(table: RenderableType) -> None:
    from rich.console import Console

    Console(highlight=False).print(table)
