"""A command under torchrun: rank 0 runs it, the other ranks take part in its solves.

torchrun --nproc-per-node 8 -m lipscope measure MODEL --device cuda --out DIR
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from lipscope._types import UserError
from lipscope.cli.terminal import ExitCode, tell


def on_ranks(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command that takes `device` and `workers` run on all processes of torchrun."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # not started by torchrun
            return command(*args, **kwargs)
        from lipscope.linalg.space import LostRankError
        from lipscope.study.ranks import follow, joined

        if os.environ["RANK"] != "0":
            # One process speaks for all.
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the end)
        if kwargs.get("workers", 1) != 1:
            raise UserError(
                "under torchrun all processes share one solve, so --workers does not apply; omit it"
            )
        try:
            with joined(kwargs["device"]) as (world, kwargs["device"]):
                return command(*args, **kwargs) if world.rank == 0 else follow(world)
        except LostRankError as error:
            # torchrun is about to end the other ranks; the reason is printed once, not twice.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            code = tell(f"{error}; what was measured is saved", ExitCode.INCOMPLETE)
            raise typer.Exit(code) from error

    return run
