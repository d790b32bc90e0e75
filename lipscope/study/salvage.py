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
from lipscope.study.records import BUDGET, COLUMNS, FAILING, OBSERVED, WORST_CASE

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

MOST_PLACES = 100_000
MOST_TOKENS = 2**31
MOST_COMMANDS = 1_000
MOST_JOBS = 1_000_000
"""Layers and heads of a model, tokens of a sample, commands of a study, and jobs that they ask for
together."""

Record = tuple[Any, ...]

# A form is a number for a text of at most so many characters, a range for integers, a type, a list
# for lists of one form, a tuple for a list of several, a dict for an object, or a function. Keys
# that an object lacks, or that the form does not have, are right.
_NAME = 1_000
_TEXT = 100_000
_PLACE = range(MOST_PLACES + 1)
_LENGTH = range(1, MOST_TOKENS + 1)
_COUNT = range(2**53 + 1)
_SEED = range(-(2**63), 2**64 + 1)


def _fits(x: Any, form: Any) -> bool:
    """Whether what JSON or SQLite holds has a form."""
    if isinstance(form, int):
        return isinstance(x, str) and len(x) <= form
    if isinstance(form, range):
        return type(x) is int and x in form
    if isinstance(form, type):
        return type(x) is form
    if isinstance(form, list):
        return isinstance(x, list) and all(_fits(one, form[0]) for one in x)
    if isinstance(form, tuple):
        return isinstance(x, list) and len(x) == len(form) and all(map(_fits, x, form))
    if isinstance(form, dict):
        return type(x) is dict and all(_fits(x[key], form[key]) for key in form if key in x)
    return bool(form(x))


def _maybe(form: Any) -> Callable[[Any], bool]:
    return lambda x: x is None or _fits(x, form)


def _table(most: int) -> Callable[[Any], bool]:
    """The form of an object whose keys and values are texts."""
    return lambda x: (
        type(x) is dict
        and len(x) <= _NAME
        and all(_fits(text, most) for pair in x.items() for text in pair)
    )


def _is_number(x: Any) -> bool:
    return type(x) is float or _fits(x, range(-(2**63), 2**63 + 1))


def _is_size(x: Any) -> bool:
    return type(x) in (int, float) and x >= 0


def _is_square(x: Any) -> bool:
    return _is_number(x) and not x < 0  # NaN where a run overflows


_IDENTITY = {
    **dict.fromkeys(("weights", "config", "revision", "tokenizer", "text", "dtype", "mask"), _NAME),
    "special_tokens": bool,
    "tol": _is_size,
    "seed": _SEED,
    "numeric_version": range(2**31 + 1),
    "gap": _maybe(_is_size),
}
_ABOUT = {
    **dict.fromkeys(("model", "architecture", "device", "text", "command"), _TEXT),
    "layers": _PLACE,
    "heads": _PLACE,
    "text_tokens": _COUNT,
    "scopes": _table(_TEXT),
    "versions": _table(_TEXT),
    "difference_to_eager": lambda x: type(x) in (int, float) and abs(x) <= math.inf,
    "confidence": lambda x: type(x) in (int, float) and 0 <= x <= 1,
    "random_init": _maybe(_SEED),
}
_COMMAND = {
    "verb": _NAME,
    "line": _TEXT,
    "probe": _TEXT,
    "asked": {
        "groups": [(_LENGTH, [_COUNT])],
        "layers": [_PLACE],
        "heads": [(_PLACE, [_PLACE])],
        "scopes": [_NAME],
    },
}
_ROW = {
    **dict.fromkeys(("probe", "scope", "kind", "norm", "status", "dtype", "device"), _NAME),
    "layer": range(-1, MOST_PLACES + 1),
    "head": range(-1, MOST_PLACES + 1),
    "n": _LENGTH,
    "sample": _COUNT,
    **dict.fromkeys(("value", "residual"), _maybe(float)),
    **dict.fromkeys(("radius", "seconds"), _maybe(lambda x: type(x) is float and x >= 0)),
    **dict.fromkeys(("lower", "upper"), lambda x: type(x) is float and not math.isnan(x)),
    "reason": _TEXT,
    "extra": {
        "settings": _maybe(dict),
        "detail": _TEXT,
        "format": _TEXT,
        "order": range(MOST_JOBS + 1),
        "not_offered": lambda x: type(x) is dict and _fits(list(x.values()), [_TEXT]),
    },
}
_SITE = (_NAME, _maybe(_PLACE), _NAME, _maybe(_PLACE))
_PART = {
    "n": _LENGTH,
    "summed": bool,
    "sites": [_SITE],
    "q": [[_is_number]],
    "size": _is_square,
    "observed": _maybe(_is_square),
    "curved": _maybe((_is_square, _is_square)),
}
_NORMS_AT = (_NAME, _maybe(_PLACE), _maybe(_PLACE), _LENGTH, _COUNT)
_BUDGET_AT = (_NAME, range(MOST_JOBS + 1), bool, bool, _SEED, _COUNT, _LENGTH, _NAME)
_CLAIM = {
    **dict.fromkeys(("id", "device", "code", "version"), _NAME),
    "used": _table(_NAME),
    "numbers": dict,
    "quick": bool,
    "seed": _SEED,
    "seconds": _is_number,
}


def valid_row(record: Record) -> bool:
    """Whether a row, as it is stored, has the right types and ranges and no contradiction."""
    try:
        row = dict(zip(COLUMNS, record, strict=True))
        row["extra"] = json.loads(row["extra"]) if _fits(row["extra"], _TEXT) else None
    except (ValueError, RecursionError):  # too few fields, no JSON, deep nesting
        return False
    if not _fits(row, _ROW):
        return False
    # NaN is stored as NULL.
    if row["value"] is None:
        return row["status"] in FAILING
    return bool(row["lower"] <= row["value"] <= row["upper"])


def valid_record(record: Record) -> bool:
    """Whether a record (kind, key, value) is what its kind promises; unknown kinds are."""
    try:
        kind, key, value = record
        if not _fits(kind, _NAME) or not _fits(key, _TEXT) or not isinstance(value, str | bytes):
            return False
        check = _FACTS.get(key) if kind == INFO else _KINDS.get(kind)
        return check is None or check(key, value)
    # What JSON and the checks below say to nonsense: no JSON, deep nesting, huge integers.
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        return False


@lru_cache(maxsize=2)  # a command reads this record several times, and it may be long
def _commands(key: str, value: str | bytes) -> bool:
    listed = json.loads(value)
    if not isinstance(listed, list) or len(listed) > MOST_COMMANDS or not _fits(listed, [_COMMAND]):
        return False
    jobs = 0
    for one in listed:
        asked = Command.from_json(one).asked
        samples = [some for _, some in asked.groups]
        lists = (asked.layers, asked.scopes, *asked.heads.values(), *samples)
        if not all(samples) or any(len(set(some)) < len(some) for some in lists):
            return False
        if not set(asked.layers) <= set(asked.heads):
            return False
        jobs += len(asked.groups) * (len(asked.layers) + 1)
    return jobs <= MOST_JOBS


def _tokens(key: str, value: str | bytes) -> bool:
    where = json.loads(key)
    tokens = json.loads(value)
    return _fits(where, (_LENGTH, _COUNT)) and _fits(tokens, [_TEXT]) and len(tokens) == where[0]


def _norms(key: str, value: str | bytes) -> bool:
    where = json.loads(key)
    if not _fits(where, _NORMS_AT):
        return False
    if not isinstance(value, bytes) or len(value) != 8 * where[3]:
        return False
    norms = array("f", value)
    # The sum is NaN if one of them is. Each list has norm 1, up to rounding.
    return min(norms) >= 0 and max(norms) <= 1.01 and math.isfinite(sum(norms))


def _budget(key: str, value: str | bytes) -> bool:
    where = json.loads(key)
    part = json.loads(value)
    if not (_fits(where, _BUDGET_AT) and _fits(part, _PART) and part.keys() >= _PART.keys()):
        return False
    # One row per probe, one column per site.
    sites = len(part["sites"])
    rows = where[1] if sites else 0
    products = part["q"]
    return part["n"] == where[6] and len(products) == rows and {*map(len, products)} <= {sites}


def _worst_case(key: str, value: str | bytes) -> bool:
    return _fits(json.loads(key), (_NAME, _NAME)) and _is_number(json.loads(value))


def _claim(key: str, value: str | bytes) -> bool:
    record = json.loads(value)
    return _fits(record, _CLAIM) and record.keys() == _CLAIM.keys()


_FACTS: dict[str, Callable[[str, str | bytes], bool]] = {
    IDENTITY: lambda key, value: _fits(json.loads(value), _IDENTITY),
    ABOUT: lambda key, value: _fits(json.loads(value), _ABOUT),
    COMMANDS: _commands,
}
_KINDS: dict[str, Callable[[str, str | bytes], bool]] = {
    TOKENS: _tokens,
    NORMS: _norms,
    BUDGET: _budget,
    WORST_CASE: _worst_case,
    CLAIM: _claim,
}

# What SQLite reports when its surroundings fail: locked, read-only, interrupted, I/O, full, cannot
# open, permissions. Any other error of a fixed SELECT comes from the content of the file.
_NOT_DAMAGE = (3, 5, 6, 8, 9, 10, 13, 14, 23)
_SHORT_READ = 522

_TEXTS = [i for i, name in enumerate(COLUMNS[:17]) if _ROW[name] == _NAME]
_NUMERIC = [i for i in range(17) if i not in _TEXTS]
_NUMBERS = struct.Struct("<4q6d")


def row_checksum(record: Record) -> int:
    """CRC-32 of a row as it is stored, without the checksum; -1 if a type is wrong.

    The nine texts as UTF-8, joined by NUL; then layer, head, n, sample as 64-bit integers and
    value, lower, upper, residual, radius, seconds as doubles, little-endian, NaN where NULL.
    """
    try:
        words = (*(record[i] for i in _TEXTS), *record[17:])
        numbers = (math.nan if record[i] is None else record[i] for i in _NUMERIC)
        return zlib.crc32(_NUMBERS.pack(*numbers), zlib.crc32("\0".join(words).encode()))
    except (IndexError, TypeError, ValueError, OverflowError, struct.error):
        return -1


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

    @property
    def insert(self) -> str:
        """A statement that stores a record, and replaces one with the same key."""
        return f"INSERT OR REPLACE INTO {self.name} VALUES ({', '.join('?' * self.columns)})"

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
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
        self._left = pages * size

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
    keys = dict[int, Record]()
    rows = dict[int, Record]()
    columns = ", ".join(table.key)
    by_key = f"SELECT rowid, {columns} FROM {table.name} INDEXED BY {table.name}_key"
    # Each query reads the same rows once more, and so counts them from the beginning.
    index_read = _read_into(keys, _Limit(db), f"{by_key} ORDER BY {columns}")
    table_read = _read_into(rows, _Limit(db), table.scan(" ORDER BY rowid"))
    limit = _Limit(db)
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
    today = map(_converted, rows.intact)
    new.executemany(ROWS.insert, [(*row, row_checksum(row)) for row in today])
    kept = [(*record, record_checksum(record)) for record in records.intact]
    new.executemany(RECORDS.insert, kept)


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
