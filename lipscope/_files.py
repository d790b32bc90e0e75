"""Files that are written in full or not at all, and text from strangers made safe to show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lipscope._types import UserError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write under; what is there when the block ends takes its place at `path`, and a failure leaves nothing.

    The name ends like that of the file, since some writers go by that.
    """
    draft = path.with_name(f".unfinished-{path.name}")
    try:
        yield draft
        _sync(draft, os.O_RDWR)
        os.replace(draft, path)
    except OSError as error:
        before = (
            "the one from before is still there"
            if path.exists()
            else "there was none before, nor is now"
        )
        raise UserError(f"cannot write {path}: {error.strerror or error}; {before}") from error
    finally:
        with suppress(OSError):
            draft.unlink()
    with suppress(OSError):  # some file systems cannot do it; the file itself is on disk
        _sync(path.parent, os.O_RDONLY)


def _sync(path: Path, mode: int) -> None:
    """A file's content to disk, or a folder's list of names."""
    opened = os.open(path, mode)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def for_terminal(text: str, width: int | None = None) -> str:
    """Control, bidi and other invisible characters become visible escapes: no token drives the terminal."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )
    return shown if width is None or len(shown) <= width else shown[: width - 1] + "…"


def for_spreadsheet(text: str) -> str:
    """Text that a spreadsheet would run as a formula is quoted by a leading apostrophe."""
    return (
        "'" + text
        if text.lstrip()[:1] in ("=", "+", "-", "@") or text[:1] in ("\t", "\r", "\n")
        else text
    )
