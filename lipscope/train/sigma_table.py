"""The CSV file of a monitor's readings: appended to step by step, and resumed after a crash."""

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

    sigma:    ||J v|| / ||v|| at the vector found: a lower bound of ||D_X f||_2 (up to rounding);
              NaN if there is none
    residual: ||J' u - sigma v|| / sigma: how far that vector is from a singular vector
    tokens:   number of tokens the layer was measured at, without padding that attention ignores
    products: number of pairs of products with J and J'
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
    """One line per reading; the file is closed after every step.

    A step that is measured again replaces its own rows and those of all later steps.

    last: the last step in the file, -1 if there is none
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise UserError(f"the folder of {self.path} does not exist; create it first")
        if self.path.is_dir():
            raise UserError(f"{self.path} is a folder; give the path of a CSV file")
        rows = self._rows() if self.path.exists() else []
        self.last = max((int(row[0]) for row in rows), default=-1)

    def write(self, readings: Sequence[Reading]) -> int:
        """Append the readings of one step; return the number of rows they replaced."""
        if not readings:
            return 0
        step = readings[0].step
        replaced = 0
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
        """The complete lines of the file; a last line cut short by a crash is ignored."""
        foreign = (
            f"{self.path} was not written by a SmoothnessMonitor; "
            "choose another file, or move it away"
        )
        try:
            text = self.path.read_text(encoding="utf-8")
            if not text:
                return []
            lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{foreign} ({error})") from error
        header = (lines or [[]])[0]
        rows = lines[1:]
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
        """Replace the file by the header and these rows, atomically."""
        with (
            whole_file(self.path, typed=True) as draft,
            open(draft, "w", newline="", encoding="utf-8") as file,
        ):
            csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])
