"""Two processes that write one file, and readers beside a process that writes a study.

    python -m tests.campaigns.concurrency 100000 --workers 2 --out reads.jsonl

A reader of the file must see the whole of one of the two. For every ten reads of it a study is read
whose rows a writer replaces all at once, again and again: a reader must see one state of them.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from lipscope._files import whole_file
from lipscope.study.store import Store
from lipscope.study.study import Study
from tests.campaigns.runner import Result, campaign
from tests.study.fakes import info, row

CHUNK = 1000
CONTENTS = {b"A": 200_000, b"B": 130_000}
ROWS = 30


@contextmanager
def beside(*work: Callable[[], None]) -> Iterator[None]:
    """Call functions again and again, each in a child of its own, until the block ends."""
    children = []
    for one in work:
        child = os.fork()
        if child == 0:
            while True:
                one()
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def write_letters(path: Path, letter: bytes) -> None:
    with whole_file(path) as draft:
        draft.write_bytes(letter * CONTENTS[letter])


def mixed(content: bytes) -> bool:
    """Whether a file is not the whole of what one of the writers wrote."""
    return all(content != letter * count for letter, count in CONTENTS.items())


def read_letters(top: Path, count: int, result: Result) -> None:
    path = top / "letters"
    write_letters(path, b"A")
    with beside(lambda: write_letters(path, b"A"), lambda: write_letters(path, b"B")):
        for _ in range(count):
            content = path.read_bytes()
            result.count("two writers", "mixed" if mixed(content) else content[:1].decode())
            if mixed(content):
                result.faults.append(f"a file of {len(content)} bytes is of neither writer")


def replace_rows(store: Store, value: float) -> None:
    """One transaction that replaces all rows."""
    store.write([row(layer=layer, value=value) for layer in range(ROWS)])
    time.sleep(0.002)  # a writer that never rests leaves readers no moment


def read_study(top: Path, count: int, result: Result) -> None:
    place = top / "study"
    store = Store.create(place, info())
    replace_rows(store, 1.0)
    store.close()

    def rewrite() -> None:
        with closing(Store.create(place, info())) as mine:
            for value in range(1, 50):
                replace_rows(mine, float(value))

    with beside(rewrite):
        for _ in range(count):
            with closing(Study.open(place)) as study:
                rows, damage = study.rows, study.damage
            torn = len(rows) != ROWS or len({one.value for one in rows}) != 1 or damage
            result.count("reads beside a writer", "torn" if torn else "whole")
            if torn:
                result.faults.append(f"{len(rows)} rows, {damage or 'of several states'}")


def chunk(number: int) -> Result:
    result = Result()
    with tempfile.TemporaryDirectory() as scratch:
        read_letters(Path(scratch), CHUNK, result)
        read_study(Path(scratch), CHUNK // 10, result)
    return result


if __name__ == "__main__":
    sys.exit(campaign(chunk, CHUNK, 100_000, __doc__ or ""))
