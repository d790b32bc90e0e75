"""Texts as they are given: a string, a file of prose, or one column of a table."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lipscope._checks import abbreviate
from lipscope._types import UserError


@dataclass(frozen=True)
class TextColumn:
    """One column of a table of texts, CSV, TSV or JSONL by the suffix.

    column: its name in the header line or in the records, or, in a CSV or TSV file without a header
            line, its number, from 1
    """

    path: Path
    column: str

    def read(self) -> str:
        """The texts of the column, one per line."""
        whole = read_file(self.path)
        try:
            cells = list(self._cells(whole))
        except UserError:
            raise
        except (csv.Error, ValueError, RecursionError) as error:
            raise UserError(f"{self.path} cannot be read as a table: {error}") from error
        # A text with line breaks of its own is still one text, on one line.
        return "\n".join(" ".join(cell.split()) for cell in cells)

    def _cells(self, whole: str) -> Iterator[str]:
        if self.path.suffix.lower() in (".jsonl", ".ndjson"):
            records = [json.loads(line) for line in whole.splitlines() if line.strip()]
            for number, record in enumerate(records, 1):
                if not isinstance(record, dict):
                    raise UserError(
                        f"{self.path}: record {number} is not a JSON object with columns, "
                        f"but {type(record).__name__}"
                    )
            found = {key: None for r in records for key in r}
            self._check(list(found))
            yield from (str(r[self.column]) for r in records if self.column in r)
            return
        delimiter = "\t" if self.path.suffix.lower() == ".tsv" else ","
        rows = csv.reader(io.StringIO(whole, newline=""), delimiter=delimiter)
        first = next(rows, [])
        number = int(self.column) if self.column.isdecimal() and len(self.column) < 9 else 0
        if 1 <= number <= len(first):
            # Digits are no name: the first line may hold them as the class of its text.
            yield first[number - 1]
            place = number - 1
        else:
            self._check(first)
            place = first.index(self.column)
        yield from (row[place] for row in rows if len(row) > place)

    def _check(self, columns: Sequence[str]) -> None:
        if self.column not in columns:
            listed = ", ".join(columns)[:200] or "none"
            raise UserError(
                f"{self.path} has no column {self.column!r}; its columns are {listed}; of a table "
                "without a header line, give the number of the column"
            )


def read_file(path: Path) -> str:
    """The text of a UTF-8 file, without the byte order mark that some editors write."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it first"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read the text {path}: {error.strerror}") from error


class Prose(str):
    """A string that is a text even if a file has this name, such as a line read from a file."""


def content(text: object) -> str:
    """Return the text, read from its file if need be.

    Raises:
        UserError: If a file cannot be read, or a string is the name of a file: it would be measured
            in place of the file, and the numbers would look plausible.
    """
    if isinstance(text, TextColumn):
        return text.read()
    if isinstance(text, Path):
        return read_file(text)
    if not isinstance(text, str):
        raise UserError(f"a text must be a string or a file (Path), got {abbreviate(text)}")
    # A directory is not a text that could be meant, and its name ("data", ".") may well be one.
    # os.path.exists is False for strings that cannot be paths: too long, or with NUL characters.
    if not isinstance(text, Prose) and os.path.exists(text) and not os.path.isdir(text):
        raise UserError(
            f"the text {abbreviate(text)} is the name of a file; give Path({abbreviate(text)}) to "
            "read the "
            "file, or add a line break to use the name as a text"
        )
    return text
