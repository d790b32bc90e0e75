"""Export studies to CSV, with floats that read back exactly, and to Parquet."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lipscope._files import for_spreadsheet, whole_file
from lipscope._types import UserError
from lipscope.study.growth import METHOD
from lipscope.study.records import COLUMNS
from lipscope.study.study import Study


@runtime_checkable
class Writable(Protocol):
    """An open text file."""

    def write(self, text: str, /) -> object: ...


TOKEN_COLUMNS = ("scope", "layer", "head", "n", "sample", "position", "token", "right", "left")


def records(
    study: Study, tokens: bool = False
) -> tuple[tuple[str, ...], Iterable[tuple[Any, ...]]]:
    """Column names and records: the rows, or the tokens with both their norms."""
    return (TOKEN_COLUMNS, study.token_records()) if tokens else (COLUMNS, study.rows)


def write_csv(study: Study, file: Writable, tokens: bool = False) -> None:
    """Write CSV in a fixed order; every float reads back as the same number."""
    columns, found = records(study, tokens)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(_quoted(found) if tokens else found)


def write_parquet(study: Study, path: Path, tokens: bool = False) -> None:
    """Write Parquet with typed columns; tokens are not escaped."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(
            "--parquet needs pyarrow; install it with: pip install 'lipscope[data]'"
        ) from error
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


def write_file(study: Study, path: Path, kind: str, tokens: bool = False) -> None:
    """Write a file atomically, as CSV or Parquet."""
    with whole_file(path) as draft:
        if kind == "parquet":
            write_parquet(study, draft, tokens)
        else:
            with draft.open("w", encoding="utf-8", newline="") as file:
                write_csv(study, file, tokens)


def as_dict(study: Study) -> dict[str, Any]:
    """The study as JSON-compatible data; NaN and infinities become null."""
    return _finite(
        {
            "identity": asdict(study.info.identity),
            "about": asdict(study.info.about),
            "growth_method": METHOD,
            "growth": [asdict(law) for at in study.maps if (law := study.law(*at)) is not None],
            "radius": [
                {"scope": scope, "layer": layer, "R": study.radius(scope, layer)}
                for scope, layer in study.maps
            ],
            "most_sensitive": _most_sensitive(study) if study.sigma else None,
            "failed": len(study.failed),
            "joint_confidence": study.joint_confidence,
            "rows": [row._asdict() for row in study.rows],
        }
    )


def _most_sensitive(study: Study) -> dict[str, Any]:
    row = study.peak()
    return {**row._asdict(), "tokens": [token._asdict() for token in study.tokens_of(row)]}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _quoted(found: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    # Tokens are untrusted text: a spreadsheet would run one that starts with "=".
    token = TOKEN_COLUMNS.index("token")
    return (
        (*record[:token], for_spreadsheet(record[token]), *record[token + 1 :]) for record in found
    )
