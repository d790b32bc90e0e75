"""The directory of a study: whether it is one, whether it is the same one, and who may write."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from lipscope._types import UserError
from lipscope.study.records import Identity

FILE = "study.sqlite"
LOCK = "study.lock"
APPLICATION_ID = 0x4C495053  # "LIPS" in the file header: this database is a study
SCHEMA_VERSION = 1

_REMEDY = {
    "weights": "another model, or other weights",
    "config": "a model with another configuration",
    "revision": "another revision of the model",
    "tokenizer": "another tokenizer",
    "text": "another text",
    "numeric_version": "another numeric version of lipscope",
}


def become_writer(directory: Path) -> FileLock:
    """Create the directory if needed and lock it until the process ends, however it ends."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; --out takes a directory")
    if directory.is_dir() and not (directory / FILE).exists():
        strangers = sorted(
            p.name for p in directory.iterdir() if p.name not in (LOCK, f"{FILE}-journal")
        )
        if strangers:
            raise UserError(
                f"{directory} is neither a study nor empty (it contains {strangers[0]}); "
                "give --out a new or empty directory"
            )
    # The kernel releases the lock when the process dies, so a lock file left behind locks nothing;
    # a soft lock, which filelock would fall back to, does not have that property.
    lock = FileLock(directory / LOCK, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"another run is writing to {directory}; wait for it, or give another --out"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot write to {directory} ({error.strerror}); give --out a writable directory"
        ) from error
    return lock


def connect_to_read(directory: Path) -> sqlite3.Connection:
    """A read-only connection to the study in `directory`."""
    path = directory / FILE
    if not directory.exists():
        raise UserError(
            f"{directory} does not exist; create it with `lipscope measure --out {directory}`"
        )
    if not path.is_file():
        raise UserError(
            f"{directory} is not a study: it contains no {FILE}; "
            "give the --out directory of lipscope measure"
        )
    uri = path.absolute().as_uri()
    # On read-only media SQLite cannot create its lock files and must know that nobody writes.
    writable = os.access(directory, os.W_OK) or path.with_name(f"{FILE}-wal").exists()
    with database_errors(directory):
        db = sqlite3.connect(
            f"{uri}?mode=ro" + ("" if writable else "&immutable=1"), uri=True, timeout=30
        )
        require_study(db, directory)
    return db


def require_study(db: sqlite3.Connection, directory: Path) -> None:
    """Raise UserError unless the database is a study that this version can read."""
    application, version = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if application != APPLICATION_ID:
        raise UserError(f"{directory} is not a study: its {FILE} was not written by lipscope")
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{directory} was written by a newer lipscope (store {version}, this one reads up to "
            f"{SCHEMA_VERSION}); update lipscope"
        )


def require_same(kept: Identity, asked: Identity, directory: Path) -> None:
    """Raise UserError if the stored study and the requested one differ in what decides a number."""
    differences = kept.differences(asked)
    if not differences:
        return
    name = differences[0]
    if name in _REMEDY:
        what = f"is a study of {_REMEDY[name]}"
    else:
        what = (
            f"is a study with {name} = {getattr(kept, name)}, and this run has "
            f"{getattr(asked, name)}"
        )
    raise UserError(
        f"{directory} {what}; a directory is for one model, one text and one set of options: "
        "give another --out, or repeat the original measurement"
    )


@contextmanager
def database_errors(directory: Path | None) -> Iterator[None]:
    """Turn SQLite's errors into UserError."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise
    except sqlite3.DatabaseError as error:
        if "not a database" in str(error) or "malformed" in str(error):
            raise UserError(f"{directory} is not a study, or it is damaged ({error})") from error
        raise UserError(
            f"cannot use the study in {directory} ({error}); is the disk full or read-only?"
        ) from error
