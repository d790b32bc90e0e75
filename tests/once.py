"""Work that many tests look at, done by one worker of pytest-xdist for all of them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def once(factory: pytest.TempPathFactory, name: str, work: Callable[[Path], object]) -> Path:
    """The directory `name` of this run of pytest, filled by `work` where nobody has done so yet."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # every worker has a directory of its own below that of the run
    place, done = base / name, base / f"{name}.done"
    with FileLock(base / f"{name}.lock"):
        if not done.exists():
            place.mkdir(exist_ok=True)
            work(place)
            done.touch()
    return place
