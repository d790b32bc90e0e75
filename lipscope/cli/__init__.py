"""The command line: one call per subcommand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from lipscope import __version__
from lipscope._types import UserError
from lipscope.cli import audits, simulating, studies, training
from lipscope.cli.terminal import WRONG_INPUT, tell

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
        return tell(str(error), WRONG_INPUT)
    except Exception as error:
        if not hasattr(error, "format_message"):  # the parser's own complaints, whose class typer does not export
            raise
        context = getattr(error, "ctx", None)
        remedy = f" Try `{context.command_path} --help`." if context else ""
        return tell(f"{error.format_message().rstrip('.')}.{remedy}", WRONG_INPUT)
    return int(code or 0)
