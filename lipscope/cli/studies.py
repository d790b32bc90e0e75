"""The commands around a study: `measure`, `show`, `report`, `export`; and `doctor`."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lipscope._types import UserError
from lipscope.cli.options import (
    AsJson,
    Cluster,
    Column,
    Device,
    Dtype,
    Layers,
    ModelName,
    Quiet,
    RandomInit,
    Revision,
    Seed,
    ShardOption,
    StudyDirectory,
    StudyOut,
    Texts,
    Tokenizer,
    Workers,
    check_parallel,
)
from lipscope.cli.terminal import (
    ExitCode,
    numbers,
    progress,
    read_texts,
    show_json,
    show_table,
    tell,
)
from lipscope.cli.torchrun import on_ranks

if TYPE_CHECKING:
    from lipscope.study.study import Study

REPORT = "report.html"
COMPARISON = "comparison.html"


class MeasureCommand(TyperCommand):
    """Appends the table of scopes and their formulas to the help text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from lipscope.models.scopes import SCOPES

        super().format_help(ctx, formatter)
        typer.echo(" Scopes: the map f whose constant is measured at X, one token per row.\n")
        for name, scope in SCOPES.items():
            typer.echo(f"   {name:<10} {scope.formula}\n{'':<14}{scope.description}")


@on_ranks
def measure(
    model: ModelName = None,
    text: Texts = None,
    column: Column = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens per sample.", show_default="8,16,...,256")
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples per length.")] = 3,
    layers: Layers = None,
    heads: Annotated[
        str | None, typer.Option(help="For example 0,2 or 0-5.", show_default="all")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="Map to measure, listed below; repeatable.", show_default="heads, attention"
        ),
    ] = None,
    random_init: RandomInit = None,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Add special tokens to samples.")
    ] = False,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    tol: Annotated[float, typer.Option(help="Relative residual at which the solver stops.")] = 1e-6,
    gap: Annotated[
        float | None,
        typer.Option(
            help="Iterate until upper / lower - 1 is at most this: 0.1 by default in float64; "
            "inf takes bounds as they come."
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = "float64",
    seed: Seed = 0,
    workers: Workers = 1,
    cluster: Cluster = None,
    shard: ShardOption = None,
    out: StudyOut = None,
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Write no report.html beside the study.")
    ] = False,
    fail_above: Annotated[
        float | None, typer.Option(metavar="X", help="Exit with 1 if a measured σ is above X.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure how smooth every attention layer of a model is, and how that changes with length."""
    if fail_above is not None and not fail_above > 0:  # negated: NaN is no threshold either
        raise UserError(f"--fail-above takes a positive number, got {fail_above}")
    sizes = numbers("lengths", lengths)
    where = numbers("layers", layers)
    which = numbers("heads", heads)
    words = read_texts(text, column, quiet)
    with progress(quiet=quiet) as report:
        part = check_parallel(workers, cluster, shard)  # before a model is loaded
        from lipscope.models.loading import load
        from lipscope.study.run import measure as run

        study = run(
            load(
                model,
                tokenizer,
                dtype=dtype,
                device=device,
                revision=revision,
                random_init=random_init,
            ),
            words,
            sizes,
            samples,
            where,
            which,
            scope or ("heads", "attention"),
            tol=tol,
            gap=gap,
            seed=seed,
            workers=workers,
            cluster=cluster,
            shard=part,
            out=out,
            special_tokens=special_tokens,
            progress=report,
        )
    _print(study, as_json, quiet)
    # After the table: a failure to draw must not hide the numbers.
    if out is not None and not no_report:
        _write_report(study, out / REPORT, quiet=quiet)
    above = [row for row in study.sigma if row.value > (fail_above or math.inf)]
    if above:
        worst = max(above, key=lambda row: row.value)
        where_it_is = "the whole model" if worst.layer is None else f"layer {worst.layer}"
        tell(
            f"{len(above)} of {len(study.sigma)} measured σ are above {fail_above:g}; the largest "
            f"is {worst.value:.4g}, of {where_it_is} ({worst.scope}) at n = {worst.n}",
            0,
        )
        raise typer.Exit(ExitCode.ANSWER_IS_NO)
    if fail_above is not None and (study.failed or not study.sigma):
        missing = f"{len(study.failed)} rows have no value" if study.failed else "the part is empty"
        measured = "not everything" if study.sigma else "nothing"
        tell(f"{measured} was measured ({missing}), so --fail-above has no answer", 0)
        raise typer.Exit(ExitCode.INCOMPLETE)
    if any(row.status == "failed" for row in study.failed):
        raise typer.Exit(ExitCode.INCOMPLETE)


def show(directory: StudyDirectory, as_json: AsJson = False) -> None:
    """Print a study again."""
    study = _open(directory)
    _print(study, as_json)
    _end_damaged(study)


def report(
    directory: StudyDirectory,
    other: Annotated[
        Path | None, typer.Argument(metavar="[DIR2]", help="A second study, shown as reference.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write.", show_default="DIR/report.html"),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write a study as one self-contained HTML page, with another one as reference.

    The command `compare` takes any number of studies.
    """
    study = _open(directory)
    against = None if other is None else _open(other)
    _write_report(
        study,
        out or directory / (REPORT if against is None else COMPARISON),
        against,
        quiet,
        typed=out is not None,
    )
    _end_damaged(study, against)


def export(
    directory: StudyDirectory,
    file: Annotated[
        Path | None, typer.Argument(help="File to write.", show_default="stdout")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="CSV, the default.")] = False,
    parquet: Annotated[bool, typer.Option("--parquet", help="Parquet; needs FILE.")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Export tokens and their norms.")
    ] = False,
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
    _end_damaged(study)


def doctor(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A study to check for damage.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Write what is intact to DIR.repaired.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print versions, the device, and whether models can be downloaded; or check a study."""
    from lipscope.cli.doctor import check_study, report

    if directory is not None:
        if not check_study(directory, repair):
            raise typer.Exit(ExitCode.INCOMPLETE)
        return
    if repair:
        raise UserError("--repair needs the directory of a study: lipscope doctor DIR --repair")
    if as_json:
        show_json(report())
        return
    for name, value in report().items():
        typer.echo(f"{name:<14} {value}")


def _open(directory: Path) -> Study:
    """Open a study for a command that ends with `_end_damaged`, which tells of damage once."""
    from lipscope.study.study import DamageWarning, Study

    warnings.simplefilter("ignore", DamageWarning)
    return Study.open(directory)


def _end_damaged(*studies: Study | None) -> None:
    """End with 3 and one sentence if a read has found that rows are lost."""
    damaged = [study.damage for study in studies if study is not None and study.damage]
    for sentence in damaged:
        tell(sentence, ExitCode.INCOMPLETE)
    if damaged:
        raise typer.Exit(ExitCode.INCOMPLETE)


def write_page(directory: Path, quiet: bool) -> None:
    """Write the page of a study again if it has one: it would lack what was just added."""
    path = directory / REPORT
    if path.exists():
        _write_report(_open(directory), path, quiet=quiet)
    elif not quiet:
        tell(f"the study is in {directory}; `lipscope report {directory}` writes its page", 0)


def _write_report(
    study: Study,
    path: Path,
    against: Study | None = None,
    quiet: bool = False,
    typed: bool = False,
) -> None:
    """Write the page, and say where it is."""
    from lipscope.report.document import write
    from lipscope.report.page import html

    write(html(study, against), path, typed=typed)
    if not quiet:
        tell(f"the report is in {path}", 0)


def _print(study: Study, as_json: bool, quiet: bool = False) -> None:
    if as_json:
        from lipscope.study.export import as_dict

        show_json(as_dict(study))
        return
    from lipscope.report.study_table import summary

    show_table(summary(study), quiet)
