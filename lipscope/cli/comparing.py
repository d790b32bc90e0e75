"""The command `compare`: any number of studies in one table and on one page."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from lipscope.cli.options import AsJson, Quiet
from lipscope.cli.terminal import ExitCode, show_json, show_table, tell

PAGE = Path("comparison.html")


def compare(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Directories that `measure --out` wrote."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Page to write.", show_default=str(PAGE))
    ] = PAGE,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare studies: what differs, how sigma grows in each, and where they part most."""
    from lipscope.report.comparison import compare as find
    from lipscope.report.comparison import comparison_table, digest
    from lipscope.report.comparison_page import MOST, comparison_html
    from lipscope.report.document import write
    from lipscope.study.study import DamageWarning, Study

    # Damage is told once, at the end, with its exit code.
    warnings.simplefilter("ignore", DamageWarning)
    digests = []
    damaged = []
    for each in directories:
        # One study at a time: a thousand of them do not fit into memory with all their rows.
        study = Study.open(each)
        digests.append(digest(study, cells=len(directories) <= MOST))
        damaged += [study.damage] if study.damage else []
        study.close()
    found = find(digests)
    if as_json:
        show_json(found.as_dict())
    else:
        show_table(comparison_table(found), quiet)
    write(comparison_html(digests), out, typed=out != PAGE)
    if not quiet:
        tell(f"the comparison is in {out}", 0)
    for sentence in damaged:
        tell(sentence, ExitCode.INCOMPLETE)
    if damaged:
        raise typer.Exit(ExitCode.INCOMPLETE)
