"""Long campaigns over many processes: chunks of work, a line of JSON each, resumed after a stop.

A campaign is a function from the number of a chunk to a `Result`. Results are appended to a file as
they come; a chunk that stands in the file is not done again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import lipscope as ls

SHOWN = 20
"""Faults printed at the end; the file has all of them."""


@dataclass
class Result:
    """What a chunk found.

    Attributes:
        counts: What was counted, by kind and outcome.
        faults: A sentence for each violation.
        worst: The largest number of each kind, for the table.
        seconds: Processor time.
    """

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, kind: str, outcome: str, times: int = 1) -> None:
        row = self.counts.setdefault(kind, {})
        row[outcome] = row.get(outcome, 0) + times

    def add(self, other: Result) -> None:
        for kind, row in other.counts.items():
            for outcome, times in row.items():
                self.count(kind, outcome, times)
        for kind, number in other.worst.items():
            self.worst[kind] = max(self.worst.get(kind, 0.0), number)
        self.faults += other.faults
        self.seconds += other.seconds

    def total(self) -> Counter[str]:
        return sum((Counter(row) for row in self.counts.values()), Counter())


def campaign(chunk: Callable[[int], Result], size: int, count: int, about: str) -> int:
    """Read the command line, run what is left of the campaign, print a table; 1 for a fault.

    Args:
        chunk: The work, by number.
        size: How many problems a chunk has.
        count: How many problems there are by default.
        about: What the campaign is, for `--help`.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("count", type=int, nargs="?", default=count, help="number of problems")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--workers", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--out", type=Path, help="file of JSON lines; continued if it exists")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time")
    asked = parser.parse_args()
    began = time.monotonic()
    start = asked.first // size
    chunks = range(start, start + -(-asked.count // size))
    total, done = read(asked.out, chunks)
    left = [i for i in chunks if i not in done]
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(asked.out.open("a")) if asked.out else None
        context = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(asked.workers, context, torch.set_num_threads, (1,))
        stack.enter_context(pool)
        for future in as_completed([pool.submit(timed, chunk, i) for i in left]):
            i, result = future.result()
            total.add(result)
            done.add(i)
            if out:
                print(json.dumps({"chunk": i, **asdict(result)}), file=out, flush=True)
            if time.monotonic() - began > 60 * asked.minutes:
                pool.shutdown(cancel_futures=True)
                break
    show(total)
    here = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(
        f"{len(done)} of {len(chunks)} chunks of {size} from {start}, "
        f"{total.seconds:.0f} s of processor time, "
        f"{time.monotonic() - began:.0f} s by the clock with {asked.workers} workers; "
        f"lipscope {ls.__version__}, {here}"
    )
    return 1 if total.faults or len(done) < len(chunks) else 0


def examine_each(examine: Callable[[int, Result], None], size: int, number: int) -> Result:
    """Examine the cases of one chunk, which are numbered on over all chunks."""
    result = Result()
    for case in range(size * number, size * (number + 1)):
        examine(case, result)
    return result


def read(path: Path | None, chunks: range) -> tuple[Result, set[int]]:
    """The chunks that stand in a file; a last line that was cut is not one of them."""
    total, done = Result(), set[int]()
    lines = path.read_text().splitlines(keepends=True) if path and path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        assert path is not None
        path.write_text("".join(lines[:-1]))
    for line in lines:
        record = json.loads(line) if line.endswith("\n") else {"chunk": -1}
        number = record.pop("chunk")
        if number in chunks and number not in done:
            done.add(number)
            total.add(Result(**record))
    return total, done


def timed(chunk: Callable[[int], Result], i: int) -> tuple[int, Result]:
    """Do a chunk; its processor time includes that of children that have ended."""
    before = os.times()
    result = chunk(i)
    result.seconds = sum(os.times()[:4]) - sum(before[:4])
    return i, result


def show(total: Result) -> None:
    """A line per kind, a sum, and the first faults."""
    outcomes = sorted(total.total())
    print("".join([f"{'kind':<44}", *(f"{name:>16}" for name in outcomes), f"{'worst':>12}"]))
    for kind, row in [*sorted(total.counts.items()), ("all", total.total())]:
        worst = total.worst.get(kind)
        shown = f"{worst:12.2e}" if worst is not None else ""
        print(f"{kind:<44}" + "".join(f"{row.get(name, 0):>16}" for name in outcomes) + shown)
    print(f"{len(total.faults)} faults", *total.faults[:SHOWN], sep="\n")
