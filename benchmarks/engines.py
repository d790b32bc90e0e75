"""What an engine costs: one study in this process and on local workers; empty jobs per second.

    python benchmarks/engines.py [--workers 2] [--empty 500] [--repeat 2]

All in one run, the engines in turn, so that a busy machine is busy for all of them. The study is
a tiny encoder with random weights: its jobs take a few milliseconds, so that overheads show. Its
exports are compared; they must be equal apart from the seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.study.engines import open_engine
from lipscope.study.run import DEFAULTS, run_measurement
from lipscope.study.store import Store
from tests.study.fakes import answer, info, jobs, start_answering
from tests.study.printed import exported
from tests.study.tiny import PROSE, save_tiny

LENGTHS, JOBS = range(8, 28), 100


def study_seconds(model: Model, engine: Callable[..., object]) -> tuple[float, list[str]]:
    """Seconds for a study of 20 lengths x 5 layers, and its export."""
    began = time.perf_counter()
    settings = {**DEFAULTS, "lengths": LENGTHS, "samples": 1}
    study = run_measurement(
        model,
        PROSE,
        settings,
        engine=engine,  # type: ignore[arg-type]  # also engines that measure does not offer
    )
    return time.perf_counter() - began, exported(study)


@contextmanager
def given(engine: object) -> Iterator[object]:
    yield engine


class Rate(NamedTuple):
    """Jobs per second, and milliseconds of CPU time per job in the process that writes.

    A busy machine lowers the first; the second stays about the same.
    """

    per_second: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.per_second:.0f} per second, {self.cpu:.1f} ms of CPU time each"


def rate(work: Callable[[], object], count: int) -> Rate:
    began, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return Rate(count / seconds, 1e3 * cpu / count)


def stored(count: int) -> Rate:
    """How fast the writer alone stores jobs, on the disk of the temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(Path(folder) / "study", info())
        outcomes = [answer(job) for job in jobs(count)]

        def write() -> None:
            for outcome in outcomes:
                store.write(outcome.rows, outcome.sensitivities)

        found = rate(write, count)
        store.close()
    return found


def compare(engines: dict[str, object], repeat: int) -> list[tuple[str, float]]:
    """Median seconds per engine, in turns; each has run once before, and has its model."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny(Path(folder) / "tiny", layers=5)
        loaded = load(model)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        exports = []
        for turn in range(repeat + 1):
            for name, engine in engines.items():
                taken, export = study_seconds(loaded, partial(given, engine))
                exports.append(export)
                if turn:
                    seconds[name].append(taken)
        assert all(export == exports[0] for export in exports)
    return [(name, median(taken)) for name, taken in seconds.items()]


def main(workers: int, empty: int, repeat: int, others: dict[str, object] | None = None) -> None:
    began = time.perf_counter()
    with open_engine(workers) as engine:
        assert engine is not None
        print(f"cluster up in {time.perf_counter() - began:.1f} s", flush=True)
        list(engine.run(start_answering, jobs(workers)))
        run = rate(lambda: list(engine.run(start_answering, jobs(empty))), empty)
        print(f"empty jobs on {workers} workers: {run}", flush=True)
        if repeat:
            engines = {"in process": None, **(others or {}), f"dask, {workers} workers": engine}
            print(f"study of {JOBS} jobs, median of {repeat}")
            for name, seconds in compare(engines, repeat):
                print(f"  {name:<22} {seconds:6.2f} s   {1e3 * seconds / JOBS:6.1f} ms per job")
        began = time.perf_counter()
    print(f"cluster down in {time.perf_counter() - began:.1f} s")
    print(f"jobs stored by the writer: {stored(empty)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--empty", type=int, default=500)
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    main(options.workers, options.empty, options.repeat)
