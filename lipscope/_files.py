"""Files written in full or not at all, and untrusted text made safe to display."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lipscope._types import UserError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends; a failure leaves no trace.

    The temporary name keeps the suffix of `path`, because some writers choose a format by it.
    """
    draft = path.with_name(f".unfinished-{path.name}")
    try:
        yield draft
        _sync(draft, os.O_RDWR)
        os.replace(draft, path)
    except OSError as error:
        before = "the previous file is unchanged" if path.exists() else "no file was written"
        raise UserError(f"cannot write {path}: {error.strerror or error}; {before}") from error
    finally:
        with suppress(OSError):
            draft.unlink()
    with suppress(OSError):  # some file systems cannot sync a folder; the file itself is on disk
        _sync(path.parent, os.O_RDONLY)


def _sync(path: Path, mode: int) -> None:
    """Flush a file's content, or a folder's list of names, to disk."""
    opened = os.open(path, mode)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def for_terminal(text: str, width: int | None = None) -> str:
    """Escape control, bidi and other invisible characters, so that text cannot drive a terminal."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )
    return shown if width is None or len(shown) <= width else shown[: width - 1] + "…"


def for_spreadsheet(text: str) -> str:
    """Prefix text that a spreadsheet would run as a formula with an apostrophe."""
    return (
        "'" + text
        if text.lstrip()[:1] in ("=", "+", "-", "@") or text[:1] in ("\t", "\r", "\n")
        else text
    )
