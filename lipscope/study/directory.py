"""A study's directory: whether it is one, whether it is the same one, and who may write to it."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

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


def become_writer(directory: Path) -> TextIO:
    """Makes the directory where needed and its lock ours, until the process ends in whatever way."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; --out takes a directory.")
    if directory.is_dir() and not (directory / FILE).exists():
        strangers = sorted(
            p.name for p in directory.iterdir() if p.name not in (LOCK, f"{FILE}-journal")
        )
        if strangers:
            raise UserError(
                f"{directory} is not a study and not empty (it holds {strangers[0]}); "
                "give --out a new or empty directory."
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / LOCK, "a")  # noqa: SIM115 (held for the life of the store)
    except OSError as error:
        raise UserError(
            f"cannot write to {directory}: {error.strerror}. Give --out a directory you may write to."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise UserError(
            f"another run is writing to {directory}; wait for it, or give another --out."
        ) from error
    return lock


def connect_to_read(directory: Path) -> sqlite3.Connection:
    """A reading connection; on read-only media SQLite must be told that nobody writes."""
    path = directory / FILE
    if not directory.exists():
        raise UserError(
            f"{directory} does not exist; `lipscope measure --out {directory}` would make it."
        )
    if not path.is_file():
        raise UserError(
            f"{directory} is not a study: it holds no {FILE}. Give the --out directory of a measure."
        )
    uri = path.absolute().as_uri()
    writable = os.access(directory, os.W_OK) or path.with_name(f"{FILE}-wal").exists()
    with told(directory):
        db = sqlite3.connect(
            f"{uri}?mode=ro" + ("" if writable else "&immutable=1"), uri=True, timeout=30
        )
        require_study(db, directory)
    return db


def require_study(db: sqlite3.Connection, directory: Path) -> None:
    application, version = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if application != APPLICATION_ID:
        raise UserError(f"{directory} is not a study: its {FILE} was not written by lipscope.")
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{directory} was written by a newer lipscope (store {version}, this one reads up to "
            f"{SCHEMA_VERSION}); update lipscope."
        )


def require_same(kept: Identity, asked: Identity, directory: Path) -> None:
    differences = kept.differences(asked)
    if not differences:
        return
    name = differences[0]
    if name in _REMEDY:
        what = f"is a study of {_REMEDY[name]}"
    else:
        what = f"is a study with {name} = {getattr(kept, name)}, and this run has {getattr(asked, name)}"
    raise UserError(
        f"{directory} {what}; one directory is one model, one text and one setting. "
        "Give another --out, or measure the same again."
    )


@contextmanager
def told(directory: Path | None) -> Iterator[None]:
    """SQLite's complaints, in the user's words."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise
    except sqlite3.DatabaseError as error:
        if "not a database" in str(error) or "malformed" in str(error):
            raise UserError(f"{directory} is not a study, or it is damaged: {error}.") from error
        raise UserError(
            f"cannot use the study in {directory}: {error}. Is the disk full or read-only?"
        ) from error
