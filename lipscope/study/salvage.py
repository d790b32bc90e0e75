"""Checksums of what a study stores, and reads that keep what is intact and name what is lost.

An intact row or record has the right checksum and makes sense (`lipscope.study.validation`). No
read returns more than the file can hold, or a row twice, even if its pages refer to each other in
circles.
"""

from __future__ import annotations

import math
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lipscope.study.validation import valid_record, valid_row

Record = tuple[Any, ...]

# What SQLite reports when its surroundings fail: locked, read-only, interrupted, I/O, full, cannot
# open, permissions. Any other error of a fixed SELECT comes from the content of the file.
_NOT_DAMAGE = (3, 5, 6, 8, 9, 10, 13, 14, 23)
_SHORT_READ = 522

_SIZES = ("page_count", "page_size")

_NUMBERS = struct.Struct("<4q6d")


def row_checksum(record: Record) -> int:
    """CRC-32 of a row as it is stored, without the checksum; -1 if a type is wrong.

    The nine texts as UTF-8, joined by NUL; then layer, head, n, sample as 64-bit integers and
    value, lower, upper, residual, radius, seconds as doubles, little-endian, NaN where NULL.
    """
    try:
        probe, scope, layer, head, n, sample, kind, norm, *rest = record
        value, lower, upper, residual, status, radius, dtype, device, seconds, *last = rest
        words = (probe, scope, kind, norm, status, dtype, device, *last)
        texts = zlib.crc32("\0".join(words).encode())
        numbers = _NUMBERS.pack(
            layer,
            head,
            n,
            sample,
            math.nan if value is None else value,
            lower,
            upper,
            math.nan if residual is None else residual,
            math.nan if radius is None else radius,
            math.nan if seconds is None else seconds,
        )
    except (TypeError, ValueError, OverflowError, struct.error):
        return -1
    return zlib.crc32(numbers, texts)


def record_checksum(record: Record) -> int:
    """CRC-32 of kind, key and value, joined by NUL; -1 if a type is wrong."""
    try:
        kind, key, value = record
        content = value.encode() if isinstance(value, str) else bytes(memoryview(value))
        return zlib.crc32(b"\0".join((kind.encode(), key.encode(), content)))
    except (AttributeError, TypeError, ValueError):
        return -1


class Table(NamedTuple):
    """A table whose last column is a checksum, and whose index NAME_key holds every key again.

    key:     the first columns, which no two records share
    columns: the number of columns
    """

    name: str
    key: tuple[str, ...]
    columns: int
    checksum: Callable[[Record], int]
    valid: Callable[[Record], bool]

    def is_intact(self, row: Record) -> bool:
        """Whether a row, checksum included, is as lipscope wrote it and makes sense."""
        return self.checksum(row[:-1]) == row[-1] and self.valid(row[:-1])

    def scan(self, order: str = "") -> str:
        """A query for rowids and records that takes no column by name: names may be damaged too."""
        names = ", ".join(f"c{i}" for i in range(self.columns + 1))
        inner = f"SELECT rowid, * FROM {self.name} NOT INDEXED{order}"
        return f"WITH found({names}) AS ({inner}) SELECT * FROM found"


ROWS = Table(
    name="rows",
    key=("probe", "scope", "layer", "head", "n", "sample", "kind", "norm"),
    columns=20,
    checksum=row_checksum,
    valid=valid_row,
)
RECORDS = Table(
    name="records", key=("kind", "key"), columns=4, checksum=record_checksum, valid=valid_record
)


class Found(NamedTuple):
    """The intact records of a table, in the order they were written, and what is lost.

    lost:       the keys of lost records; () for one that cannot be named
    unknown:    whether more may be lost: neither the table nor its index can be read through
    only_index: whether only the index is damaged
    """

    intact: list[Record]
    lost: list[Record]
    unknown: bool = False
    only_index: bool = False


def read(db: sqlite3.Connection, table: Table) -> Found:
    """All records of a table, each verified."""
    try:
        with _snapshot(db):
            limit = _Limit(db)
            rows = [row[1:] for row in limit.read(table.scan())]
            (keys,) = db.execute(
                f"SELECT count(*) FROM (SELECT 1 FROM {table.name} INDEXED BY {table.name}_key "
                f"LIMIT {len(rows) + 1})"
            ).fetchone()
        intact = [row[:-1] for row in rows if table.is_intact(row)]
        if len(rows) == len(intact) == keys:
            return Found(intact, [])
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
    except (MemoryError, UnicodeError):  # a damaged length, a damaged name
        pass
    with _snapshot(db):
        return _salvage(db, table)


class _TooMuchError(sqlite3.DatabaseError):
    """A query returned more than the file can hold, or a row for the second time."""


class _Limit:
    """How much a file can give: every row of a query takes some of its bytes."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        pages, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in _SIZES)
        self._left = self._whole = pages * size

    def again(self) -> _Limit:
        """Begin to count again, for a query that reads the same rows once more."""
        self._left = self._whole
        return self

    def read(self, query: str) -> Iterator[Record]:
        """Run a query whose first column is the rowid.

        The error after too many bytes counts as damage, like SQLite's own, and so does a row that
        comes again: some pages are children of several others, or of themselves.
        """
        seen = set[int]()
        for row in self._db.execute(query):
            if row[0] in seen:
                raise _TooMuchError("a row of this file comes twice")
            seen.add(row[0])
            # The least size of a row in a page, and its texts and blobs, which are stored as such.
            self._left -= 8 + sum(len(x) for x in row if type(x) is str or type(x) is bytes)
            if self._left < 0:
                raise _TooMuchError("there is more in this file than it can hold")
            yield row


@contextmanager
def _snapshot(db: sqlite3.Connection) -> Iterator[None]:
    """See one state of the file, whatever a writer does meanwhile."""
    if db.in_transaction:
        yield
        return
    db.execute("BEGIN")
    try:
        yield
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error of SQLite comes from the content of the file, not from its surroundings."""
    code = getattr(error, "sqlite_errorcode", 1)
    return code == _SHORT_READ or code & 0xFF not in _NOT_DAMAGE


def _salvage(db: sqlite3.Connection, table: Table) -> Found:
    """Read a damaged table up to the damage, then row by row what its index names."""
    # Damaged text must not stop a read; its checksum will not match.
    db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    width = len(table.key)
    limit = _Limit(db)
    keys = dict[int, Record]()
    rows = dict[int, Record]()
    columns = ", ".join(table.key)
    by_key = f"SELECT rowid, {columns} FROM {table.name} INDEXED BY {table.name}_key"
    index_read = _read_into(keys, limit, f"{by_key} ORDER BY {columns}")
    table_read = _read_into(rows, limit.again(), table.scan(" ORDER BY rowid"))
    limit.again()
    for missing in keys.keys() - rows.keys():
        _read_into(rows, limit, table.scan(f" WHERE rowid = {missing}"))
    db.text_factory = str
    good = {
        rowid: row[:-1]
        for rowid, row in sorted(rows.items())
        if len(row) > width and table.is_intact(row)
    }
    intact = {row[:width]: row for row in good.values()}
    # The rowid tells a lost row from an index entry that names an intact one wrongly.
    lost = [k for rowid, k in sorted(keys.items()) if rowid not in good and k not in intact]
    lost += [() for rowid in rows if rowid not in good and rowid not in keys]
    unknown = not index_read and not table_read
    only_index = not lost and not unknown
    return Found(list(intact.values()), lost, unknown=unknown, only_index=only_index)


def _read_into(found: dict[int, Record], limit: _Limit, query: str) -> bool:
    """Collect the records of a query by rowid, up to the first damage; whether there was none."""
    try:
        for rowid, *record in limit.read(query):
            found.setdefault(rowid, tuple(record))
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return False
    except (MemoryError, UnicodeError):
        return False
    return True
