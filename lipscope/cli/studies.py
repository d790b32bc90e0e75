"""The commands on saved studies: `show`, `report`, `export`, `compare`, `merge` and `sweep`."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipscope._types import UserError
from lipscope.cli import options as opt
from lipscope.cli.terminal import ExitCode, progress, show_json, show_table, tell, warn

if TYPE_CHECKING:
    from lipscope.study.study import Study

REPORT = "report.html"
COMPARISON = Path("comparison.html")


def show(directory: opt.StudyDirectory, as_json: opt.AsJson = False) -> None:
    """Print a study again."""
    study = _open(directory)
    print_study(study, as_json)
    _end([study.damage])


def report(
    directory: opt.StudyDirectory,
    other: Annotated[
        Path | None, typer.Argument(metavar="[DIR2]", help="A second study, shown as reference.")
    ] = None,
    out: Annotated[
        Path | None, opt.option("File to write.", "DIR/report.html", metavar="FILE")
    ] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Write a study as one self-contained HTML page, with another one as reference.

    The command `compare` takes any number of studies.
    """
    study = _open(directory)
    against = None if other is None else _open(other)
    path = out or directory / (REPORT if against is None else COMPARISON)
    save_page(study, path, against, quiet, typed=out is not None)
    _end([study.damage, "" if against is None else against.damage])


def export(
    directory: opt.StudyDirectory,
    file: Annotated[
        Path | None, typer.Argument(help="File to write.", show_default="stdout")
    ] = None,
    csv: Annotated[bool, opt.option("CSV, the default.", name="--csv")] = False,
    parquet: Annotated[bool, opt.option("Parquet; needs FILE.", name="--parquet")] = False,
    tokens: Annotated[bool, opt.option("Export tokens and their norms.", name="--tokens")] = False,
) -> None:
    """Write a study as CSV or Parquet."""
    from lipscope.study.export import write_csv, write_file

    if csv and parquet:
        raise UserError("--csv and --parquet exclude each other; give one of them")
    if parquet and file is None:
        raise UserError("--parquet needs a file to write to: lipscope export DIR --parquet FILE")
    study = _open(directory)
    if file is None:
        write_csv(study, sys.stdout, tokens)
    else:
        write_file(study, file, "parquet" if parquet else "csv", tokens)
    _end([study.damage])


def compare(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories that `measure --out` wrote.")
    ],
    out: Annotated[
        Path, opt.option("Page to write.", str(COMPARISON), metavar="FILE")
    ] = COMPARISON,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Compare studies: what differs, how sigma grows in each, and where they part most."""
    from lipscope.report import comparison
    from lipscope.report.document import write

    digests = []
    damaged = []
    for each in directories:
        # One study at a time: a thousand of them do not fit into memory with all their rows.
        study = _open(each)
        cells = len(directories) <= comparison.MOST
        digests.append(comparison.digest(study, cells))
        damaged.append(study.damage)
        study.close()
    found = comparison.compare(digests)
    if as_json:
        show_json(found.as_dict())
    else:
        show_table(comparison.comparison_table(found), quiet)
    write(comparison.comparison_html(digests), out, typed=out != COMPARISON)
    if not quiet:
        tell(f"the comparison is in {out}", 0)
    _end(damaged)


def merge(
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Directory to write to; new, or of an earlier merge."),
    ],
    parts: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Parts of one study, in any order.")
    ],
    quiet: opt.Quiet = False,
) -> None:
    """Join parts of one study, as `measure --shard` writes them."""
    from lipscope.study.study import merge_directories as join

    found = join(out, parts)
    if not quiet:
        tell(f"{found.content} are in {out}", 0)
    if found.disputed and not quiet:
        warn(
            f"{found.disputed} rows were measured more than once, with different results; one of "
            "each was kept"
        )
    _end(found.damaged)


def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="TOML file: models, texts and settings.")
    ],
    workers: opt.Workers = 1,
    cluster: opt.Cluster = None,
    shard: opt.ShardOption = None,
    quiet: opt.Quiet = False,
) -> None:
    """Measure models x texts x settings, one study each; rerun to resume."""
    with progress(quiet=quiet) as report:
        from lipscope.study.engines import open_engine
        from lipscope.study.jobs import check_engine, parse_shard
        from lipscope.study.run import Progress
        from lipscope.study.sweep import Entry, read_sweep

        check_engine(workers, cluster)
        wanted = read_sweep(file)
        if shard is not None:
            wanted = wanted.part(parse_shard(shard))
        numbers = {entry.out: i for i, entry in enumerate(wanted.entries, 1)}

        def progress_of(entry: Entry) -> Progress:
            report.doing = f"{numbers[entry.out]} of {len(numbers)}, {entry.out.name}"
            return report

        count = Counter[str]()
        # One cluster for all studies: its workers keep the model from one to the next.
        with open_engine(workers, cluster) as engine:
            for ending in wanted.run(lambda: nullcontext(engine), progress_of):
                count["failed" if ending.failed else ending.how] += 1
                if ending.failed or not quiet:
                    tell(f"{ending.entry.out}: {ending.how}", 0)
    if not quiet:
        tell(", ".join(f"{number} {how}" for how, number in count.items()) or "nothing to do", 0)
    if count["failed"]:
        raise typer.Exit(ExitCode.INCOMPLETE)


def _open(directory: Path) -> Study:
    """Open a study for a command that ends with `_end`, which tells of damage once."""
    from lipscope.study.study import DamageWarning, Study

    warnings.simplefilter("ignore", DamageWarning)
    return Study.open(directory)


def _end(damage: Sequence[str]) -> None:
    """End with 3 and a sentence for each study of which rows are lost."""
    for sentence in filter(None, damage):
        tell(sentence, ExitCode.INCOMPLETE)
    if any(damage):
        raise typer.Exit(ExitCode.INCOMPLETE)


def write_page(directory: Path, quiet: bool) -> None:
    """Write the page of a study again if it has one: it would lack what was just added."""
    path = directory / REPORT
    if path.exists():
        save_page(_open(directory), path, quiet=quiet)
    elif not quiet:
        tell(f"the study is in {directory}; `lipscope report {directory}` writes its page", 0)


def save_page(
    study: Study, path: Path, against: Study | None = None, quiet: bool = False, typed: bool = False
) -> None:
    """Write the page of a study, and print where it is."""
    from lipscope.report.document import write
    from lipscope.report.page import html

    write(html(study, against), path, typed=typed)
    if not quiet:
        tell(f"the report is in {path}", 0)


def print_study(study: Study, as_json: bool, quiet: bool = False) -> None:
    """Print a study as a table or as JSON."""
    from lipscope.report.study_table import summary
    from lipscope.study.export import as_dict

    if as_json:
        show_json(as_dict(study))
    else:
        show_table(summary(study), quiet)
