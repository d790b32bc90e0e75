"""Read studies of schema 2, which had no reason and no extra: a copy in memory, as of today."""

from __future__ import annotations

import json
import sqlite3

from lipscope._types import UserError
from lipscope.study.jobs import WHOLE_MODEL
from lipscope.study.records import BUDGET, OBSERVED, WORST_CASE
from lipscope.study.salvage import RECORDS, ROWS, Record, read, record_checksum, row_checksum
from lipscope.study.validation import valid_row


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
