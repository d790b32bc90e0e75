"""A campaign of damage: bytes of a small study are flipped, or the file is cut there.

    python -m tests.study.damage [--every 64] [--ways flip cut bit zero] [--state FILE]

Each damaged copy is exported (rows and tokens) and shown. Nothing may change silently: an output
that differs from that of the intact study comes with exit code 2 or 3, every row that is still
exported is a true one, and there is no traceback. With --state the campaign resumes.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from lipscope.cli import main
from lipscope.study.directory import FILE
from lipscope.study.jobs import Command, Request
from lipscope.study.records import SampleTokens
from lipscope.study.store import Store
from tests.study.fakes import info, row, sensitivity

HEADS, SCOPES = dict.fromkeys(range(3), (0, 1)), ("heads", "attention")
COMMANDS = (("export",), ("export", "--tokens"), ("show",))
WAYS = ("flip", "cut", "bit", "zero")
BAD = ("SILENT", "WRONG", "traceback")


def make(directory: Path) -> bytes:
    """A study with heads, layers, tokens and token norms; its file."""
    asked = Request(((8, (0, 1)), (16, (0, 1)), (32, (0, 1))), (0, 1, 2), HEADS, SCOPES)
    store = Store.create(directory, info(), Command("measure", "lipscope measure", asked))
    for n in (8, 16, 32):
        words = [("=1+1", "\x1b[31m", "ü", "", "日本", "a b", ",", '"')[i % 8] for i in range(n)]
        store.write_samples([SampleTokens(n, s, tuple(words)) for s in range(2)])
        for layer in range(3):
            rows = [
                row(scope, layer, head, n, s, value=1.25 * n + layer + s + (head or 0) / 7)
                for s in range(2)
                for scope, head in (("heads", 0), ("heads", 1), ("attention", None))
            ]
            store.write(rows, [sensitivity(r) for r in rows])
    store.close()
    return (directory / FILE).read_bytes()


def damaged(whole: bytes, at: int, way: str) -> bytes:
    """The file with its byte `at` damaged, or without the rest from there."""
    if way == "cut":
        return whole[:at]
    new = {"flip": whole[at] ^ 0xFF, "bit": whole[at] ^ (1 << at // 64 % 8), "zero": 0}[way]
    return whole[:at] + bytes([new]) + whole[at + 1 :]


def run(command: tuple[str, ...], directory: Path) -> tuple[int, str, str]:
    """Exit code, output and messages of a command; -1 for a traceback."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([command[0], str(directory), *command[1:]])
        except (Exception, SystemExit) as error:
            return -1, "", repr(error)
    return code, out.getvalue(), err.getvalue()


def verdict(code: int, output: str, messages: str, truth: str) -> str:
    """What a command made of a damaged study."""
    if code == -1:
        return "traceback"
    if code == 0:
        return "unchanged" if output == truth else "SILENT"
    if code == 2:
        return "refused"
    # The last four columns say what was measured; where those facts are lost they are empty.
    rows, known = (
        {line.rsplit(",", 4)[0] for line in text.splitlines() if line.count(",") > 7}
        for text in (output, truth)
    )
    told = "is damaged: lost" in messages
    return "told, rest true" if told and not (rows - known) else "WRONG"


def campaign(every: int, ways: tuple[str, ...] = WAYS, first: int = 0) -> Iterator[tuple[int, str]]:
    """(offset, verdict) of every command on every damaged copy."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "study"
        whole = make(place)
        truths = {command: run(command, place)[1] for command in COMMANDS}
        for at in range(first, len(whole), every):
            for way in ways:
                content = damaged(whole, at, way)
                for command in COMMANDS:
                    (place / FILE).write_bytes(content)
                    code, output, messages = run(command, place)
                    said = verdict(code, output, messages, truths[command])
                    if said in BAD:
                        end = (output + messages)[-300:]
                        print(f"{way} at {at}, {' '.join(command)}: {said}: {end!r}")
                    yield at, said


def resumed(every: int, ways: tuple[str, ...], state: Path | None) -> Counter[str]:
    """Run the campaign from where the state file says, and write it as it goes."""
    counts, first = Counter[str](), 0
    if state is not None and state.exists():
        kept = json.loads(state.read_text())
        counts, first = Counter(kept["counts"]), kept["next"]
    here, pending = first, Counter[str]()
    for at, said in campaign(every, ways, first):
        if at != here:
            counts, pending, here = counts + pending, Counter(), at
            if state is not None:
                state.write_text(json.dumps({"next": at, "counts": counts}))
        pending[said] += 1
    return counts + pending


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=64)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=("flip", "cut"))
    parser.add_argument("--state", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    found = resumed(options.every, tuple(options.ways), options.state)
    print(dict(sorted(found.items())), f"{sum(found.values())} commands")
    print(f"{time.perf_counter() - began:.0f} s in this run")
    raise SystemExit(any(found[bad] for bad in BAD))
