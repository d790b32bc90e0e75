"""The commands in one application, and how each ends: done, or with an error of the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from lipscope import __version__
from lipscope._types import UserError
from lipscope.cli import audits, interruption, simulating, studies, training
from lipscope.cli.terminal import ExitCode, tell

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command(cls=studies.MeasureCommand)(studies.measure)
app.command(cls=simulating.SimulateCommand)(simulating.simulate)
for command in (
    studies.show,
    studies.report,
    studies.export,
    audits.bounds,
    audits.attack,
    training.train,
    studies.doctor,
):
    app.command()(command)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Local Lipschitz constants of attention, with certificates."""
    if version:
        typer.echo(f"lipscope {__version__}")
        raise typer.Exit()


def run(arguments: Sequence[str] | None) -> int:
    """Run a command and return its exit code; an error of the user prints a message and gives 2."""
    # standalone_mode=False: typer must neither print errors itself nor call sys.exit.
    try:
        code = app(args=arguments, prog_name="lipscope", standalone_mode=False)
    except Exception as error:
        # A library may have turned Ctrl-C into an error of its own; the handler knows better.
        interruption.check()
        if isinstance(error, UserError):
            return tell(str(error), ExitCode.BAD_INPUT)
        # Typer does not export the class of its parser's errors; this method is what they have.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        remedy = f" Try `{context.command_path} --help`." if context else ""
        return tell(f"{error.format_message().rstrip('.')}.{remedy}", ExitCode.BAD_INPUT)
    return int(code or 0)
