"""The command line: one call per subcommand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lipscope import __version__
from lipscope._types import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lipscope.study.study import Study

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

REPORT, COMPARISON = "report.html", "comparison.html"
WRONG_INPUT, INTERRUPTED, SOME_FAILED = 2, 130, 1


class MeasureCommand(TyperCommand):
    """Its help ends with the formula of every scope, from the one table that has them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from lipscope.models.scopes import SCOPES

        super().format_help(ctx, formatter)
        typer.echo(" Scopes: the map f that is measured, at X, which holds one token per row.\n")
        for name, scope in SCOPES.items():
            typer.echo(f"   {name:<10} {scope.formula}\n{'':<14}{scope.description}")


@app.command(cls=MeasureCommand)
def measure(
    model: Annotated[str | None, typer.Argument(help="Hub name or folder.", show_default="embedded MiniLM")] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="UTF-8 text; - is stdin.", show_default="embedded prose"),
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens per sample.", show_default="8,16,...,256")] = None,
    samples: Annotated[int, typer.Option(help="Samples per length.")] = 3,
    layers: Annotated[str | None, typer.Option(help="As in 0,2 or 0-5.", show_default="all")] = None,
    heads: Annotated[str | None, typer.Option(help="As in 0,2 or 0-5.", show_default="all")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(help="Which map, see below; repeat it.", show_default="heads, attention"),
    ] = None,
    random_init: Annotated[int | None, typer.Option(metavar="SEED", help="Random weights instead.")] = None,
    special_tokens: Annotated[bool, typer.Option("--special-tokens", help="Frame samples with them.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    tol: Annotated[float, typer.Option(help="Relative residual at which a solve ends.")] = 1e-6,
    device: Annotated[str | None, typer.Option(help="As in cpu, cuda, cuda:1.", show_default="cpu")] = None,
    dtype: Annotated[str, typer.Option(help="float64 certifies, float32 is faster.")] = "float64",
    seed: Annotated[int, typer.Option(help="Decides samples and solver starts.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes; 1 is this one.")] = 1,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the study; resume it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Measure how smooth every attention layer of a model is on a text, and how that grows with length."""
    sizes, where, which = _numbers("lengths", lengths), _numbers("layers", layers), _numbers("heads", heads)
    words = None if text is None else _text(text)
    with _progress() as report:
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
            seed=seed,
            workers=workers,
            out=out,
            special_tokens=special_tokens,
            progress=report,
        )
    _print(study, as_json)
    if out is not None:
        _write_report(study, out / REPORT)
    if any(row.status.startswith("failed") for row in study.failed):
        raise typer.Exit(SOME_FAILED)


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The --out of a measure.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Print a study again."""
    from lipscope.study.study import Study

    _print(Study.open(directory), as_json)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The --out of a measure.")],
    other: Annotated[Path | None, typer.Argument(metavar="[DIR2]", help="A second study, side by side.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", show_default="DIR/report.html")] = None,
) -> None:
    """Write a study, or two side by side, as one page that opens anywhere."""
    from lipscope.study.study import Study

    against = None if other is None else Study.open(other)
    _write_report(Study.open(directory), out or directory / (REPORT if against is None else COMPARISON), against)


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The --out of a measure.")],
    file: Annotated[Path | None, typer.Argument(help="Where to.", show_default="stdout")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="CSV, the default.")] = False,
    parquet: Annotated[bool, typer.Option("--parquet", help="Parquet; needs FILE.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Tokens and their norms, not rows.")] = False,
) -> None:
    """Write a study as CSV or Parquet."""
    from lipscope.study.export import write_csv, write_file
    from lipscope.study.study import Study

    if csv and parquet:
        raise UserError("give --csv or --parquet, not both.")
    if parquet and file is None:
        raise UserError("--parquet needs a file to write to: lipscope export DIR --parquet FILE.")
    study = Study.open(directory)
    if file is None:
        write_csv(study, sys.stdout, tokens)
    else:
        write_file(study, file, "parquet" if parquet else "csv", tokens)


@app.command()
def bounds(
    model: Annotated[str | None, typer.Argument(help="Hub name or folder.", show_default="embedded MiniLM")] = None,
    text: Annotated[str | None, typer.Option(metavar="FILE|-", show_default="embedded prose")] = None,
    layers: Annotated[str | None, typer.Option(help="As in 0,2 or 0-5.", show_default="all")] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens per sample.", show_default="64")] = None,
    radius: Annotated[float | None, typer.Option(help="Of the ball.", show_default="the text's")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the study; resume it.")] = None,
) -> None:
    """Hold every theorem against each head: bounds, the worst input found, and how tight they are."""
    sizes, where, words = _numbers("lengths", lengths), _numbers("layers", layers), text and _text(text)
    with _progress() as report:
        from lipscope.study.bound_probe import audit
        from lipscope.study.bound_table import bound_summary

        found = audit(model, words, sizes, where, radius=radius, out=out, progress=report)
    _show(bound_summary(found))


@app.command()
def attack(
    kind: Annotated[str, typer.Option(help="construction, ascent, direction or tokens.")],
    model: Annotated[str | None, typer.Argument(help="Hub name or folder.", show_default="embedded MiniLM")] = None,
    text: Annotated[str | None, typer.Option(metavar="FILE|-", show_default="embedded prose")] = None,
    layers: Annotated[str | None, typer.Option(help="As in 0,2 or 0-5.", show_default="all")] = None,
    length: Annotated[int, typer.Option(help="Tokens of the text.")] = 32,
    swaps: Annotated[int, typer.Option(help="Tokens to replace, at most.")] = 3,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the study.")] = None,
) -> None:
    """Look for inputs, or words, on which attention reacts most."""
    with _progress() as report:
        from lipscope.study.attack_run import Plan, attack_model, attack_table

        plan = Plan(kind, length, swaps, _numbers("layers", layers))
        found = attack_model(model, text and _text(text), plan, out=out, progress=report)
    _show(attack_table(*found))


@app.command()
def doctor() -> None:
    """Say what is installed, which device would be used, and whether models can be fetched."""
    from lipscope.study.doctor import report

    for name, value in report().items():
        typer.echo(f"{name:<14} {value}")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """How strongly does attention react to its input? Local Lipschitz constants, with certificates."""
    if version:
        typer.echo(f"lipscope {__version__}")
        raise typer.Exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; a mistake of the user's is told in a line or two, with exit code 2."""
    try:
        code = app(args=arguments, prog_name="lipscope", standalone_mode=False)
    except UserError as error:
        return _tell(str(error), WRONG_INPUT)
    except Exception as error:
        if not hasattr(error, "format_message"):  # the parser's own complaints, whose class typer does not export
            raise
        context = getattr(error, "ctx", None)
        remedy = f" Try `{context.command_path} --help`." if context else ""
        return _tell(f"{error.format_message().rstrip('.')}.{remedy}", WRONG_INPUT)
    return int(code or 0)


def _tell(message: str, code: int) -> int:
    from lipscope.study.printable import for_terminal

    typer.echo("lipscope: " + for_terminal(" ".join(message.split())), err=True)
    return code


def _numbers(name: str, value: str | None) -> list[int] | None:
    """0,2,5-7 as numbers."""
    if value is None:
        return None
    found: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"--{name} takes whole numbers and ranges, as in 0,2,5-7; {part.strip()!r} is neither.")
        if dash and int(last) < int(first):
            raise UserError(f"--{name}: the range {part.strip()} is empty; write the smaller number first.")
        found += range(int(first), int(last or first) + 1)
    return found


def _text(source: str) -> str | Path:
    """A file, or what stands on stdin."""
    if source != "-":
        return Path(source)
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the text on stdin is not UTF-8 (byte {error.start}); convert it first.") from error


@contextmanager
def _progress() -> Iterator[Callable[[float, float], None]]:
    """A bar with the time left, on a terminal; stdout stays clean. Ctrl-C ends in a line that says what is kept."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("loading", total=None)
            yield lambda done, total: bar.update(task, description="measuring", completed=done, total=total)
    except KeyboardInterrupt as stop:
        raise typer.Exit(_tell(" ".join(getattr(stop, "__notes__", ["Stopped."])), INTERRUPTED)) from stop


def _write_report(study: Study, path: Path, against: Study | None = None) -> None:
    """Writes the page, and says where to a person."""
    from lipscope.report.page import render

    render(study, path, against)
    if sys.stderr.isatty():
        typer.echo(f"The report is in {path}.", err=True)


def _print(study: Study, as_json: bool) -> None:
    if as_json:
        from lipscope.study.export import as_dict

        typer.echo(json.dumps(as_dict(study), indent=1, allow_nan=False))
        return
    from lipscope.study.table import summary

    _show(summary(study))


def _show(table: RenderableType) -> None:
    from rich.console import Console

    Console(highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
