"""Studies as files: CSV that reads back to the same numbers, and Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from lipscope._types import UserError
from lipscope.study.printable import for_spreadsheet
from lipscope.study.records import COLUMNS
from lipscope.study.study import Study

TOKEN_COLUMNS = ("scope", "layer", "head", "n", "sample", "position", "token", "right", "left")


def records(study: Study, tokens: bool = False) -> tuple[tuple[str, ...], Iterable[tuple[Any, ...]]]:
    """Column names and records: the rows, or the tokens with both their norms."""
    return (TOKEN_COLUMNS, study.token_records()) if tokens else (COLUMNS, study.rows)


def write_csv(study: Study, file: TextIO, tokens: bool = False) -> None:
    """CSV in a fixed order; every float is written so that it reads back as itself."""
    columns, found = records(study, tokens)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(_quoted(found) if tokens else found)


def write_parquet(study: Study, path: Path, tokens: bool = False) -> None:
    """Parquet with typed columns; tokens stand there as they are."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError("--parquet needs pyarrow; install it with: pip install 'lipscope[data]'") from error
    columns, found = records(study, tokens)
    names = {
        "layer": pa.int64(),
        "head": pa.int64(),
        "n": pa.int64(),
        "sample": pa.int64(),
        "position": pa.int64(),
    }
    text = ("probe", "scope", "kind", "norm", "status", "dtype", "device", "token")
    kept = list(zip(*found, strict=True)) or [()] * len(columns)
    arrays = [
        pa.array(values, pa.string() if name in text else names.get(name, pa.float64()))
        for name, values in zip(columns, kept, strict=True)
    ]
    pq.write_table(pa.Table.from_arrays(arrays, names=list(columns)), path)


def _quoted(found: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    token = TOKEN_COLUMNS.index("token")
    return ((*record[:token], for_spreadsheet(record[token]), *record[token + 1 :]) for record in found)
