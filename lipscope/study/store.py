"""The durable store: one SQLite file per study; stored rows survive crashes and power cuts."""

from __future__ import annotations

import json
import math
import sqlite3
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from lipscope.study.directory import (
    APPLICATION_ID,
    FILE,
    SCHEMA_VERSION,
    become_writer,
    connect_to_read,
    database_errors,
    require_same,
    require_study,
)
from lipscope.study.records import (
    COLUMNS,
    About,
    Identity,
    Row,
    RowKey,
    SampleTokens,
    Sensitivity,
    StudyInfo,
)

# In a unique index SQLite treats every NULL as different: ifnull makes "no layer" and "no head"
# ordinary keys, so that INSERT OR REPLACE replaces their rows too.
_SCHEMA = """
CREATE TABLE info (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE rows (
    probe TEXT NOT NULL, scope TEXT NOT NULL, layer INTEGER, head INTEGER,
    n INTEGER NOT NULL, sample INTEGER NOT NULL, kind TEXT NOT NULL, norm TEXT NOT NULL,
    value REAL, lower REAL NOT NULL, upper REAL NOT NULL, residual REAL, status TEXT NOT NULL,
    radius REAL, dtype TEXT NOT NULL, device TEXT NOT NULL, seconds REAL,
    CHECK (value IS NULL OR (lower <= value AND value <= upper))
);
CREATE UNIQUE INDEX rows_key
    ON rows (probe, scope, ifnull(layer, -1), ifnull(head, -1), n, sample, kind, norm);
CREATE TABLE samples (n INTEGER, sample INTEGER, tokens TEXT NOT NULL, PRIMARY KEY (n, sample));
CREATE TABLE sensitivities (
    scope TEXT NOT NULL, layer INTEGER, head INTEGER, n INTEGER NOT NULL, sample INTEGER NOT NULL,
    right BLOB NOT NULL, left BLOB NOT NULL
);
CREATE UNIQUE INDEX sensitivities_key
    ON sensitivities (scope, ifnull(layer, -1), ifnull(head, -1), n, sample);
"""

_ORDER = "probe, kind, norm, scope, n, sample, layer, head"


class Store:
    """Reads a study and, in the process that holds the lock, writes it.

    A write is one transaction: all of a job or nothing. When `write` returns, the rows are on disk.
    Without a directory the study is kept in memory.
    """

    def __init__(
        self, connection: sqlite3.Connection, directory: Path | None, lock: FileLock | None = None
    ) -> None:
        self._db = connection
        self._lock = lock
        self.directory = directory

    @classmethod
    def create(cls, directory: Path | None, info: StudyInfo) -> Store:
        """Open a store for writing: a new one, or that in `directory` if it is the same study."""
        if directory is None:
            store = cls(sqlite3.connect(":memory:", isolation_level=None), None)
            store._initialise(info)
            return store
        lock = become_writer(directory)
        store = cls(
            sqlite3.connect(directory / FILE, isolation_level=None, timeout=30), directory, lock
        )
        try:
            with database_errors(directory):
                store._prepare(directory, info)
        except BaseException:
            store._abandon()
            raise
        return store

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Open the store in `directory` for reading."""
        return cls(connect_to_read(directory), directory)

    def close(self) -> None:
        """Close the store and, if it was open for writing, release the lock."""
        if self._lock is not None:
            # Without a write-ahead log a study is one plain file, readable on read-only media; a
            # concurrent reader may prevent the switch, which is harmless.
            with suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA journal_mode = DELETE")
        self._abandon()

    def _abandon(self) -> None:
        self._db.close()
        if self._lock is not None:
            self._lock.release()

    def info(self) -> StudyInfo:
        """Identity and description of the study."""
        identity, about = (
            json.loads(
                self._db.execute("SELECT value FROM info WHERE key = ?", (key,)).fetchone()[0]
            )
            for key in ("identity", "about")
        )
        return StudyInfo(Identity(**identity), About(**about))

    def write(self, rows: Iterable[Row], sensitivities: Iterable[Sensitivity] = ()) -> None:
        """Store the rows of one job, replacing rows with the same keys; on disk when it returns."""
        checked = [row.check() for row in rows]
        # SQLite would store NaN as NULL, and the schema has NOT NULL for bounds.
        if any(math.isnan(x) for row in checked for x in (row.lower, row.upper)):
            raise ValueError("lower and upper must be numbers; use 0 and infinity if unknown")
        marks = ", ".join("?" * len(COLUMNS))
        with self._transaction():
            self._db.executemany(f"INSERT OR REPLACE INTO rows VALUES ({marks})", checked)
            # float32: these norms are shown to two digits, and there are n of them per row.
            self._db.executemany(
                "INSERT OR REPLACE INTO sensitivities VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    (*s[:5], array("f", s.right).tobytes(), array("f", s.left).tobytes())
                    for s in sensitivities
                ),
            )

    def write_samples(self, samples: Iterable[SampleTokens]) -> None:
        """Store the tokens of the samples to be measured."""
        with self._transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO samples VALUES (?, ?, ?)",
                ((s.n, s.sample, json.dumps(s.tokens)) for s in samples),
            )

    def rows(self, probe: str | None = None) -> list[Row]:
        """All rows, or those of one probe, in an order independent of when they were written."""
        where, values = ("", ()) if probe is None else (" WHERE probe = ?", (probe,))
        found = self._db.execute(
            f"SELECT {', '.join(COLUMNS)} FROM rows{where} ORDER BY {_ORDER}", values
        )
        return [_row(record) for record in found]

    def done(self, probe: str) -> set[RowKey]:
        """(scope, layer, head, n, sample) of every stored row of a probe that has not failed."""
        found = self._db.execute(
            "SELECT scope, layer, head, n, sample FROM rows "
            "WHERE probe = ? AND status NOT LIKE 'failed%'",
            (probe,),
        )
        return set(found)

    def sample(self, n: int, sample: int) -> SampleTokens:
        """The tokens of one sample."""
        found = self._db.execute(
            "SELECT tokens FROM samples WHERE n = ? AND sample = ?", (n, sample)
        ).fetchone()
        return SampleTokens(n, sample, tuple(json.loads(found[0])) if found else ())

    def sensitivity(
        self, scope: str, layer: int | None, head: int | None, n: int, sample: int
    ) -> Sensitivity | None:
        """The token norms of one row."""
        key = (scope, -1 if layer is None else layer, -1 if head is None else head, n, sample)
        where = (
            "scope = ? AND ifnull(layer, -1) = ? AND ifnull(head, -1) = ? AND n = ? AND sample = ?"
        )
        found = self._db.execute(f"SELECT * FROM sensitivities WHERE {where}", key).fetchone()
        return _sensitivity(found) if found else None

    def sensitivities(self) -> Iterator[Sensitivity]:
        """All token norms, in an order independent of when they were written."""
        for record in self._db.execute(
            "SELECT * FROM sensitivities ORDER BY scope, n, sample, layer, head"
        ):
            yield _sensitivity(record)

    def _prepare(self, directory: Path, info: StudyInfo) -> None:
        """Create the tables of a new study, or check that the existing one is the same."""
        # FULL: a commit reaches the disk before it returns, at a cost far below that of a solve.
        self._db.execute("PRAGMA synchronous = FULL")
        if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            self._initialise(info)
        else:
            require_study(self._db, directory)
            require_same(self.info().identity, info.identity, directory)
            self._set("about", asdict(info.about))
        self._db.execute("PRAGMA journal_mode = WAL")

    def _initialise(self, info: StudyInfo) -> None:
        statements = [s for s in _SCHEMA.split(";") if s.strip()]
        with self._transaction():
            for statement in statements:
                self._db.execute(statement)
            self._set("identity", asdict(info.identity))
            self._set("about", asdict(info.about))
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _set(self, key: str, value: object) -> None:
        self._db.execute("INSERT OR REPLACE INTO info VALUES (?, ?)", (key, json.dumps(value)))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with database_errors(self.directory):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


def _row(record: tuple[Any, ...]) -> Row:
    row = Row._make(record)
    # SQLite stores NaN as NULL, which comes back as None.
    if row.value is None or row.residual is None or row.radius is None or row.seconds is None:
        nans = {
            k: math.nan
            for k in ("value", "residual", "radius", "seconds")
            if getattr(row, k) is None
        }
        return row._replace(**nans)
    return row


def _sensitivity(record: tuple[Any, ...]) -> Sensitivity:
    scope, layer, head, n, sample, right, left = record
    return Sensitivity(
        scope=scope,
        layer=layer,
        head=head,
        n=n,
        sample=sample,
        right=_unpack(right),
        left=_unpack(left),
    )


def _unpack(blob: bytes) -> tuple[float, ...]:
    return tuple(array("f", blob))
