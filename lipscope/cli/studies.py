"""The commands around a study: `measure`, `show`, `report`, `export`; and `doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lipscope._types import UserError
from lipscope.cli.terminal import ExitCode, numbers, progress, read_text, show_table

if TYPE_CHECKING:
    from lipscope.study.study import Study

REPORT, COMPARISON = "report.html", "comparison.html"


class MeasureCommand(TyperCommand):
    """Appends the table of scopes and their formulas to the help text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from lipscope.models.scopes import SCOPES

        super().format_help(ctx, formatter)
        typer.echo(" Scopes: the map f whose constant is measured at X, one token per row.\n")
        for name, scope in SCOPES.items():
            typer.echo(f"   {name:<10} {scope.formula}\n{'':<14}{scope.description}")


def measure(
    model: Annotated[
        str | None, typer.Argument(help="Model id or directory.", show_default="embedded MiniLM")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-", help="UTF-8 text; - reads stdin.", show_default="embedded prose"
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens per sample.", show_default="8,16,...,256")
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples per length.")] = 3,
    layers: Annotated[
        str | None, typer.Option(help="For example 0,2 or 0-5.", show_default="all")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="For example 0,2 or 0-5.", show_default="all")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="Map to measure, listed below; repeatable.", show_default="heads, attention"
        ),
    ] = None,
    random_init: Annotated[
        int | None, typer.Option(metavar="SEED", help="Use random weights.")
    ] = None,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Add special tokens to samples.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    tol: Annotated[float, typer.Option(help="Relative residual at which the solver stops.")] = 1e-6,
    gap: Annotated[
        float | None, typer.Option(help="Iterate until upper / lower - 1 is at most this.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="For example cpu, cuda or cuda:1.", show_default="cpu")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float64 is most accurate; float32 is faster.")
    ] = "float64",
    seed: Annotated[int, typer.Option(help="Seed of samples and solver starts.")] = 0,
    workers: Annotated[int, typer.Option(help="Number of worker processes.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory to save the study in; rerun to resume."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure how smooth every attention layer of a model is, and how that changes with length."""
    sizes, where, which = (
        numbers("lengths", lengths),
        numbers("layers", layers),
        numbers("heads", heads),
    )
    words = None if text is None else read_text(text)
    with progress() as report:
        from lipscope.models.loading import load
        from lipscope.study.run import measure as run

        study = run(
            load(model, dtype=dtype, device=device, revision=revision, random_init=random_init),
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
            out=out,
            special_tokens=special_tokens,
            progress=report,
        )
    _print(study, as_json)
    # After the table: a failure to draw must not hide the numbers.
    if out is not None:
        _write_report(study, out / REPORT)
    if any(row.status.startswith("failed") for row in study.failed):
        raise typer.Exit(ExitCode.SOME_FAILED)


def show(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory that `measure --out` wrote.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print a study again."""
    from lipscope.study.study import Study

    _print(Study.open(directory), as_json)


def report(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory that `measure --out` wrote.")
    ],
    other: Annotated[
        Path | None, typer.Argument(metavar="[DIR2]", help="A second study to show side by side.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write.", show_default="DIR/report.html"),
    ] = None,
) -> None:
    """Write a study, or two side by side, as one self-contained HTML page."""
    from lipscope.study.study import Study

    against = None if other is None else Study.open(other)
    _write_report(
        Study.open(directory),
        out or directory / (REPORT if against is None else COMPARISON),
        against,
    )


def export(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory that `measure --out` wrote.")
    ],
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
    from lipscope.study.study import Study

    if csv and parquet:
        raise UserError("--csv and --parquet exclude each other; give one of them")
    if parquet and file is None:
        raise UserError("--parquet needs a file to write to: lipscope export DIR --parquet FILE")
    study = Study.open(directory)
    if file is None:
        write_csv(study, sys.stdout, tokens)
    else:
        write_file(study, file, "parquet" if parquet else "csv", tokens)


def doctor() -> None:
    """Print installed versions, the device, and whether models can be downloaded."""
    from lipscope.cli.doctor import report

    for name, value in report().items():
        typer.echo(f"{name:<14} {value}")


def _write_report(study: Study, path: Path, against: Study | None = None) -> None:
    """Write the page; on a terminal, print where."""
    from lipscope.report.page import render

    render(study, path, against)
    if sys.stderr.isatty():
        typer.echo(f"The report is in {path}.", err=True)


def _print(study: Study, as_json: bool) -> None:
    if as_json:
        from lipscope.study.export import as_dict

        typer.echo(json.dumps(as_dict(study), indent=1, allow_nan=False))
        return
    from lipscope.report.study_table import summary

    show_table(summary(study))
