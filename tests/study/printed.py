"""What a study exports and shows, as text."""

from __future__ import annotations

import csv
import io

from rich.console import Console

from lipscope.report.study_table import summary
from lipscope.study.export import write_csv
from lipscope.study.records import COLUMNS
from lipscope.study.study import Study


def exported(study: Study) -> list[str]:
    """The CSV, timing aside."""
    out = io.StringIO()
    write_csv(study, out)
    seconds = COLUMNS.index("seconds")
    lines = csv.reader(io.StringIO(out.getvalue()))
    return [",".join(line[:seconds] + line[seconds + 1 :]) for line in lines]


def shown(study: Study) -> str:
    """The table, 80 columns wide."""
    out = io.StringIO()
    Console(file=out, width=80).print(summary(study))
    return out.getvalue()
