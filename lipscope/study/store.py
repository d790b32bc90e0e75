"""The durable store: one SQLite file per study; rows survive crashes, and damage is noticed."""

from __future__ import annotations

import json
import math
import sqlite3
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope._types import UserError
from lipscope.study.directory import (
    claim,
    connect_to_memory,
    connect_to_read,
    connect_to_write,
    create_tables,
    database_errors,
    has_our_schema,
    patiently,
    require_same,
    require_study,
)
from lipscope.study.jobs import Command, command_lines
from lipscope.study.records import (
    COLUMNS,
    FAILED,
    Description,
    Fingerprint,
    Row,
    RowKey,
    SampleTokens,
    Sensitivity,
    StudyHeader,
    record_of,
)
from lipscope.study.salvage import (
    ABOUT,
    CLAIM,
    COMMANDS,
    IDENTITY,
    INFO,
    MOST_COMMANDS,
    MOST_JOBS,
    NORMS,
    RECORDS,
    ROWS,
    TOKENS,
    Record,
    Table,
    record_checksum,
    row_checksum,
    valid_record,
    valid_row,
)
from lipscope.study.salvage import read as read_table

if TYPE_CHECKING:
    from filelock import BaseFileLock


class Kept:
    """Records in memory, in place of a study that is not saved."""

    directory = None

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], Any] = {}

    def write(self, rows: Any, sensitivities: Any = (), records: Iterable[Record] = ()) -> None:
        """Keep the records of one job; rows are for exports."""
        self._records |= {(kind, key): value for kind, key, value in records}

    def get(self, kind: str, key: str) -> Any:
        """The value of one record, or None if there is none."""
        return self._records.get((kind, key))

    def records(self, kind: str) -> list[tuple[str, Any]]:
        """(key, value) of all records of a kind."""
        return [(key, value) for (its, key), value in self._records.items() if its == kind]

    def close(self) -> None:
        """Nothing is open."""


class Store:
    """Reads a study and, in the process that holds the lock, writes it.

    A write is one transaction: all of a job or nothing. When `write` returns, the rows are on disk.
    Without a directory the study is kept in memory. Every row and record carries a checksum, which
    every read verifies; what does not pass is left out and named in `lost`.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        directory: Path | None,
        lock: BaseFileLock | None = None,
        as_written: bool = True,
    ) -> None:
        self._db = connection
        self._lock = lock
        self.directory = directory
        self._lost: dict[str, list[str]] = {}
        self._lost_keys: set[Record] = set()
        self._new = False
        self._without_index: dict[Record, Any] | None = None  # the records, see `get`
        if not as_written:
            self._lost["schema"] = ["the schema"]

    @classmethod
    def create(
        cls,
        directory: Path | None,
        info: StudyHeader,
        command: Command | None = None,
        noun: str = "a study",
        marks: Collection[str] = (),
    ) -> Store:
        """Open a store for writing: a new one, or that in `directory` if it is the same study.

        `noun` and `marks` are what the directory is called, and other files that it may hold.
        """
        if directory is None:
            store = cls(connect_to_memory(), None)
            store._prepare(info, command)
            return store
        lock = claim(directory, noun, marks)
        try:
            with database_errors(directory):
                store = cls(connect_to_write(directory), directory, lock)
        except BaseException:
            lock.release()
            raise
        try:
            with database_errors(directory):
                store._prepare(info, command)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Open the store in `directory` for reading."""
        db, as_written = connect_to_read(directory)
        return cls(db, directory, as_written=as_written)

    def to_bytes(self) -> bytes:
        """The content of a store in memory."""
        return self._db.serialize()

    @classmethod
    def from_bytes(cls, content: bytes) -> Store:
        """A store in memory with this content."""
        return cls(connect_to_memory(content), None)

    def close(self) -> None:
        """Close the store and, if it was open for writing, release the lock."""
        self._db.close()
        if self._lock is not None:
            self._lock.release()

    def info(self) -> StudyHeader:
        """Identity and description of the study; what is lost is unknown, 0 or empty."""
        identity = record_of(Fingerprint, _parsed(self.get(INFO, IDENTITY)))
        about = record_of(Description, _parsed(self.get(INFO, ABOUT)))
        lines = command_lines(self.commands())
        return StudyHeader(identity, replace(about, command="\n".join(lines) or about.command))

    def add_commands(self, commands: Iterable[Command]) -> None:
        """Note commands that add to the study; each once, however often it is run."""
        before = self.commands()
        made = list(before)
        for command in commands:
            if command not in made:
                made.append(command)
        if made != before:
            self.put(INFO, COMMANDS, _listed(made))

    def commands(self) -> list[Command]:
        """The commands that made the study, in the order of their first run."""
        listed = self.get(INFO, COMMANDS)
        return [Command.from_json(one) for one in json.loads(listed)] if listed else []

    def write(
        self,
        rows: Iterable[Row],
        sensitivities: Iterable[Sensitivity] = (),
        records: Iterable[Record] = (),
    ) -> None:
        """Store the rows and records of one job, replacing those with the same keys.

        They are on disk when it returns.
        """
        self._new = False
        stored = []
        for row in rows:
            record = _stored(row)
            if not valid_row(record):
                raise ValueError(
                    "a study cannot hold this row: lower <= value <= upper does not hold, its "
                    f"status promises a value that is NaN, or a type or range is wrong: {row}"
                )
            stored.append((*record, row_checksum(record)))
        with self._transaction():
            self._db.executemany(ROWS.insert, stored)
            # float32: these norms are shown to two digits, and there are n of them per row.
            norms = (
                (NORMS, json.dumps(s[:5]), array("f", (*s.right, *s.left)).tobytes())
                for s in sensitivities
            )
            self._put(record for record in norms if valid_record(record))  # not those with NaN
            self._put(records)

    def write_samples(self, samples: Iterable[SampleTokens]) -> None:
        """Store the tokens of the samples to be measured."""
        with self._transaction():
            self._put((TOKENS, json.dumps(s[:2]), json.dumps(s.tokens)) for s in samples)

    def put(self, kind: str, key: str, value: str | bytes) -> None:
        """Store a record of some kind under a key, replacing one with the same kind and key."""
        self.write((), records=[(kind, key, value)])

    def rows(self, probe: str | None = None) -> list[Row]:
        """All rows, or those of one probe, in an order independent of when they were written."""
        rows = (_row(record) for record in self._read(ROWS))
        return sorted((row for row in rows if probe in (None, row.probe)), key=_place)

    def done(self, probe: str, settings: Mapping[str, Any] | None = None) -> set[RowKey]:
        """(scope, layer, head, n, sample) of every place that a probe need not measure again.

        Args:
            probe: What `Row.probe` begins with.
            settings: The settings in `Row.extra` with which the place was measured.
        """
        # A study that was just created has no rows.
        return {
            row[1:6]
            for row in ([] if self._new else self.rows())
            if row.probe.startswith(probe)
            and row.status != FAILED
            and row.extra.get("settings", {}) == (settings or {})
        }

    def sample(self, n: int, sample: int) -> SampleTokens | None:
        """The tokens of one sample; empty if it has none, None if they are lost."""
        key = json.dumps((n, sample))
        tokens = _parsed(self.get(TOKENS, key))
        # As far as the last read could tell; () stands for a lost record without a name.
        if tokens is None and {(TOKENS, key), ()} & self._lost_keys:
            return None
        return SampleTokens(n, sample, tuple(tokens or ()))

    def sensitivity(
        self, scope: str, layer: int | None, head: int | None, n: int, sample: int
    ) -> Sensitivity | None:
        """The token norms of one row."""
        key = json.dumps((scope, layer, head, n, sample))
        found = self.get(NORMS, key)
        return None if found is None else _sensitivity(key, found)

    def sensitivities(self) -> list[Sensitivity]:
        """All token norms, in an order independent of when they were written."""
        return sorted((_sensitivity(*record) for record in self.records(NORMS)), key=_place)

    def records(self, kind: str) -> list[tuple[str, Any]]:
        """(key, value) of all records of a kind, in the order in which they were written."""
        return [(key, value) for its, key, value in self._read(RECORDS) if its == kind]

    def all_records(self) -> list[Record]:
        """(kind, key, value) of every record, in the order in which they were written."""
        return self._read(RECORDS)

    def get(self, kind: str, key: str) -> Any:
        """The value of one record, or None if there is none."""
        with suppress(sqlite3.Error, UnicodeError):
            found = self._db.execute(
                "SELECT value, crc FROM records WHERE kind = ? AND key = ?", (kind, key)
            ).fetchone()
            if found is not None and RECORDS.is_intact((kind, key, *found)):
                return found[0]
        # It was never there, or it is lost, or only the index is damaged: look without it, once.
        if self._without_index is None:
            self._without_index = {record[:2]: record[2] for record in self._read(RECORDS)}
        return self._without_index.get((kind, key))

    @property
    def lost(self) -> list[str]:
        """What the reads so far have found to be lost, each in a few words."""
        return [name for names in self._lost.values() for name in names]

    def check(self) -> list[str]:
        """Read everything; what is lost, each in a few words."""
        for table in (ROWS, RECORDS):
            self._read(table)
        return self.lost

    def _read(self, table: Table) -> list[Record]:
        """The intact records of a table; what is lost is noted."""
        with database_errors(self.directory):
            found = patiently(lambda: read_table(self._db, table))
        names = [_name(table, key) for key in found.lost]
        self._lost_keys |= set(found.lost)
        if found.unknown:
            names.append(f"an unknown number of {table.name}")
        if found.only_index:
            names.append(f"the index of the {table.name}, but none of them")
        if names:
            self._lost[table.name] = names
        return found.intact

    def _prepare(self, info: StudyHeader, command: Command | None) -> None:
        """Create the tables of a new study, or check that the existing one is the same."""
        if self._db.execute("PRAGMA page_count").fetchone()[0] == 0:
            facts = {
                IDENTITY: json.dumps(asdict(info.identity)),
                ABOUT: json.dumps(asdict(info.about)),
                COMMANDS: _listed([] if command is None else [command]),
            }
            self._new = True
            with self._transaction():
                create_tables(self._db)
                self._put((INFO, name, fact) for name, fact in facts.items())
            return
        assert self.directory is not None
        require_study(self._db, self.directory)
        if not has_our_schema(self._db):
            self._lost["schema"] = ["the schema"]
        if self.lost or self.check():
            raise UserError(damage(self))
        require_same(self.info().identity, info.identity, self.directory)
        self.put(INFO, ABOUT, json.dumps(asdict(info.about)))
        if command is not None:
            self.add_commands([command])

    def _put(self, records: Iterable[Record]) -> None:
        for record in records:
            if not valid_record(record):
                raise ValueError(f"a study cannot hold this record: {record[0]} {record[1]}")
            self._db.execute(RECORDS.insert, (*record, record_checksum(record)))

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


def _listed(commands: Sequence[Command]) -> str:
    """The commands of a study as they are stored; raises UserError if there are too many."""
    listed = json.dumps([one.as_json() for one in commands])
    if not valid_record((INFO, COMMANDS, listed)):
        raise UserError(
            f"a study keeps at most {MOST_COMMANDS:,} commands, for at most {MOST_JOBS:,} jobs "
            "together; measure fewer lengths, samples or layers, or give another --out"
        )
    return listed


def content(store: Store) -> str:
    """How much a store holds, in two words: rows, or claims."""
    claims = len(store.records(CLAIM))
    return f"{claims} claims" if claims else f"{len(store.rows())} rows"


def damage(store: Store) -> str:
    """What has been found to be lost, in one sentence; empty if nothing has."""
    lost = store.lost
    if not lost:
        return ""
    named = "; ".join(lost[:3]) + (f"; and {len(lost) - 3} more" if len(lost) > 3 else "")
    return (
        f"{store.directory} is damaged: lost {named}; the rest is intact: "
        f"`lipscope doctor {store.directory} --repair` writes a copy of it"
    )


def _name(table: Table, key: Record) -> str:
    """A lost row or record, in a few words."""
    where = _parsed(key[1]) if len(key) == len(RECORDS.key) else None
    if len(key) == len(ROWS.key):
        what = key[0]
        where = key[1:6]
    elif key and key[0] == NORMS and isinstance(where, list) and len(where) == 5:
        what = NORMS
    else:
        return f"{key[0]} {key[1]}" if key else f"one of the {table.name}"
    scope, layer, head, n, sample = (None if x == -1 else x for x in where)
    place = "" if layer is None else f", layer {layer}" + ("" if head is None else f", head {head}")
    return f"{what} of {scope}{place}, n = {n}, sample {sample}"


def _place(record: Row | Sensitivity) -> tuple[Any, ...]:
    """What rows and token norms are sorted by; no layer and no head come first."""
    layer, head = (-1 if x is None else x for x in (record.layer, record.head))
    at = (record.scope, record.n, record.sample, layer, head)
    return (record.probe, record.kind, record.norm, *at) if isinstance(record, Row) else at


_FLOATS = ("value", "lower", "upper", "residual", "radius", "seconds")


def _stored(row: Row) -> Record:
    """A row as it is stored: NaN is NULL, "none" is -1, zeros have no sign, text is UTF-8."""
    stored: dict[str, Any] = {}
    for name, x in row._asdict().items():
        if name in _FLOATS:
            stored[name] = None if math.isnan(x) else float(x) + 0.0
        elif name == "extra":
            stored[name] = json.dumps(x)
        elif isinstance(x, str):
            stored[name] = x.encode("utf-8", "backslashreplace").decode()
        else:
            stored[name] = -1 if x is None else int(x)
    return tuple(stored.values())


def _row(record: Record) -> Row:
    found: dict[str, Any] = dict(zip(COLUMNS, record, strict=True))
    for name in ("layer", "head"):
        found[name] = None if found[name] == -1 else found[name]
    for name in _FLOATS:
        found[name] = math.nan if found[name] is None else found[name]
    found["extra"] = json.loads(found["extra"])
    return Row(**found)


def _sensitivity(key: str, blob: bytes) -> Sensitivity:
    """The token norms in a record."""
    scope, layer, head, n, sample = json.loads(key)
    norms = tuple(array("f", blob))
    return Sensitivity(
        scope=scope, layer=layer, head=head, n=n, sample=sample, right=norms[:n], left=norms[n:]
    )


def _parsed(text: Any) -> Any:
    """The JSON in a record; None if there is no record, or no JSON in it."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
