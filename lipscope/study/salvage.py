"""What is intact in the file of a study: checksums, checks of sense, and reads that salvage it.

A checksum is against accidents: a stranger can compute one for anything. So every row and record
also has to make sense, when it is written and whenever it is read; one that does not counts as
lost. The ranges bound the work of a reader by the size of the file: no read returns more than the
file can hold, or a row twice, even if its pages refer to each other in circles.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from lipscope._types import UserError
from lipscope.study.jobs import WHOLE_MODEL, Command
from lipscope.study.records import (
    BUDGET,
    FAILING,
    OBSERVED,
    WORST_CASE,
    Description,
    Fingerprint,
    well_typed,
)

INFO = "info"
TOKENS = "tokens"
NORMS = "token norms"
CLAIM = "claim"
"""Kinds of records: facts about the study, the tokens of a sample, the token norms of a row, and
what a claim of `lipscope reproduce` measured."""

IDENTITY = "identity"
ABOUT = "about"
COMMANDS = "commands"
"""Keys of facts."""

MOST_NAME = 1_000
MOST_TEXT = 100_000
"""Characters of a name, and of a status, a token or a command line."""

MOST_PLACES = 100_000
MOST_TOKENS = 2**31
MOST_SAMPLES = 2**53
"""Layers and heads of a model, tokens of a sample, samples of a length."""

MOST_COMMANDS = 1_000
MOST_JOBS = 1_000_000
"""Commands of a study, and jobs that they ask for together."""


def valid_row(record: tuple[Any, ...]) -> bool:
    """Whether a row, as it is stored, has the right types and ranges and no contradiction."""
    try:
        probe, scope, layer, head, n, sample, kind, norm, *rest = record
        value, lower, upper, residual, status, radius, dtype, device, seconds, *last = rest
        reason, extra = last
        if not (_is_text(extra, MOST_TEXT) and _is_extra(json.loads(extra))):
            return False
    except (ValueError, RecursionError):  # too few fields, no JSON, deep nesting
        return False
    return (
        all(_is_text(x, MOST_NAME) for x in (probe, scope, kind, norm, dtype, device))
        and _is_text(status, MOST_NAME)
        and _is_text(reason, MOST_TEXT)
        and _is_whole(layer, -1, MOST_PLACES)
        and _is_whole(head, -1, MOST_PLACES)
        and _is_whole(n, 1, MOST_TOKENS)
        and _is_whole(sample, 0, MOST_SAMPLES)
        and all(x is None or type(x) is float for x in (value, residual, radius, seconds))
        and type(lower) is type(upper) is float
        and not (math.isnan(lower) or math.isnan(upper))
        # NaN is stored as NULL.
        and (status in FAILING if value is None else lower <= value <= upper)
        and all(x is None or x >= 0 for x in (radius, seconds))
    )


def valid_record(record: tuple[Any, ...]) -> bool:
    """Whether a record (kind, key, value) is what its kind promises; unknown kinds are."""
    try:
        kind, key, value = record
        if not _is_text(kind, MOST_NAME) or not _is_text(key, MOST_TEXT):
            return False
        if not isinstance(value, str | bytes):
            return False
        check = _FACTS.get(key) if kind == INFO else _KINDS.get(kind)
        return check is None or check(key, value)
    # What JSON and the checks below say to nonsense: no JSON, deep nesting, huge integers.
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        return False


def parsed_commands(value: Any) -> list[Command]:
    """The commands of a record that passed `valid_record`, or of none."""
    return [Command.from_json(one) for one in json.loads(value)] if value else []


def _identity(key: str, value: str | bytes) -> bool:
    facts = json.loads(value)
    return (
        well_typed(Fingerprint, facts)
        and _texts(facts, MOST_NAME)
        and facts.get("tol", 0) >= 0
        and (facts.get("gap") is None or facts["gap"] >= 0)
        and _is_whole(facts.get("seed", 0), -(2**63), 2**64)
        and _is_whole(facts.get("numeric_version", 0), 0, 2**31)
    )


def _about(key: str, value: str | bytes) -> bool:
    facts = json.loads(value)
    counts = {"layers": MOST_PLACES, "heads": MOST_PLACES, "text_tokens": MOST_SAMPLES}
    tables = [facts.get(name, {}) for name in ("scopes", "versions")]
    return (
        well_typed(Description, facts)
        and _texts(facts, MOST_TEXT)
        and all(_is_whole(facts.get(name, 0), 0, most) for name, most in counts.items())
        and 0 <= facts.get("confidence", 0) <= 1
        and abs(facts.get("difference_to_eager", 0)) <= math.inf
        and _is_whole(facts.get("random_init") or 0, -(2**63), 2**64)
        and all(len(table) <= MOST_NAME for table in tables)
        and all(_is_text(x, MOST_TEXT) for table in tables for pair in table.items() for x in pair)
    )


def _texts(facts: dict[str, Any], most: int) -> bool:
    return all(len(x) <= most for x in facts.values() if isinstance(x, str))


@lru_cache(maxsize=2)  # a command reads this record several times, and it may be long
def _commands(key: str, value: str | bytes) -> bool:
    listed = json.loads(value)
    if not isinstance(listed, list) or len(listed) > MOST_COMMANDS:
        return False
    jobs = 0
    for one in listed:
        command = Command.from_json(one)
        asked = command.asked
        places = [*asked.layers, *asked.heads]
        heads = asked.heads.values()
        if not (
            _is_text(command.verb, MOST_NAME)
            and _is_text(command.line, MOST_TEXT)
            and _is_text(command.probe_prefix, MOST_TEXT)
            and all(_is_text(scope, MOST_NAME) for scope in asked.scopes)
            and all(_is_whole(x, 0, MOST_PLACES) for x in places)
            and all(_is_whole(head, 0, MOST_PLACES) for some in heads for head in some)
            and all(_is_whole(n, 1, MOST_TOKENS) for n, _ in asked.groups)
            and all(samples for _, samples in asked.groups)
            and all(_is_whole(s, 0, MOST_SAMPLES) for _, some in asked.groups for s in some)
            and all(
                len(set(some)) == len(some)
                for some in (asked.layers, asked.scopes, *heads, *(s for _, s in asked.groups))
            )
            and set(asked.layers) <= set(asked.heads)
        ):
            return False
        jobs += len(asked.groups) * (len(asked.layers) + 1)
    return jobs <= MOST_JOBS


def _tokens(key: str, value: str | bytes) -> bool:
    n, sample = json.loads(key)
    tokens = json.loads(value)
    return (
        _is_whole(n, 1, MOST_TOKENS)
        and _is_whole(sample, 0, MOST_SAMPLES)
        and type(tokens) is list
        and len(tokens) == n
        and all(_is_text(token, MOST_TEXT) for token in tokens)
    )


def _norms(key: str, value: str | bytes) -> bool:
    scope, layer, head, n, sample = json.loads(key)
    if not (
        _is_text(scope, MOST_NAME)
        and all(x is None or _is_whole(x, 0, MOST_PLACES) for x in (layer, head))
        and _is_whole(n, 1, MOST_TOKENS)
        and _is_whole(sample, 0, MOST_SAMPLES)
        and isinstance(value, bytes)
        and len(value) == 8 * n
    ):
        return False
    norms = array("f", value)
    # The sum is NaN if one of them is. Each list has norm 1, up to rounding.
    return min(norms) >= 0 and max(norms) <= 1.01 and math.isfinite(sum(norms))


def _budget(key: str, value: str | bytes) -> bool:
    metric, probes, embeddings, observe, seed, b, n, format = json.loads(key)
    part = json.loads(value)
    sites = part["sites"]
    products = part["q"]
    return (
        _is_text(metric, MOST_NAME)
        and _is_text(format, MOST_NAME)
        and type(embeddings) is type(observe) is type(part["summed"]) is bool
        and _is_whole(probes, 0, MOST_JOBS)
        and _is_whole(seed, -(2**63), 2**64)
        and _is_whole(b, 0, MOST_SAMPLES)
        and _is_whole(n, 1, MOST_TOKENS)
        and part["n"] == n
        and all(_is_site(*site) for site in sites)
        # One row per probe, one column per site.
        and len(products) == (probes if sites else 0)
        and all(len(row) == len(sites) and all(map(_is_number, row)) for row in products)
        and _is_square(part["size"])
        and (part["observed"] is None or _is_square(part["observed"]))
        and (part["curved"] is None or [_is_square(x) for x in part["curved"]] == [True, True])
    )


def _is_extra(extra: Any) -> bool:
    """Whether the extra of a row is an object, and what lipscope writes there has its type."""
    if type(extra) is not dict:
        return False
    refused = extra.get("not_offered", {})
    return (
        isinstance(extra.get("settings"), dict | None)
        and all(_is_text(extra.get(name, ""), MOST_TEXT) for name in ("detail", "format"))
        and _is_whole(extra.get("order", 0), 0, MOST_JOBS)
        and isinstance(refused, dict)
        and all(_is_text(why, MOST_TEXT) for why in refused.values())
    )


def _is_site(name: Any, layer: Any, kind: Any, head: Any) -> bool:
    return (
        _is_text(name, MOST_NAME)
        and _is_text(kind, MOST_NAME)
        and all(x is None or _is_whole(x, 0, MOST_PLACES) for x in (layer, head))
    )


def _worst_case(key: str, value: str | bytes) -> bool:
    metric, format = json.loads(key)
    names = _is_text(metric, MOST_NAME) and _is_text(format, MOST_NAME)
    return names and _is_number(json.loads(value))


def _claim(key: str, value: str | bytes) -> bool:
    record = json.loads(value)
    texts = [record.pop(name) for name in ("id", "device", "code", "version")]
    used = record.pop("used")
    numbers = record.pop("numbers")
    return (
        all(_is_text(text, MOST_NAME) for text in texts)
        and type(record.pop("quick")) is bool
        and _is_whole(record.pop("seed"), -(2**63), 2**64)
        and _is_number(record.pop("seconds"))
        and all(_is_text(x, MOST_NAME) for pair in used.items() for x in pair)
        and isinstance(numbers, dict)
        and not record
    )


_FACTS: dict[str, Callable[[str, str | bytes], bool]] = {
    IDENTITY: _identity,
    ABOUT: _about,
    COMMANDS: _commands,
}
_KINDS: dict[str, Callable[[str, str | bytes], bool]] = {
    TOKENS: _tokens,
    NORMS: _norms,
    BUDGET: _budget,
    WORST_CASE: _worst_case,
    CLAIM: _claim,
}


def _is_text(x: Any, most: int) -> bool:
    return isinstance(x, str) and len(x) <= most


def _is_whole(x: Any, least: int, most: int) -> bool:
    return type(x) is int and least <= x <= most


def _is_square(x: Any) -> bool:
    return _is_number(x) and not x < 0  # NaN where a run overflows


def _is_number(x: Any) -> bool:
    return type(x) is float or _is_whole(x, -(2**63), 2**63)


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


def copy_rows(old: sqlite3.Connection, new: sqlite3.Connection) -> None:
    """Copy everything from a study of schema 2 to an empty one; raises UserError if some is lost.

    The schema of the old one must have been compared with ours.
    """
    rows = read(old, ROWS_2)
    records = read(old, RECORDS)
    if rows.lost or rows.unknown or records.lost or records.unknown:
        raise UserError(
            "this study is damaged, and of an older schema (2), which cannot be repaired; export "
            "it with the lipscope that wrote it, or measure again"
        )
    marks = ", ".join("?" * ROWS.columns)
    new.executemany(
        f"INSERT OR REPLACE INTO rows VALUES ({marks})",
        [(*row, row_checksum(row)) for row in map(_converted, rows.intact)],
    )
    new.executemany(
        "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)",
        [(*record, record_checksum(record)) for record in records.intact],
    )


def _converted(record: Record) -> Record:
    """A row of schema 2 in today's form: the format was the scope, a share the residual."""
    probe, scope, *where, value, lower, upper, residual, status, radius, dtype, device, s = record
    extra = {}
    if probe in (BUDGET, OBSERVED, WORST_CASE):
        extra = {"format": scope}
        if residual is not None:
            extra["second_order"] = residual
        probe = f"{probe}: {scope}"
        scope = WHOLE_MODEL
        residual = None
    code, _, reason = status.partition(": ")
    numbers = (value, lower, upper, residual, code, radius, dtype, device, s)
    return (probe, scope, *where, *numbers, reason, json.dumps(extra))


def _valid(record: Record) -> bool:
    try:
        return valid_row(_converted(record))
    except (AttributeError, ValueError, TypeError):
        return False


ROWS_2 = ROWS._replace(columns=ROWS.columns - 2, valid=_valid)
