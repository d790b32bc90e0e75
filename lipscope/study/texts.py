"""Texts as they lie on disk: prose, or one column of a table; and whether a model knows them."""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lipscope._types import UserError
from lipscope.models.model import Model

MANY_UNKNOWN = 0.05
"""Share of unknown tokens above which a text is not what the model was made for."""


class TextWarning(UserWarning):
    """A text that can be measured, but hardly as its owner means it."""


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


def content(text: str | Path | TextColumn) -> str:
    """The text itself, wherever it is."""
    if isinstance(text, str):
        return text
    return text.read() if isinstance(text, TextColumn) else read_file(text)


def warn_of_unknown(model: Model, ids: Sequence[int]) -> None:
    """Warn if many tokens of a text are unknown to the tokenizer: the numbers say little then."""
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    count = 0 if unknown is None else ids.count(unknown)
    if count > MANY_UNKNOWN * len(ids):
        warnings.warn(
            f"{count} of {len(ids)} tokens are unknown to the tokenizer; does it belong to "
            f"{model.card.name}, and does it know the language of this text?",
            TextWarning,
            stacklevel=2,
        )
