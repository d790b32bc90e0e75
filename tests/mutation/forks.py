"""Runs of pytest in forked processes: what lipscope imports is imported once, lipscope in each run.

A run sees a copy of the project, which may be changed for it. Its process leads a group of its own,
which ends with it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".venv", ".git", "build", "dist", ".*_cache", ".hypothesis", "__pycache__", "*.png")
OPTIONS = ("-q", "-n", "0", "-p", "no:cacheprovider", "--tb=line")
SHARED = """
    beartype hypothesis jaxtyping mpmath numpy rich safetensors scipy.optimize scipy.special
    scipy.stats torch torch._dynamo torch.func transformers.masking_utils
    transformers.modeling_utils typer
"""

MEMORY = 10 * 2**30
"""Address space of a run: a limit that was planted away must not take the machine's memory."""


@dataclass
class Job:
    """A run of pytest: what is done to the copy before, the arguments, what is done afterwards.

    Attributes:
        begin: Changes the copy.
        arguments: Of pytest.
        seconds: The run is ended after these.
        end: Gets the copy, the exit code (None if the time was over) and the output.
    """

    begin: Callable[[Path], None]
    arguments: list[str]
    seconds: float
    end: Callable[[Path, int | None, str], None]


def _run(copy: Path, job: Job) -> None:
    """Run pytest in this process, which is a fork, on the copy instead of the project."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
    output = os.open(copy.with_suffix(".txt"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "lipscope")]:
        del sys.modules[name]
    code = 3  # as pytest has it: an internal error
    try:
        code = int(pytest.main([*OPTIONS, *job.arguments]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def run_jobs(jobs: Iterable[Job], workers: int) -> None:
    """Run all jobs, at most `workers` at a time, each worker with a copy of its own."""
    for name in SHARED.split():
        importlib.import_module(name)
    waiting, running = list(jobs)[::-1], dict[int, tuple[Path, Job, float]]()
    with tempfile.TemporaryDirectory() as folder:
        free = [Path(folder) / f"copy{worker}" for worker in range(workers)]
        for copy in free:
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        try:
            while waiting or running:
                while free and waiting:
                    copy, job = free.pop(), waiting.pop()
                    job.begin(copy)
                    child = os.fork()
                    if not child:
                        _run(copy, job)
                    running[child] = copy, job, time.monotonic() + job.seconds
                time.sleep(0.05)
                for child, (copy, job, deadline) in list(running.items()):
                    done, status = os.waitpid(child, os.WNOHANG)
                    late = not done and time.monotonic() > deadline
                    if done or late:
                        _end(child)
                        if late:
                            os.waitpid(child, 0)
                        del running[child]
                        text = copy.with_suffix(".txt").read_text(errors="replace")
                        code = None if late else os.waitstatus_to_exitcode(status)
                        job.end(copy, code, text)
                        free.append(copy)
        finally:
            for child in running:
                _end(child)


def _end(child: int) -> None:
    """End the group of a run: a test may leave processes behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
