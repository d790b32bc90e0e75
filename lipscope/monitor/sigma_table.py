"""The CSV file in which a monitor writes what it measured: appended to, and picked up again after a kill."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from lipscope._files import whole_file
from lipscope._types import UserError


@dataclass(frozen=True)
class Reading:
    """The local constant of one layer at one step.

    sigma:    ||J v|| / ||v|| of the vector found: a lower bound of ||D_X f||_2 (up to rounding); NaN if there is none
    residual: ||J' u - sigma v|| / sigma: how far that vector is from a singular one
    tokens:   how many tokens the layer was measured at, those that nn.MultiheadAttention was told are padding apart
    products: how often J and J' were applied, in pairs
    status:   how the solve ended, or why there is no number
    """

    step: int
    layer: str
    sigma: float
    residual: float
    tokens: int
    products: int
    status: str


HEADER = [field.name for field in fields(Reading)]


class SigmaTable:
    """One line a reading, closed after every step. A step that is measured again replaces itself and all after it.

    last: the last step in the file, -1 if there is none
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise UserError(f"the folder of {self.path} does not exist; make it first")
        if self.path.is_dir():
            raise UserError(f"{self.path} is a folder; name a file for the CSV")
        rows = self._rows() if self.path.exists() else []
        self.last = max((int(row[0]) for row in rows), default=-1)

    def write(self, readings: Sequence[Reading]) -> int:
        """Append the readings of one step; how many lines gave way to it."""
        if not readings:
            return 0
        step, replaced = readings[0].step, 0
        if not self.path.exists():
            self._replace([])
        elif step <= self.last or not self._ends_well():
            rows = self._rows()
            kept = [row for row in rows if int(row[0]) < step]
            replaced = len(rows) - len(kept)
            self._replace(kept)
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(
                astuple(reading) for reading in readings
            )
        self.last = step
        return replaced

    def _rows(self) -> list[list[str]]:
        """The whole lines of the file; one torn by a kill does not count."""
        foreign = (
            f"{self.path} is no table of a SmoothnessMonitor; choose another file, or move it away"
        )
        try:
            text = self.path.read_text(encoding="utf-8")
            if not text:
                return []
            lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{foreign} ({error})") from error
        header, rows = (lines or [[]])[0], lines[1:]
        if header != HEADER or any(
            len(row) != len(HEADER) or not row[0].isdecimal() for row in rows
        ):
            raise UserError(foreign)
        return rows

    def _ends_well(self) -> bool:
        with open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def _replace(self, rows: Iterable[Sequence[str]]) -> None:
        """The header and these rows in place of what was there: all of it or nothing."""
        with whole_file(self.path) as draft, open(draft, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])
