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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from lipscope.models.loading import load
from lipscope.study.clusters import open_engine
from lipscope.study.jobs import Job, Outcome
from lipscope.study.run import Verb, measure_as
from lipscope.study.store import Store
from tests.study.fakes import answer, info, jobs, start_answering
from tests.study.printed import exported
from tests.study.tiny import PROSE, save_tiny

LENGTHS, JOBS = range(8, 28), 100
Run = Callable[[Sequence[Job]], Generator[Outcome]]


def study_seconds(model: str, engine: Callable[..., object]) -> tuple[float, list[str]]:
    """Seconds for a study of 20 lengths x 5 layers, and its export."""
    began = time.perf_counter()
    study = measure_as(
        Verb("measure"), model, PROSE, LENGTHS, 1, None, None, ("heads", "attention"),
        engine=engine,  # type: ignore[arg-type]
    )  # fmt: skip
    return time.perf_counter() - began, exported(study)


@contextmanager
def given(engine: object) -> Iterator[object]:
    yield engine


def empty_jobs_per_second(run: Run, count: int) -> float:
    began = time.perf_counter()
    assert sum(1 for _ in run(jobs(count))) == count
    return count / (time.perf_counter() - began)


def stored_jobs_per_second(count: int) -> float:
    """Jobs per second that the writer alone can store, on the disk of the temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(Path(folder) / "study", info())
        outcomes = [answer(job) for job in jobs(count)]
        began = time.perf_counter()
        for outcome in outcomes:
            store.write(outcome.rows, outcome.sensitivities)
        seconds = time.perf_counter() - began
        store.close()
    return count / seconds


def compare(engines: dict[str, object], repeat: int) -> list[tuple[str, float]]:
    """Median seconds per engine, in turns; each has run once before, and has its model."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny(Path(folder) / "tiny", layers=5)
        loaded = load(model)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        exports = []
        for turn in range(repeat + 1):
            for name, engine in engines.items():
                taken, export = study_seconds(loaded, partial(given, engine))  # type: ignore[arg-type]
                exports.append(export)
                if turn:
                    seconds[name].append(taken)
        assert all(export == exports[0] for export in exports)
    return [(name, median(taken)) for name, taken in seconds.items()]


def main(workers: int, empty: int, repeat: int, others: dict[str, object] | None = None) -> None:
    began = time.perf_counter()
    with open_engine(workers) as engine:
        assert engine is not None
        opened = time.perf_counter() - began
        table = compare(
            {"in process": None, **(others or {}), f"dask, {workers} workers": engine}, repeat
        )
        run = partial(engine.run, start_answering)
        empty_jobs_per_second(run, workers)
        rate = empty_jobs_per_second(run, empty)
        began = time.perf_counter()
    print(f"study of {JOBS} jobs, median of {repeat}")
    for name, seconds in table:
        print(f"  {name:<22} {seconds:6.2f} s   {1e3 * seconds / JOBS:6.1f} ms per job")
    print(f"cluster up in {opened:.1f} s, down in {time.perf_counter() - began:.1f} s")
    print(f"empty jobs on {workers} workers: {rate:.0f} per second")
    print(f"jobs stored by the writer: {stored_jobs_per_second(empty):.0f} per second")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--empty", type=int, default=500)
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    main(options.workers, options.empty, options.repeat)
