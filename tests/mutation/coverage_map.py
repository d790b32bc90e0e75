"""Which tests execute which statements of lipscope, and how long each test takes.

In a copy of the project every statement of the chosen packages first sets a byte of a file that is
mapped into memory, so that child processes are heard as well. The result of a test file is kept in
build/mutants until lipscope, a helper of the tests or that file changes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutation.forks import ROOT, Job, run_jobs

SIZE = 1 << 16
STORE = ROOT / "build" / "mutants"
RECORDER = """
import mmap, pathlib
with open(pathlib.Path(__file__).with_suffix(".bin"), "r+b") as file:
    executed = mmap.mmap(file.fileno(), 0)
"""
TEST_FILE_SECONDS = 1200.0


class Place(NamedTuple):
    """A statement: its file, and its first line."""

    file: str
    line: int


class Covering(NamedTuple):
    """A test that passes, with its duration and the statements it executes.

    `setup` is the duration of the fixtures that the tests of its file share.
    """

    name: str
    seconds: float
    places: frozenset[Place]
    setup: float = 0.0

    @property
    def file(self) -> str:
        return self.name.split("::")[0]


def sources(packages: Sequence[str]) -> list[Path]:
    """The files of these packages."""
    return [path for name in packages for path in sorted((ROOT / "lipscope" / name).glob("*.py"))]


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements below `tree`."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def statements(source: str) -> list[ast.stmt]:
    """All statements, in one fixed order."""
    return [statement for block in blocks(ast.parse(source)) for statement in block]


def _silent(statement: ast.stmt) -> bool:
    """Whether nothing may come before it: a docstring, or an import from the future."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def instrumented(source: str, number: dict[int, int]) -> str:
    """The source with `executed[k] = 1` before each statement, k the number of its line."""
    tree = ast.parse(source)
    for block in list(blocks(tree)):
        marked: list[ast.stmt] = []
        for statement in block:
            if not _silent(statement):
                k = number[statement.lineno]
                marked += ast.parse(f"_executed[{k}] = 1").body
            marked.append(statement)
        block[:] = marked
    start = next((i for i, s in enumerate(tree.body) if not _silent(s)), 0)
    tree.body[start:start] = ast.parse("from lipscope._recorder import executed as _executed").body
    return ast.unparse(ast.fix_missing_locations(tree))


class Recorder:
    """Pytest's plugin: what each test executes. Fixtures count for every test of the file."""

    def __init__(self) -> None:
        self.tests: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.shared: set[int] = set()
        self.setup = 0.0

    def take(self) -> set[int]:
        from lipscope._recorder import executed

        data = executed[:]
        executed[:] = bytes(SIZE)
        return {k for k, byte in enumerate(data) if byte}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.take()  # what importing executes says nothing

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seen = self.take()
        if report.when == "call":
            self.tests[report.nodeid] = sorted(seen)
            self.seconds[report.nodeid] = report.duration
        else:
            self.shared |= seen
            self.setup = max(self.setup, report.duration)
        if report.outcome != "passed":
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = [name for name in self.tests if name not in self.failed]
        found = {
            "shared": sorted(self.shared),
            "setup": self.setup,
            "failed": sorted(self.failed),
            "tests": {name: [self.seconds[name], self.tests[name]] for name in passed},
        }
        Path("found.json").write_text(json.dumps(found))


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def coverage_map(packages: Sequence[str], folders: Sequence[str], workers: int) -> list[Covering]:
    """The tests of `folders` that pass, with what each executes of `packages`."""
    files = sources(packages)
    places = [
        Place(path.relative_to(ROOT).as_posix(), line)
        for path in files
        for line in sorted({s.lineno for s in statements(path.read_text())})
    ]
    number = {place: k for k, place in enumerate(places)}
    helpers = [p for p in (ROOT / "tests").rglob("*.py") if not re.match("test_|mutants", p.name)]
    helpers = [p for p in helpers if p.parent.name != "mutation"]
    house = _digest([*(ROOT / "lipscope").rglob("*.py"), *helpers]) + "-" + "-".join(packages)
    tests = {test for folder in folders for test in sorted((ROOT / folder).glob("test_*.py"))}
    kept = {test: STORE / f"{_digest([test])}-{house}.json" for test in tests}
    STORE.mkdir(parents=True, exist_ok=True)

    def instrument(copy: Path) -> None:
        room = copy / "lipscope"
        (room / "_recorder.bin").write_bytes(bytes(SIZE))
        if not (room / "_recorder.py").exists():
            (room / "_recorder.py").write_text(RECORDER)
            for path in files:
                name = path.relative_to(ROOT).as_posix()
                lines = {place.line: k for place, k in number.items() if place.file == name}
                (copy / name).write_text(instrumented(path.read_text(), lines))

    def job(test: Path) -> Job:
        name = test.relative_to(ROOT).as_posix()

        def keep(copy: Path, code: int | None, text: str) -> None:
            found = copy / "found.json"
            if found.exists():
                found.rename(kept[test])
            print(f"{name}: {text.strip().splitlines()[-1] if text.strip() else code}", flush=True)

        return Job(instrument, [name], TEST_FILE_SECONDS, keep, (Recorder(),))

    lacking = [job(test) for test in sorted(tests) if not kept[test].exists()]
    if lacking:
        run_jobs(lacking, workers)
    result = []
    for test in sorted(tests):
        if kept[test].exists():
            found = json.loads(kept[test].read_text())
            for name, (seconds, seen) in found["tests"].items():
                seen = frozenset(places[k] for k in {*seen, *found["shared"]})
                result.append(Covering(name, seconds, seen, found["setup"]))
    return result
