"""Planted bugs, each of which the suite must kill: python -m tests.mutants [WORDS OF A BUG ...]

A mutant is one edit of one file, made in a copy of the project; the tests named with it must then
fail. They are listed in mutants.toml. A mutant whose text is gone from the source, or that
survives, fails the command. With arguments, only the mutants whose description holds one of them
are planted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (".venv", ".git", "__pycache__", "*.html", "*.png")


class Mutant(NamedTuple):
    """What the bug is, where, the text replaced and by what, and the tests that see it."""

    bug: str
    file: str
    old: str
    new: str
    tests: str


def mutants() -> list[Mutant]:
    """The table of mutants.toml."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Mutant(**entry) for entry in table["mutant"]]


def planted(mutant: Mutant, root: Path) -> str:
    """The source with the bug in it."""
    source = (root / mutant.file).read_text(encoding="utf-8")
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.file} holds the text of {mutant.bug!r} {count} times, not once")
    return source.replace(mutant.old, mutant.new)


def killed(mutant: Mutant, copy: Path) -> bool:
    """Plant it, run its tests, take it out again."""
    path, options = copy / mutant.file, ("-x", "-q", "-n", "2", "-p", "no:cacheprovider")
    source = path.read_text(encoding="utf-8")
    path.write_text(planted(mutant, copy), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", *options, *mutant.tests.split()]
        run = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        # A suite that cannot run has not seen the bug.
        return run.returncode != 0 and " failed" in run.stdout
    finally:
        path.write_text(source, encoding="utf-8")


def main(words: list[str]) -> None:
    chosen = [m for m in mutants() if not words or any(word in m.bug for word in words)]
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "lipscope"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for mutant in chosen:
            dead = killed(mutant, copy)
            print(f"{'killed  ' if dead else 'SURVIVED'}  {mutant.bug}", flush=True)
            alive += [] if dead else [mutant.bug]
    print(f"{len(chosen) - len(alive)} passed, {len(alive)} failed")
    if alive:
        raise SystemExit(f"survived: {'; '.join(alive)}")


if __name__ == "__main__":
    main(sys.argv[1:])
