"""The subcommands in one application, and how each of them ends: well, in a mistake, or by Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lipscope import __version__
from lipscope._types import UserError
from lipscope.cli import audits, simulating, studies, training
from lipscope.cli.interrupt import FAREWELL, interrupted
from lipscope.cli.terminal import INTERRUPTED, WRONG_INPUT, tell


class StoppedError(Exception):
    """Ctrl-C came; the message says what is kept."""


class Commands(TyperGroup):
    """Takes Ctrl-C out of a command before typer does, which would say nothing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise StoppedError(getattr(stop, "__notes__", [FAREWELL])[0]) from stop


app = typer.Typer(
    cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)
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
    """How strongly does attention react to its input? Local Lipschitz constants, with certificates."""
    if version:
        typer.echo(f"lipscope {__version__}")
        raise typer.Exit()


def run(arguments: Sequence[str] | None) -> int:
    """The exit code of a command; a mistake of the user's is told in a line or two, with exit code 2."""
    try:
        code = app(args=arguments, prog_name="lipscope", standalone_mode=False)
    except StoppedError as stop:
        return tell(str(stop), INTERRUPTED)
    except Exception as error:
        if interrupted():
            return tell(FAREWELL, INTERRUPTED)
        if isinstance(error, UserError):
            return tell(str(error), WRONG_INPUT)
        if not hasattr(
            error, "format_message"
        ):  # the parser's own complaints, whose class typer does not export
            raise
        context = getattr(error, "ctx", None)
        remedy = f" Try `{context.command_path} --help`." if context else ""
        return tell(f"{error.format_message().rstrip('.')}.{remedy}", WRONG_INPUT)
    return tell(FAREWELL, INTERRUPTED) if code == INTERRUPTED else int(code or 0)
