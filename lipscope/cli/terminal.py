"""What the commands share: exit codes, parsing of arguments, progress, tables, messages."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lipscope._types import UserError
from lipscope.cli import interruption

if TYPE_CHECKING:
    from rich.console import RenderableType


class ExitCode(IntEnum):
    """How a command ends; the table in docs/command_line.md says it in words."""

    DONE = 0
    ANSWER_IS_NO = 1
    BAD_INPUT = 2
    INCOMPLETE = 3
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    TERMINATED = 143


LARGEST = 10**9
MOST = 100_000
"""The largest number in a list such as --layers 0,2,5-7, and how many it may hold."""

LINE_EVERY = 10.0
"""Seconds between two progress lines in a log file."""

NARROWEST = 40
"""Columns below which a table is not readable; a terminal may claim to have 0."""

TABLES = {".csv": "CSV", ".tsv": "TSV", ".jsonl": "JSONL", ".ndjson": "JSONL"}
"""File names of tables, which people give in place of prose."""


def tell(message: str, code: int) -> int:
    """Print one line on stderr and return the exit code."""
    from lipscope._files import for_terminal

    # A path of thousands of characters would bury what is said about it.
    words = (word if len(word) <= 200 else f"{word[:100]}…{word[-60:]}" for word in message.split())
    typer.echo("lipscope: " + for_terminal(" ".join(words)), err=True)
    return code


def warn(message: str) -> None:
    tell(f"warning: {message}", 0)


def numbers(name: str, value: str | None) -> list[int] | None:
    """Parse 0,2,5-7 into a list of integers."""
    if value is None:
        return None
    found: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        shown = part.strip() if len(part) < 40 else f"{part.strip()[:40]}…"
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(
                f"--{name} takes integers and ranges such as 0,2,5-7; {shown!r} is neither"
            )
        # Digits are counted before int() sees them: Python refuses to convert thousands of them.
        if max(len(first), len(last)) > len(str(LARGEST)) or int(last or first) > LARGEST:
            raise UserError(f"--{name}: {shown} is too large; numbers end at {LARGEST}")
        if dash and int(last) < int(first):
            raise UserError(f"--{name}: the range {shown} is empty; write the smaller number first")
        # The range is a few bytes; a list of its numbers could be all the memory there is.
        chosen = range(int(first), int(last or first) + 1)
        if len(found) + len(chosen) > MOST:
            raise UserError(f"--{name} names more than {MOST} numbers; give fewer")
        found += chosen
    return found


def read_texts(
    sources: Sequence[str] | None, column: str | None = None, quiet: bool = False
) -> Any:
    """What `--text` names: None, one text, or a list of them."""
    if column is not None and (not sources or "-" in sources):
        raise UserError("--column chooses a column of a table; give it with --text FILE")
    if not sources:
        return None
    if column is None:
        found: list[Any] = [read_text(source) for source in sources]
        for source in () if quiet else sources:
            if kind := TABLES.get(Path(source).suffix.lower()):
                warn(f"{source} is read as prose, {kind} and all; --column NAME reads one column")
    else:
        from lipscope.study.reading import TextColumn

        found = [TextColumn(Path(source), column) for source in sources]
    # A single text by itself: a study names it after its file, where a list has no name.
    return found[0] if len(found) == 1 else found


def read_text(source: str) -> str | Path:
    """The path of a file, or the text on stdin with line endings translated as for a file."""
    if source != "-":
        return Path(source)
    from lipscope.study.reading import Prose

    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")  # without a byte order mark
        # Path.read_text translates line endings; bytes from a pipe need it done by hand.
        return Prose(io.IncrementalNewlineDecoder(None, translate=True).decode(text, final=True))
    except UnicodeDecodeError as error:
        raise UserError(
            f"the text on stdin is not UTF-8 (byte {error.start}); convert it first"
        ) from error


class Report:
    """Shows progress; also raises a Ctrl-C that a library has swallowed."""

    def __init__(self, doing: str, show: Any) -> None:
        self.doing = doing
        self._show = show

    def __call__(self, done: float, total: float) -> None:
        # Some libraries catch KeyboardInterrupt while they load; the handler remembers it for us.
        interruption.check()
        self._show(self.doing, done, total)


class _Log(logging.Handler):
    """Shows what the library logs, such as the address of a dashboard."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(record.getMessage(), 0)


class Lines:
    """Progress for a log file: one line every few seconds, so that a short run has none."""

    def __init__(self) -> None:
        self._start = 0.0
        self._last = time.monotonic()

    def __call__(self, doing: str, done: float, total: float) -> None:
        now = time.monotonic()
        # Loading is over at the first call, and must not count as the time that work takes.
        self._start = self._start or now
        if now - self._last < LINE_EVERY or not 0 < done < total:
            return
        self._last = now
        left = round((now - self._start) * (total - done) / done)
        tell(f"{doing}, {100 * done / total:.0f} %, about {left // 60}:{left % 60:02d} left", 0)


@contextmanager
def progress(doing: str = "measuring", quiet: bool = False) -> Iterator[Report]:
    """Progress on stderr, as a bar on a terminal and as lines elsewhere; stdout stays clean."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        warnings.simplefilter("ignore", UserWarning)
    log = logging.getLogger("lipscope")
    log.setLevel(logging.INFO)
    log.handlers = [] if quiet else [_Log()]
    if quiet or not console.is_terminal:
        yield Report(doing, (lambda *_: None) if quiet else Lines())
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield Report(
            doing,
            lambda doing, done, total: bar.update(
                task, description=doing, completed=done, total=total
            ),
        )


def show_table(table: RenderableType, quiet: bool = False) -> None:
    """Print a table on stdout."""
    from rich.console import Console

    if quiet:
        return
    console = Console(highlight=False)
    if console.width < NARROWEST:
        console.width = 80
    console.print(table)


def show_json(content: Any) -> None:
    """Print JSON on stdout; NaN and infinities become null."""
    from lipscope.study.export import finite

    typer.echo(json.dumps(finite(content), indent=1, allow_nan=False))
