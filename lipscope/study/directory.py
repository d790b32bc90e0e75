"""The directory of a study: whether it is one, and whether it is the same one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lipscope._types import UserError
from lipscope.study.records import Identity
from lipscope.study.salvage import is_damage

FILE = "study.sqlite"
LOCK = "study.lock"
APPLICATION_ID = 0x4C495053  # "LIPS" in the file header: this database is a study
SCHEMA_VERSION = 2

_WHAT_DIFFERS = {
    "weights": "another model, or other weights",
    "config": "a model with another configuration",
    "revision": "another revision of the model",
    "tokenizer": "another tokenizer",
    "text": "another text",
    "numeric_version": "another numeric version of lipscope",
}


def require_parts(first: Identity, other: Identity, one: Path, two: Path) -> None:
    """Raise UserError if two studies differ in what decides a number: they are no parts of one."""
    for name in first.differences(other)[:1]:
        what = _WHAT_DIFFERS.get(name)
        if what is None:
            what = f"{name} = {getattr(other, name)} in place of {getattr(first, name)}"
        raise UserError(
            f"{two} is a study of {what}, compared with {one}; merge joins parts of one study, "
            "`lipscope compare` compares different ones"
        )


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
    # A writer that was killed leaves a journal, which the next one to open the file rolls back.
    writable = os.access(directory, os.W_OK) and os.access(path, os.W_OK)
    with database_errors(directory):
        uri = f"{path.absolute().as_uri()}?mode={'rw' if writable else 'ro'}"
        db = sqlite3.connect(uri, uri=True, timeout=30, check_same_thread=False)
        db.execute("PRAGMA query_only = 1")
        # Despite its name: SQLite then reads what is left of a file that was cut.
        db.execute("PRAGMA writable_schema = 1")
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
            f"{directory} was written by a newer lipscope (schema {version}, this one reads "
            f"{SCHEMA_VERSION}); update lipscope"
        )
    if version < SCHEMA_VERSION:
        raise UserError(
            f"{directory} was written by an older lipscope (schema {version}, this one reads "
            f"{SCHEMA_VERSION}); export it with that one, or measure again"
        )


def require_same(kept: Identity, asked: Identity, directory: Path) -> None:
    """Raise UserError if the stored study and the requested one differ in what decides a number."""
    differences = kept.differences(asked)
    if not differences:
        return
    name = differences[0]
    if name in _WHAT_DIFFERS:
        what = f"is a study of {_WHAT_DIFFERS[name]}"
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
    except sqlite3.Error as error:
        if is_damage(error):
            raise UserError(f"{directory} is not a study, or it is damaged ({error})") from error
        raise UserError(
            f"cannot use the study in {directory} ({error}); is the disk full or read-only?"
        ) from error
