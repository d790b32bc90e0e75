"""Planted bugs, each of which the suite must kill: python -m tests.mutants [WORDS OF A BUG ...]

A mutant is one edit of one file, made in a copy of the project; tests must then fail. Those of
mutants.toml name their tests. With `--random 200 --seed 1` mutants are drawn instead: a comparison,
an operator, a constant or an axis somewhere in `--packages` is changed, and the tests of that file
are run, then those of its package, until one fails.

A mutant whose text is gone from the source, or that survives, fails the command. With words, only
the mutants whose description holds one of them are planted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.mutation.edits import edits
from tests.mutation.forks import ROOT, Job, run_jobs

PACKAGES = ("linalg", "theorems", "study", "probes", "models")
LIPSCOPE = ROOT / "lipscope"


class Mutant(NamedTuple):
    """What the bug is, where, the text replaced and by what, and the tests that see it.

    With `line`, the text is the one that begins there; otherwise it occurs once in the file.
    """

    bug: str
    file: str
    old: str
    new: str
    tests: str
    line: int = 0


def mutants() -> list[Mutant]:
    """The mutants of mutants.toml."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Mutant(**entry) for entry in table["mutant"]]


def planted(mutant: Mutant, root: Path) -> str:
    """The source with the bug in it."""
    source = (root / mutant.file).read_text(encoding="utf-8")
    if mutant.line:
        before = "".join(source.splitlines(keepends=True)[: mutant.line - 1])
        if source.startswith(mutant.old, len(before)):
            return before + mutant.new + source[len(before) + len(mutant.old) :]
        raise ValueError(f"{mutant.file}:{mutant.line} does not hold the text of {mutant.bug!r}")
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.file} holds the text of {mutant.bug!r} {count} times, not once")
    return source.replace(mutant.old, mutant.new)


def _brief(text: str) -> str:
    return " ".join(text.split())


def drawn(count: int, seed: int, packages: Sequence[str]) -> list[Mutant]:
    """`count` random mutants of these packages; the same for one seed and one source."""
    every = []
    for path in (path for name in packages for path in sorted((LIPSCOPE / name).rglob("*.py"))):
        file = path.relative_to(ROOT).as_posix()
        folder = ROOT / "tests" / path.parent.relative_to(LIPSCOPE)
        tests = [folder / f"test_{path.name}", folder]
        names = " ".join(str(p.relative_to(ROOT)) for p in tests if p.exists())
        for edit in edits(path.read_text(encoding="utf-8")):
            bug = f"{file}:{edit.line}: {_brief(edit.old)} -> {_brief(edit.new)}"
            every.append(Mutant(bug, file, edit.old, edit.new, names, edit.line))
    return random.Random(seed).sample(every, min(count, len(every)))


@dataclass
class Report:
    """Verdicts as they come: printed, and appended to a file if there is one."""

    out: Path | None

    def __post_init__(self) -> None:
        lines = self.out.read_text().splitlines() if self.out and self.out.exists() else []
        self.verdicts = {row["bug"]: row["verdict"] for row in map(json.loads, lines)}

    def add(self, mutant: Mutant, verdict: str, by: str = "") -> None:
        self.verdicts[mutant.bug] = verdict
        print(f"{verdict:16}  {mutant.bug}{'  by ' + by if by else ''}", flush=True)
        if self.out:
            with self.out.open("a") as file:
                print(json.dumps({"bug": mutant.bug, "verdict": verdict, "by": by}), file=file)


def _write(path: Path, content: bytes) -> None:
    """Write a file with a time that no compiled file of it has."""
    later = path.stat().st_mtime_ns + 2 * 10**9
    path.write_bytes(content)
    os.utime(path, ns=(later, later))


VERDICTS = {0: "SURVIVED", 1: "killed", 2: "killed on import", None: "killed by time"}


def job_of(mutant: Mutant, report: Report) -> Job:
    """Run the tests of a mutant; those of a drawn one in their order, the nearest first."""

    def end(copy: Path, code: int | None, text: str) -> None:
        path = copy / mutant.file
        _write(path, path.with_suffix(".kept").read_bytes())
        # A suite that cannot run has not seen a listed bug.
        verdict = VERDICTS.get(code, f"ended with {code}")
        if not mutant.line:
            verdict = "killed" if code == 1 and " failed" in text else "SURVIVED"
        by = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        report.add(mutant, verdict, by.group(1) if by and code else "")

    def begin(copy: Path) -> None:
        path = copy / mutant.file
        path.with_suffix(".kept").write_bytes(path.read_bytes())
        _write(path, planted(mutant, copy).encode())

    options = ["--timeout=120", "-o", "timeout_func_only=true"] if mutant.line else []
    return Job(begin, ["-x", *options, *mutant.tests.split()], 3600.0, end)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--random", type=int, default=0, help="draw this many mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="keep verdicts here, and skip those it has")
    options = parser.parse_args(arguments)
    report = Report(options.out)
    words = options.words
    every = drawn(options.random, options.seed, options.packages) if options.random else mutants()
    chosen = [m for m in every if not words or any(word in m.bug for word in words)]
    jobs = [job_of(m, report) for m in chosen if m.bug not in report.verdicts]
    run_jobs(jobs, options.workers)
    bugs = [mutant.bug for mutant in chosen]
    counts = Counter(report.verdicts[bug] for bug in bugs)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    alive = [bug for bug in bugs if not report.verdicts[bug].startswith("killed")]
    print(f"{len(bugs) - len(alive)} passed, {len(alive)} failed")
    if alive:
        raise SystemExit("survived:\n" + "\n".join(alive))


if __name__ == "__main__":
    main(sys.argv[1:])
