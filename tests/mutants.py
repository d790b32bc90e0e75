"""Planted bugs, each of which the suite must kill: python -m tests.mutants [WORDS OF A BUG ...]

A mutant is one edit of one file, made in a copy of the project; tests must then fail. Those of
mutants.toml name their tests. With `--random 200 --seed 1` mutants are drawn instead: a comparison,
an operator, a constant or an axis somewhere in `--packages` is changed, and the tests that execute
that statement are run, those of its own package first and quick ones before slow ones, until one
fails. Which tests these are is recorded first, which runs every test of the packages once.

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

import pytest

from tests.mutation.coverage_map import Covering, Place, coverage_map, sources, statements
from tests.mutation.edits import Edit, edits
from tests.mutation.forks import ROOT, Job, run_jobs

PACKAGES = ("linalg", "theorems", "study", "budget", "models")
FIRST_SECONDS = 6.0
"""Recorded seconds of the tests tried first, from few files; most mutants die there."""


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


class Equivalent(NamedTuple):
    """A drawn mutant that no test can kill, and why."""

    file: str
    old: str
    new: str
    reason: str


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def mutants() -> list[Mutant]:
    """The mutants of mutants.toml."""
    return [Mutant(**entry) for entry in TABLE["mutant"]]


def equivalents() -> list[Equivalent]:
    """The edits of mutants.toml that change nothing."""
    return [Equivalent(**entry) for entry in TABLE.get("equivalent", [])]


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


def drawn(count: int, seed: int, packages: Sequence[str]) -> list[tuple[Mutant, Edit]]:
    """`count` random mutants of these packages; the same for one seed and one source."""
    every = []
    for path in sources(packages):
        file = path.relative_to(ROOT).as_posix()
        for edit in edits(path.read_text(encoding="utf-8")):
            bug = f"{file}:{edit.line}: {_brief(edit.old)} -> {_brief(edit.new)}"
            every.append((Mutant(bug, file, edit.old, edit.new, "", edit.line), edit))
    return random.Random(seed).sample(every, min(count, len(every)))


class Selection:
    """Pytest's plugin: only these tests, in this order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.rank = {name: rank for rank, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.rank),
            key=lambda item: self.rank[item.nodeid],
        )


class Choice:
    """The tests that could see a drawn mutant."""

    def __init__(self, tests: list[Covering], packages: Sequence[str]) -> None:
        self.tests = tests
        self.users: dict[str, set[Place]] = {}
        for path in sources(packages):
            file, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            lines = source.splitlines()
            for statement in statements(source):
                inner = getattr(statement, "body", None) or [None]
                end = inner[0].lineno - 1 if inner[0] else statement.end_lineno
                header = "\n".join(lines[statement.lineno - 1 : max(end or 0, statement.lineno)])
                for name in set(re.findall(r"\w+", header)):
                    self.users.setdefault(name, set()).add(Place(file, statement.lineno))

    def of(self, mutant: Mutant, edit: Edit, seconds: float) -> list[Covering]:
        """Those of its own file first, then its package, the quickest first, within `seconds`.

        A statement that runs on import is seen by the tests that execute a user of what it binds.
        """
        places = {Place(mutant.file, edit.statement)}
        if edit.names:
            places = set().union(*(self.users.get(name, set()) for name in edit.names))
        seen = [test for test in self.tests if not places.isdisjoint(test.places)]
        if edit.names and not seen:
            seen = [t for t in self.tests if any(p.file == mutant.file for p in t.places)]
        _, package, file = mutant.file.split("/")
        own = (f"tests/{package}/test_{file}::", f"tests/{package}/")

        def order(test: Covering) -> tuple[int, float]:
            near = [test.name.startswith(start) for start in own]
            return near.index(True) if any(near) else len(near), test.seconds + test.setup

        return _within(sorted(seen, key=order), seconds)


def _within(tests: list[Covering], seconds: float, most_files: int = 1000) -> list[Covering]:
    """Those that fit into the time one after the other, and in any case the first."""
    chosen, files, total = tests[:1], set[str](), 0.0
    for test in tests:
        cost = test.seconds + (0.0 if test.file in files else test.setup)
        if total + cost <= seconds and (test.file in files or len(files) < most_files):
            files.add(test.file)
            chosen += [] if test is tests[0] else [test]
            total += cost
    return chosen


def _duration(tests: list[Covering]) -> float:
    """How long they took; the fixtures of a file count once."""
    return sum(test.seconds for test in tests) + sum({t.file: t.setup for t in tests}.values())


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


def plant(mutant: Mutant, copy: Path) -> None:
    """Write the mutant into the copy, with a time that no compiled file of it has."""
    path = copy / mutant.file
    path.with_suffix(".kept").write_bytes(path.read_bytes())
    _write(path, planted(mutant, copy).encode())


def restore(mutant: Mutant, copy: Path) -> None:
    """Take it out again."""
    path = copy / mutant.file
    _write(path, path.with_suffix(".kept").read_bytes())


def _write(path: Path, content: bytes) -> None:
    later = path.stat().st_mtime_ns + 2 * 10**9
    path.write_bytes(content)
    os.utime(path, ns=(later, later))


VERDICTS = {0: "SURVIVED", 1: "killed", 2: "killed on import", None: "killed by time"}


def listed_job(mutant: Mutant, report: Report) -> Job:
    def end(copy: Path, code: int | None, text: str) -> None:
        restore(mutant, copy)
        # A suite that cannot run has not seen the bug.
        report.add(mutant, "killed" if code == 1 and " failed" in text else "SURVIVED")

    def begin(copy: Path) -> None:
        plant(mutant, copy)

    return Job(begin, ["-x", *mutant.tests.split()], 3600.0, end)


def drawn_job(mutant: Mutant, tests: list[Covering], report: Report) -> Job:
    """Try a few quick tests; if they pass, the rest."""
    first = _within(tests, FIRST_SECONDS, most_files=3)
    rest = [test for test in tests if test not in first]

    def begin(copy: Path) -> None:
        plant(mutant, copy)

    def job(part: list[Covering], then: Job | None) -> Job:
        def end(copy: Path, code: int | None, text: str) -> Job | None:
            restore(mutant, copy)
            if code == 0 and then:
                return then
            by = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
            verdict = VERDICTS.get(code, f"ended with {code}")
            if code and "Failed: Timeout" in text:
                verdict = VERDICTS[None]
            report.add(mutant, verdict, by.group(1) if by and code else "")
            return None

        names = [test.name for test in part]
        limit = max(30.0, 6 * max(test.seconds for test in part))
        files = sorted({test.file for test in part})
        arguments = ["-x", f"--timeout={limit:.0f}", "-o", "timeout_func_only=true", *files]
        return Job(begin, arguments, 90.0 + 4 * _duration(part), end, (Selection(names),))

    return job(first, job(rest, None) if rest else None)


def drawn_jobs(options: argparse.Namespace, report: Report) -> tuple[list[str], list[Job]]:
    """The bugs drawn, and the jobs for those without a verdict."""
    known = {entry[:3]: entry.reason for entry in equivalents()}
    every = drawn(options.random, options.seed, options.packages)
    folders = [f"tests/{name}" for name in options.packages] + options.tests
    choice = Choice(coverage_map(options.packages, folders, options.workers), options.packages)
    bugs, jobs = [], []
    for mutant, edit in every:
        if options.words and not any(word in mutant.bug for word in options.words):
            continue
        bugs.append(mutant.bug)
        reason = known.get((mutant.file, _brief(mutant.old), _brief(mutant.new)))
        if mutant.bug in report.verdicts:
            continue
        tests = choice.of(mutant, edit, options.seconds)
        if reason:
            report.add(mutant, "equivalent", reason)
        elif not tests:
            report.add(mutant, "SURVIVED", "no test executes it")
        else:
            jobs.append(drawn_job(mutant, tests, report))
    return bugs, jobs


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--random", type=int, default=0, help="draw this many mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES))
    parser.add_argument("--tests", nargs="+", default=[], help="more folders of tests to try")
    parser.add_argument("--seconds", type=float, default=90.0, help="recorded test time per mutant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="keep verdicts here, and skip those it has")
    options = parser.parse_args(arguments)
    report = Report(options.out)
    if options.random:
        bugs, jobs = drawn_jobs(options, report)
    else:
        words = options.words
        chosen = [m for m in mutants() if not words or any(word in m.bug for word in words)]
        bugs = [mutant.bug for mutant in chosen]
        jobs = [listed_job(m, report) for m in chosen if m.bug not in report.verdicts]
    run_jobs(jobs, options.workers)
    counts = Counter(report.verdicts[bug] for bug in bugs)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    alive = [bug for bug in bugs if not re.match("killed|equivalent", report.verdicts[bug])]
    print(f"{len(bugs) - len(alive)} passed, {len(alive)} failed")
    if alive:
        raise SystemExit("survived:\n" + "\n".join(alive))


if __name__ == "__main__":
    main(sys.argv[1:])
