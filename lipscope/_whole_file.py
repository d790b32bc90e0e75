"""Files that are there in full or not at all, even when the machine stops half-way."""

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
        before = "the one from before is still there" if path.exists() else "there was none before, nor is now"
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
