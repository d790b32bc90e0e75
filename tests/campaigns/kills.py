"""SIGKILL at random moments of `measure`, `bounds` and `attack`, again and again until they end.

    python -m tests.campaigns.kills 1000 --workers 2 --out kills.jsonl

Commands run in forks of a process that has imported everything, on a tiny model. After every kill
the study must hold all rows that it held before, each once, each with the numbers of a run in
peace. When a command ends before its kill, the study must be that of the run in peace, and the next
one begins.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.study.records import Row
from lipscope.study.study import Study
from tests.campaigns.runner import Result, campaign
from tests.study.fakes import roll_back
from tests.study.printed import exported
from tests.study.tiny import PROSE, save_tiny

CHUNK = 20
VERBS = {
    "measure": ["--lengths", "4-12", "--samples", "2"],
    "bounds": ["--lengths", "4,5,6"],
    "attack": ["--kind", "construction", "--length", "5"],
    "measure, again": ["--lengths", "4-30", "--samples", "1", "--layers", "0"],
    "attack, ascent": ["--kind", "ascent", "--length", "4"],
}


def started(verb: str, place: Path, out: Path) -> int:
    """A child that runs the command in silence; its id."""
    return forked(lambda: main(command(verb, place, out)))


def command(verb: str, place: Path, out: Path) -> list[str]:
    words = [verb.split(",")[0], str(place / "tiny"), "--text", str(place / "text")]
    return [*words, *VERBS[verb], "--quiet", "--out", str(out)]


def forked(work: Callable[[], int | None]) -> int:
    child = os.fork()
    if child == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os._exit(work() or 0)
    return child


def rows_of(directory: Path) -> list[Row] | None:
    """The rows without their times, or None where there is no study yet."""
    roll_back(directory)
    try:
        study = Study.open(directory)
    except UserError:
        return None
    with_times = study.rows
    study.close()
    return [row._replace(seconds=0.0) for row in with_times]


@cache
def peace(verb: str) -> tuple[Path, list[Row], list[str], float]:
    """A folder with a model, and what the command gives there in peace, twice: the second is warm.

    Run in this process, so that its children find everything imported.
    """
    place = Path(tempfile.mkdtemp())
    os.waitpid(forked(lambda: save_tiny(place / "tiny", layers=2) and 0), 0)
    (place / "text").write_text(PROSE)
    for name in ("cold", "calm"):
        began = time.monotonic()
        assert main(command(verb, place, place / name)) == 0
    lasted = time.monotonic() - began
    study = Study.open(place / "calm")
    whole = exported(study)
    study.close()
    rows = rows_of(place / "calm")
    assert rows
    return place, rows, whole, lasted


def fault(before: list[Row], now: list[Row] | None, calm: list[Row]) -> str:
    """What is wrong with a study after a kill; empty if nothing is."""
    if now is None:
        return "the study is gone" if before else ""
    if not set(before) <= set(now):
        return f"{len(set(before) - set(now))} rows lost"
    if len(set(now)) < len(now):
        return "a row is there twice"
    return "" if set(now) <= set(calm) else "a row differs from the run in peace"


def chunk(number: int) -> Result:
    """Twenty kills of one command."""
    result, draw = Result(), random.Random(number)
    verb = list(VERBS)[number % len(VERBS)]
    place, calm, whole, lasted = peace(verb)
    kept: list[Row] = []
    out, kills = place / f"{number}", 0
    while kills < CHUNK:
        child = started(verb, place, out)
        time.sleep(draw.uniform(0, 1.05 * lasted))
        os.kill(child, signal.SIGKILL)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended == -signal.SIGKILL:
            kills += 1
            now = rows_of(out)
            wrong, kept = fault(kept, now, calm), now or []
            result.count(verb, "kills")
            result.count(verb, moment(len(kept), len(calm)))
        else:
            wrong = f"exit code {ended}" if ended else difference(out, whole)
            result.count(verb, "completed")
            kept, out = [], place / f"{number}, {kills} kills, {time.monotonic_ns()}"
        if wrong:
            result.faults.append(f"{verb}, chunk {number}, {kills} kills: {wrong}")
    return result


def moment(rows: int, of: int) -> str:
    return "before any row" if rows == 0 else "in the middle" if rows < of else "after all rows"


def difference(out: Path, whole: list[str]) -> str:
    """Whether a completed study exports something else than the run in peace."""
    study = Study.open(out)
    same = exported(study) == whole
    study.close()
    return "" if same else "its export differs from that of the run in peace"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        tempfile.tempdir = scratch  # for the workers as well, which are forks of this process
        code = campaign(chunk, CHUNK, 1000, __doc__ or "")
    sys.exit(code)
