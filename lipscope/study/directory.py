"""The directory of a study: whether it is one, whether it is the same one, and how it is opened.

A study may come from a stranger, so these rules hold for every schema:

- A reader opens the file read-only, with SQLite's locks, and rolls nothing back.
- Before anything is read through the schema of a file, that schema is compared with ours.
- A writer holds the lock of the directory. It rolls back what a killed run left, but never a
  journal that names another file: SQLite would delete that file afterwards.
- Every name that lipscope chose is a regular file or missing; links at such names are refused.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lipscope._files import claim_folder, kind_of, remove_drafts, require_plain
from lipscope._types import UserError
from lipscope.study.records import Fingerprint
from lipscope.study.salvage import copy_rows, is_damage

if TYPE_CHECKING:
    from filelock import BaseFileLock

T = TypeVar("T")

FILE = "study.sqlite"
LOCK = "study.lock"
JOURNAL = f"{FILE}-journal"
APPLICATION_ID = 0x4C495053  # "LIPS" in the file header: this database is a study
SCHEMA_VERSION = 3
OLDEST = 2
"""The schemas that are written, and read."""

# Two tables: the numbers, with typed columns for anyone who opens the file, and everything else by
# kind and key. "No layer" and "no head" are -1, because in a unique index every NULL differs. Both
# indexes hold the keys a second time: that is how a lost row is noticed, and named.
SCHEMA = (
    """CREATE TABLE rows (
    probe TEXT NOT NULL, scope TEXT NOT NULL, layer INTEGER NOT NULL, head INTEGER NOT NULL,
    n INTEGER NOT NULL, sample INTEGER NOT NULL, kind TEXT NOT NULL, norm TEXT NOT NULL,
    value REAL, lower REAL NOT NULL, upper REAL NOT NULL, residual REAL, status TEXT NOT NULL,
    radius REAL, dtype TEXT NOT NULL, device TEXT NOT NULL, seconds REAL,
    reason TEXT NOT NULL, extra TEXT NOT NULL, crc INTEGER NOT NULL,
    CHECK (value IS NULL OR (lower <= value AND value <= upper))
)""",
    "CREATE UNIQUE INDEX rows_key ON rows (probe, scope, layer, head, n, sample, kind, norm)",
    "CREATE TABLE records "
    "(kind TEXT NOT NULL, key TEXT NOT NULL, value NOT NULL, crc INTEGER NOT NULL)",
    "CREATE UNIQUE INDEX records_key ON records (kind, key)",
)

MOST_BYTES = 4 * 2**30
MOST_COPIED = 2**30
"""Larger files are refused: a study is read into memory, and copied there if its schema is not
ours. Zeros at the end of a file cost its sender nothing."""

PATIENCE = 30.0
"""Seconds to wait for a process that is writing."""

_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_READONLY_ROLLBACK = 776  # SQLite's code for a journal that only a writer could roll back
_CANNOT_OPEN = 14
_PAGE = struct.Struct(">H")

_WHAT_DIFFERS = {
    "weights": "another model, or other weights",
    "config": "a model with another configuration",
    "revision": "another revision of the model",
    "tokenizer": "another tokenizer",
    "text": "another text",
    "numeric_version": "another numeric version of lipscope",
}


def connect_to_read(directory: Path) -> tuple[sqlite3.Connection, bool]:
    """Open the study in `directory` and change nothing; also return whether its schema is ours.

    If it is not, the connection is to a copy in memory, whose tables are read through our schema.
    """
    if not directory.exists():
        raise UserError(
            f"{directory} does not exist; create it with `lipscope measure --out {directory}`"
        )
    # Through a link, as a download cache has them: reading follows it and changes nothing.
    path = Path(os.path.realpath(directory / FILE))
    if not path.is_file():
        raise UserError(
            f"{directory} is not a study: it contains no {FILE}; "
            "give the --out directory of lipscope measure"
        )
    _require_rollback_mode(path, directory)
    with database_errors(directory):
        db = _connected(path, "mode=ro")
        try:
            db.execute("PRAGMA query_only = 1")
            version = patiently(lambda: require_study(db, directory, OLDEST))
            if version == SCHEMA_VERSION and patiently(lambda: has_our_schema(db)):
                return db, True
            if version == OLDEST:
                if not patiently(lambda: has_our_schema(db, OLDEST)):
                    raise UserError(f"{directory} is damaged: it has not the tables of a study")
                if path.stat().st_size > MOST_COPIED:
                    raise _too_large(path, directory, MOST_COPIED)
                # In today's form, in memory.
                new = _fresh()
                with closing(db):
                    copy_rows(db, new)
                return new, True
        except BaseException:
            db.close()
            raise
    # Not closed before, for that would end the locks that SQLite holds on this file.
    with closing(db):
        if path.stat().st_size > MOST_COPIED:
            raise _too_large(path, directory, MOST_COPIED)
        return connect_to_memory(_under_our_schema(path)), False


def connect_to_write(directory: Path) -> sqlite3.Connection:
    """Open the file of a directory that `claim` has locked, or create it."""
    # A rollback journal, which is safe on network file systems and gone after every transaction.
    # EXTRA: a commit is on disk, and the journal's name is off it, when it returns.
    db = _connected(directory / FILE, "mode=rwc")
    try:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("PRAGMA synchronous = EXTRA")
    except BaseException:
        db.close()
        raise
    return db


def connect_to_memory(content: bytes | bytearray | None = None) -> sqlite3.Connection:
    """Open a database in memory, with this content."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    if content is not None:
        db.deserialize(content)
    _distrust(db)
    return db


def create_tables(db: sqlite3.Connection) -> None:
    """Create the tables of a study."""
    for statement in SCHEMA:
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def has_our_schema(db: sqlite3.Connection, version: int = SCHEMA_VERSION) -> bool:
    """Whether a database has the tables of a study and nothing else: no view, no trigger."""
    try:
        return _schema(db) == _our_schema(version)
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            return False
        raise


def claim(directory: Path, noun: str = "a study", marks: Collection[str] = ()) -> BaseFileLock:
    """Lock a directory for writing and remove what a killed run left in it.

    Args:
        directory: A new or empty directory, or that of a study.
        noun: What the directory is called.
        marks: Other files that it may hold.

    Returns:
        The acquired lock.
    """
    lock = claim_folder(directory, noun, (FILE, JOURNAL, *marks), LOCK)
    try:
        _settle(directory)
    except BaseException:
        lock.release()
        raise
    return lock


def _settle(directory: Path) -> None:
    """Remove drafts, and roll back or remove the journal of a killed run; needs the lock."""
    path = directory / FILE
    journal = directory / JOURNAL
    try:
        remove_drafts(path)
        for each in (path, journal):
            require_plain(each)
            if kind_of(each) == "file" and os.lstat(each).st_nlink > 1:
                raise UserError(
                    f"cannot write {each}: it has a second name elsewhere, whose content would "
                    "change too; replace it by a copy"
                )
        if kind_of(path) == "missing" or os.lstat(path).st_size == 0:
            # Nobody can use the journal of a file that is gone, and SQLite would play it back into
            # the next file of this name.
            journal.unlink(missing_ok=True)
            return
    except OSError as error:
        raise UserError(f"cannot write to {directory} ({error.strerror or error})") from error
    _require_rollback_mode(path, directory)
    if kind_of(journal) == "missing":
        return
    with open(journal, "rb") as file:  # it would end as SQLite ends one with a super-journal
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_JOURNAL_MAGIC)))
        names_another = file.read() == _JOURNAL_MAGIC
    if names_another:
        raise UserError(
            f"{journal} names another file, which lipscope's journals never do; remove it if you "
            "trust the study without it"
        )
    with database_errors(directory), closing(_connected(path, "mode=rw")) as db:
        db.execute("PRAGMA synchronous = EXTRA")
        db.execute("PRAGMA user_version").fetchone()  # the first read rolls back
    journal.unlink(missing_ok=True)  # a journal without content, which SQLite ignores


def _require_rollback_mode(path: Path, directory: Path) -> None:
    """Raise UserError if opening the file would create others beside it, hang, or take too long."""
    beside = [path.with_name(f"{path.name}-{end}") for end in ("wal", "shm")]
    for each in beside:
        if os.path.lexists(each):
            raise UserError(
                f"{directory} is not a study as lipscope writes it: there is {each.name} in it, so "
                "another program has changed it"
            )
    if kind_of(path.with_name(f"{path.name}-journal")) not in ("missing", "file"):
        raise UserError(f"{directory} is not a study: its {JOURNAL} is not a regular file")
    size = path.stat().st_size
    if size == 0:  # SQLite removes the journal of an empty file
        raise UserError(f"{directory} is not a study: its {FILE} was not written by lipscope")
    if size > MOST_BYTES:
        raise _too_large(path, directory, MOST_BYTES)
    # Without locks SQLite cannot use a write-ahead log, and says so before it creates a file.
    with closing(_connected(path, "mode=ro&nolock=1")) as db:
        try:
            db.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == _CANNOT_OPEN:
                raise UserError(
                    f"cannot open {directory}: its {FILE} is not readable, or another program has "
                    "switched it to a write-ahead log"
                ) from error


def _connected(path: Path, how: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{how}"
    try:
        db = sqlite3.connect(
            uri, uri=True, timeout=PATIENCE, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise UserError(f"cannot open {path} ({error})") from error
    _distrust(db)
    return db


def _distrust(db: sqlite3.Connection) -> None:
    """Make SQLite treat the content of a file as that of a stranger."""
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")
    db.execute("PRAGMA temp_store = MEMORY")  # no files elsewhere
    db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    if sys.version_info >= (3, 12):
        db.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
        db.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_TRIGGER, False)
        db.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_VIEW, False)


def _schema(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    encoding = db.execute("PRAGMA encoding").fetchone()
    # One more than there should be shows that there are too many.
    found = db.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name LIMIT 5"
    ).fetchall()
    return [encoding, *found]


@cache
def _our_schema(version: int) -> list[tuple[object, ...]]:
    with closing(_fresh()) as db:
        ours = _schema(db)
    # Schema 2 lacked two columns.
    added = "\n    reason TEXT NOT NULL, extra TEXT NOT NULL," if version == OLDEST else "\0"
    return [tuple(str(x).replace(added, "") for x in entry) for entry in ours]


def _fresh(page: int = 4096) -> sqlite3.Connection:
    """A study without rows or records, in memory."""
    db = connect_to_memory()
    db.execute(f"PRAGMA page_size = {page}")
    create_tables(db)
    return db


def _under_our_schema(path: Path) -> bytearray:
    """The content of a file with the first page of an empty study, where the schema is."""
    content = bytearray(path.stat().st_size)
    with open(path, "rb") as file:
        file.readinto(content)
    page = _PAGE.unpack_from(content[:18].ljust(18, b"\0"), 16)[0]
    page = 65536 if page == 1 else page
    if page not in (512 << i for i in range(8)):
        page = 4096
    with closing(_fresh(page)) as db:
        fresh = bytearray(db.serialize())
    # The tables begin on the pages after the first, in the order in which they were created.
    pages = max(len(fresh), len(content)) // page
    struct.pack_into(">I", fresh, 28, pages)
    del content[pages * page :]
    content += bytes(pages * page - len(content))
    content[:page] = fresh[:page]
    return content


def patiently(read: Callable[[], T]) -> T:
    """Call a function that reads, again if a writer interfered.

    While a writer ends a transaction, a reader may take its journal for that of a killed process.
    A journal that stays without a writer is one.
    """
    for _ in range(25):
        try:
            return read()
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) != _READONLY_ROLLBACK:
                raise
            time.sleep(0.02)
    return read()


def require_study(db: sqlite3.Connection, directory: Path, oldest: int = SCHEMA_VERSION) -> int:
    """The schema of a study; raises UserError unless it is one that this version can use."""
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
    if version < oldest:
        remedy = (
            f"`lipscope merge NEW {directory}` writes a copy that can be resumed"
            if version == OLDEST
            else "export it with that one, or measure again"
        )
        raise UserError(
            f"{directory} was written by an older lipscope (schema {version}, this one writes "
            f"{SCHEMA_VERSION}); {remedy}"
        )
    return int(version)


def _too_large(path: Path, directory: Path, most: int) -> UserError:
    size = path.stat().st_size / 2**30
    why = "" if most == MOST_BYTES else " in a study with another schema than lipscope's"
    return UserError(
        f"{directory} is too large: its {FILE} has {size:.2f} GiB, and at most {most / 2**30:.0f} "
        f"are read{why}"
    )


def require_same(
    kept: Fingerprint, asked: Fingerprint, directory: Path, other: Path | None = None
) -> None:
    """Raise UserError if two studies differ in what decides a number.

    The first is in `directory`; the second is in `other`, or is asked for now.
    """
    for name in kept.differences(asked)[:1]:
        mine = getattr(kept, name)
        theirs = getattr(asked, name)
        what = _WHAT_DIFFERS.get(name)
        if other is not None:
            what = what or f"{name} = {theirs} in place of {mine}"
            raise UserError(
                f"{other} is a study of {what}, compared with {directory}; merge joins parts of "
                "one study, `lipscope compare` compares different ones"
            )
        what = f"of {what}" if what else f"with {name} = {mine}, and this run has {theirs}"
        raise UserError(
            f"{directory} is a study {what}; a directory is for one model, one text and one set of "
            "options: give another --out, or repeat the original measurement"
        )


@contextmanager
def database_errors(directory: Path | None) -> Iterator[None]:
    """Turn SQLite's errors into UserError."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code == _READONLY_ROLLBACK:
            raise UserError(
                f"a run that wrote to {directory} was killed, and reading changes nothing: repeat "
                f"the command that wrote to it, with --out {directory}, which resumes"
            ) from error
        if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise UserError(
                f"cannot use the study in {directory} ({error}); another process is using it: wait "
                "for it, and try again"
            ) from error
        if is_damage(error):
            raise UserError(f"{directory} is not a study, or it is damaged ({error})") from error
        raise UserError(
            f"cannot use the study in {directory} ({error}); is the disk full or read-only?"
        ) from error
