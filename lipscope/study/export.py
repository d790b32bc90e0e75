"""Export studies to CSV, with floats that read back exactly, and to Parquet."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lipscope._files import for_spreadsheet, for_terminal, whole_file
from lipscope._types import UserError
from lipscope.study.growth import METHOD
from lipscope.study.records import COLUMNS
from lipscope.study.study import SUBJECT_COLUMNS, Study


@runtime_checkable
class Writable(Protocol):
    """An open text file."""

    def write(self, text: str, /) -> object: ...


TOKEN_COLUMNS = ("scope", "layer", "head", "n", "sample", "position", "token", "right", "left")


def records(
    study: Study, tokens: bool = False
) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
    """Column names and records: the rows, or the tokens with both their norms; what was measured.

    Text is untrusted, and may hold what UTF-8 cannot: that is escaped.
    """
    columns: tuple[str, ...] = TOKEN_COLUMNS if tokens else COLUMNS
    found = study.token_records() if tokens else (row.flat() for row in study.rows)
    encodable = cache(lambda text: text.encode("utf-8", "backslashreplace").decode())
    whole = ((*record, *study.subject) for record in found)
    return (*columns, *SUBJECT_COLUMNS), (
        tuple(encodable(x) if isinstance(x, str) else x for x in record) for record in whole
    )


def write_csv(study: Study, file: Writable, tokens: bool = False) -> None:
    """Write CSV in a fixed order; every float reads back as the same number.

    Text that a spreadsheet would run, or that would drive a terminal it is written to, is escaped.
    """
    columns, found = records(study, tokens)
    terminal = getattr(file, "isatty", bool)()
    harmless = cache(
        lambda text: for_terminal(for_spreadsheet(text)) if terminal else for_spreadsheet(text)
    )
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([harmless(x) if isinstance(x, str) else x for x in record] for record in found)


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
    whole = ("layer", "head", "n", "sample", "position")
    numbers = ("value", "lower", "upper", "residual", "radius", "seconds", "right", "left")
    kinds = dict.fromkeys(whole, pa.int64()) | dict.fromkeys(numbers, pa.float64())
    kept = list(zip(*found, strict=True)) or [()] * len(columns)
    arrays = [
        pa.array(values, kinds.get(name, pa.string()))
        for name, values in zip(columns, kept, strict=True)
    ]
    pq.write_table(pa.Table.from_arrays(arrays, names=list(columns)), path)


def write_file(study: Study, path: Path, kind: str, tokens: bool = False) -> None:
    """Write a file atomically, as CSV or Parquet."""
    with whole_file(path, typed=True) as draft:
        if kind == "parquet":
            write_parquet(study, draft, tokens)
        else:
            with draft.open("w", encoding="utf-8", newline="") as file:
                write_csv(study, file, tokens)


def as_dict(study: Study) -> dict[str, Any]:
    """The study as JSON-compatible data; NaN and infinities become null."""
    peak: dict[str, Any] | None = None
    if study.sigma:
        row = study.peak()
        peak = {**row._asdict(), "tokens": []}
        with suppress(UserError):  # the study has no token norms, or they are lost
            peak["tokens"] = [token._asdict() for token in study.tokens_of(row)]
    return finite(
        {
            "identity": asdict(study.info.identity),
            "about": asdict(study.info.about),
            "growth_method": METHOD,
            "growth": [asdict(law) for at in study.maps if (law := study.law(*at)) is not None],
            "radius": [
                {"scope": scope, "layer": layer, "R": study.radius(scope, layer)}
                for scope, layer in study.maps
            ],
            "most_sensitive": peak,
            "commands": study.commands,
            "jobs": study.jobs._asdict(),
            "failed": len(study.failed),
            "joint_confidence": study.joint_confidence,
            "rows": [row._asdict() for row in study.rows],
        }
    )


def finite(value: Any) -> Any:
    """The same data with NaN and infinities as null, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
