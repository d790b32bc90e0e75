"""The lowest versions that pyproject.toml allows: printed as pins, or compared with what is here.

python -m tests.lowest                  # name==version, a line each
python -m tests.lowest --check          # that these versions are the ones that are imported
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def lowest(project: dict) -> dict[str, str]:
    """The lower bound of each dependency at run time, extras included."""
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *extras["data"], *extras["cluster"]]
    found = {}
    for requirement in listed:
        name, bound = re.fullmatch(r"([\w.-]+)(?:>=([\w.]+))?(?:,?<[\w.]+)?", requirement).groups()
        if bound is None:
            raise ValueError(f"{name} has no lower bound in pyproject.toml")
        found[name] = bound
    return found


def declared() -> dict[str, str]:
    return lowest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def same(here: str, bound: str) -> bool:
    """Whether 5.0.0 is 5, and 2.6.0+cpu is 2.6."""

    def parts(text: str) -> list[str]:
        return (text.partition("+")[0] + ".0.0.0").split(".")[:3]

    return parts(here) == parts(bound)


def main(check: bool) -> int:
    wrong = 0
    for name, bound in declared().items():
        if not check:
            print(f"{name}=={bound}")
        elif not same(here := version(name), bound):
            wrong += name != "torch"
            print(f"{name} is {here}, its lower bound {bound}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
