"""The commands in one application, and how each ends: done, or with one line that says why not."""

from __future__ import annotations

import codecs
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from lipscope import __version__
from lipscope._types import UserError
from lipscope.cli import (
    budgets,
    doctor,
    interruption,
    measuring,
    reproducing,
    simulating,
    studies,
    training,
)
from lipscope.cli.terminal import ExitCode, tell, warn

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done; 1 the answer is no (a threshold, a check); 2 bad input; "
    "3 some rows failed or were lost; 130, 143 interrupted.",
)
app.command(cls=measuring.MeasureCommand)(measuring.measure)
app.command(cls=simulating.SimulateCommand)(simulating.simulate)
for command in (
    studies.show,
    studies.report,
    studies.compare,
    studies.export,
    studies.merge,
    studies.sweep,
    measuring.bounds,
    measuring.attack,
    budgets.budget,
    budgets.check,
    reproducing.reproduce,
    training.train,
    doctor.doctor,
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


PLAIN = {"σ": "sigma", "α": "alpha", "ᵅ": "^alpha", "→": "->", "…": "...", "“": '"', "”": '"'}
"""What a terminal that has no such character is shown in its place."""

REPORTING = {"lipscope", "transformers", "torch", "importlib", "typer", "click"}
"""Packages that load others, and report what fails there."""


def run(arguments: Sequence[str] | None) -> int:
    """Run a command and return its exit code; whatever the user can mend is one line on stderr."""
    codecs.register_error("lipscope", _in_plain_letters)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # None when closed, and a host may have put its own there
            stream.reconfigure(errors="lipscope")  # type: ignore[union-attr]  # see above
    # standalone_mode=False: typer must neither print errors itself nor call sys.exit.
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _in_one_line
            code = app(args=arguments, prog_name="lipscope", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk can still be reported
    except SystemExit as stop:
        # Typer ends the process when the reader of a pipe has left.
        if isinstance(stop.__context__, BrokenPipeError):
            return ExitCode.PIPE_CLOSED
        raise
    except Exception as error:
        # A library may have turned Ctrl-C into an error of its own; the handler knows better.
        interruption.check()
        message = _message(error)
        if message is None:
            raise
        if isinstance(error, OSError):
            _drop_output()
        return tell(message, getattr(error, "exit_code", ExitCode.BAD_INPUT))
    return int(code or 0)


def _message(error: Exception) -> str | None:
    """What to tell the user; None for an error of ours, which deserves its traceback."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; is a disk full, or a directory not writable?"
    if isinstance(error, ImportError):
        return _unloaded(error)
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:100]!a} is not UTF-8 text; rename it"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "there is not enough memory for this; try smaller sizes"
    # Typer does not export the class of its parser's errors; this method is what they have.
    if not hasattr(error, "format_message"):
        return None
    context = getattr(error, "ctx", None)
    remedy = f" Try `{context.command_path} --help`." if context else ""
    return f"{error.format_message().rstrip('.')}.{remedy}"


def _unloaded(error: ImportError) -> str:
    """Name the package that does not load, below the libraries that report it."""
    root: BaseException = error
    while below := root.__cause__ or root.__context__:
        root = below
    modules = [
        frame.f_globals.get("__name__", "").split(".")[0]
        for frame, _ in traceback.walk_tb(root.__traceback__)
    ]
    others = [name for name in modules if name and name not in REPORTING]
    package = others[-1] if others else getattr(root, "name", None) or "a package"
    reason = " ".join(f"{type(root).__name__}: {root}".split())[:200]
    return (
        f"{package} does not load here ({reason}); reinstall it to fit the installed torch, or "
        "uninstall it if nothing else needs it"
    )


def _drop_output() -> None:
    """Forget what stdout still holds: Python would try to write it at exit, and fail again."""
    with suppress(Exception):
        sys.stdout.flush()
        return
    with suppress(Exception):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(PLAIN.get(c, ascii(c)[1:-1]) for c in missing), error.end


def _in_one_line(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Show a warning of lipscope as its error messages are shown; libraries' own are left out."""
    if category.__module__.startswith("lipscope."):
        warn(str(message))
