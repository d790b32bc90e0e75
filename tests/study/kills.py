"""Kill workers and schedulers at random times; the study must come out as in one calm process.

    python -m tests.study.kills --workers 100 --schedulers 20 [--poison 1000] [--out DIR]

Jobs are made up and take hundredths of a second, so that what is tested is the engine and the
store. Three campaigns, each compared with the export of one process, seconds aside:

workers:    a local cluster of two; after one job in three, a worker that runs a job is killed.
            A job that was hit three times is named, and its rows say so.
schedulers: `dask scheduler` with two workers outside, on loopback; the scheduler is killed, the
            command ends, and is run again on a new one.
poison:     one job among many kills every worker it is given to.

The directory keeps the studies and the counts: the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lipscope._files import whole_file
from lipscope._types import UserError
from lipscope.study.engines import Engine, open_engine
from lipscope.study.jobs import Job
from lipscope.study.store import Store
from tests.study.fakes import Start, answer, info, jobs

# Nothing above loads torch: every worker imports this file when it starts.
ROOT = Path(__file__).resolve().parents[2]
JOBS = 300


@dataclass
class Tally:
    """Counts that survive the process."""

    file: Path
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.file.exists():
            self.counts.update(json.loads(self.file.read_text()))

    def add(self, name: str) -> int:
        self.counts[name] += 1
        with whole_file(self.file) as draft:
            draft.write_text(json.dumps(self.counts))
        return self.counts[name]


def lines(directory: Path) -> list[str]:
    """The export of a study, timing aside."""
    from lipscope.study.study import Study
    from tests.study.printed import exported

    return exported(Study.open(directory))


def calm(directory: Path, todo: list[Job]) -> list[str]:
    """The export of a study that one process made."""
    from lipscope.study.run import run_jobs

    store = Store.create(directory, info())
    run_jobs(answer, None, todo, store, info())
    store.close()
    return lines(directory)


def measure(directory: Path, engine: Engine, start: Start, todo: list[Job], report=None) -> None:
    """The jobs of a study that are not stored yet, as `lipscope measure` runs them."""
    from lipscope.study.run import run_jobs

    store = Store.create(directory, info())
    try:
        done = store.done("sigma")
        left = [job for job in todo if not set(job.row_keys()) <= done]
        opened = partial(nullcontext, engine)
        run_jobs(None, start, left, store, info(), engine=opened, progress=report)
    finally:
        store.close()


def difference(found: list[str], wanted: list[str]) -> tuple[list[str], list[str]]:
    """Rows that failed by name, and everything else that is wrong: lost, double, other."""
    failed = [line for line in found if "the worker died while running this job" in line]
    keys = [tuple(line.split(",")[:6]) for line in found]
    places = {tuple(line.split(",")[:6]) for line in wanted}
    wrong = [f"double: {key}" for key, times in Counter(keys).items() if times > 1]
    wrong += [f"lost: {key}" for key in places - set(keys)]
    wrong += [f"other: {line}" for line in set(found) - set(wanted) - set(failed)]
    return failed, wrong


def kill_workers(place: Path, kills: int, tally: Tally, draw: random.Random) -> list[str]:
    """After one job in three, a worker that runs a job is killed.

    A study whose 300 jobs are done before the last kill is compared, and another one is begun.
    """
    wanted = calm(place / "calm", jobs(JOBS))
    faults: list[str] = []
    notes = place / "notes"
    notes.mkdir(exist_ok=True)
    with open_engine(2) as engine:
        assert engine is not None

        def report(done: float, total: float) -> None:
            if tally.counts["workers killed"] < kills and draw.random() < 0.4:
                delay = draw.uniform(0.0, 0.05)
                threading.Timer(delay, kill_one, (engine, tally, draw)).start()

        while tally.counts["workers killed"] < kills:
            torn = place / f"torn {tally.counts['studies with killed workers']}"
            measure(torn, engine, Start(notes, seconds=0.03), jobs(JOBS), report)
            tally.add("studies with killed workers")
            failed, wrong = difference(lines(torn), wanted)
            faults += wrong
            print(f"{tally.counts['workers killed']} workers killed; {torn.name}:", flush=True)
            print(f"{len(failed)} jobs hit three times, {len(wrong)} faults", *failed, sep="\n")
    return faults


def kill_one(engine: Engine, tally: Tally, draw: random.Random) -> None:
    """Kill a worker that runs a job, if there is one."""
    with suppress(Exception):  # the worker may have ended its job, or be dead already
        tasks = engine.client.processing().items()
        busy = [address for address, keys in tasks if any("run_job" in str(key) for key in keys)]
        chosen = draw.choice(sorted(busy))
        os.kill(engine.client.run(os.getpid, workers=[chosen])[chosen], signal.SIGKILL)
        tally.add("workers killed")


@contextmanager
def outside_cluster(folder: Path):
    """`dask scheduler` and two workers on loopback; yields the address and the scheduler."""
    file = folder / "scheduler.json"
    file.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    python = [sys.executable, "-m"]
    lines = [
        ["distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard",
         "--scheduler-file", str(file)],
        *[["distributed.cli.dask_worker", "--scheduler-file", str(file), "--nthreads", "1",
           "--no-nanny", "--no-dashboard", "--death-timeout", "120"]] * 2,
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            [*python, *line], env=environment, cwd=folder,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for line in lines
    ]  # fmt: skip
    try:
        while not (file.exists() and file.read_text().rstrip().endswith("}")):
            time.sleep(0.1)
        yield json.loads(file.read_text())["address"], processes[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def kill_schedulers(place: Path, kills: int, tally: Tally, draw: random.Random) -> list[str]:
    """The scheduler is killed after a few jobs, and the same command continues on a new one."""
    todo = jobs(JOBS)
    wanted = calm(place / "calm", todo)
    notes, faults = place / "notes", []
    notes.mkdir(exist_ok=True)
    torn = place / f"torn {tally.counts['studies with killed schedulers']}"
    while tally.counts["schedulers killed"] < kills:
        with outside_cluster(place) as (address, scheduler):
            limit = draw.randint(1, 12)

            def report(done: float, total: float, left=[limit], scheduler=scheduler) -> None:  # noqa: B006
                left[0] -= 1
                if left[0] == 0:
                    scheduler.kill()
                    tally.add("schedulers killed")

            try:
                with open_engine(cluster=address) as engine:
                    assert engine is not None
                    measure(torn, engine, Start(notes, seconds=0.01), todo, report)
            except UserError as error:
                if "run the same command again" not in str(error):
                    faults.append(f"another end: {error}")
            kept = len(lines(torn)) - 1
            print(f"{tally.counts['schedulers killed']} schedulers killed; {kept} kept", flush=True)
    with open_engine(2) as engine:
        assert engine is not None
        measure(torn, engine, Start(notes), todo)
    failed, wrong = difference(lines(torn), wanted)
    print(f"{torn.name}: {len(failed)} jobs failed, {len(wrong)} faults", flush=True)
    return faults + wrong


def poison(place: Path, count: int) -> list[str]:
    """One of `count` empty jobs kills every worker it is given to."""
    todo = jobs(count, layers=count)
    deadly = count // 2
    notes = place / "notes"
    notes.mkdir(exist_ok=True)
    with open_engine(2) as engine:
        assert engine is not None
        outcomes = list(engine.run(Start(notes, deadly=(deadly,), deaths=99), todo))
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    good = sorted(outcome for outcome in outcomes if outcome.failure is None)
    tries = len(list(notes.glob(f"8-{deadly}-?")))
    print(f"{len(good)} results, {len(failed)} failed after {tries} tries", flush=True)
    faults = [] if good == sorted(answer(j) for j in todo if j.layer != deadly) else ["other rows"]
    if [outcome.job.layer for outcome in failed] != [deadly]:
        faults.append(f"blamed: {[outcome.job for outcome in failed]}")
    return faults + ([] if tries == 3 else [f"{tries} tries"])


def main(arguments: argparse.Namespace) -> int:
    place = Path(arguments.out or tempfile.mkdtemp(prefix="kills-"))
    draw = random.Random(arguments.seed)
    faults: list[str] = []
    for name, count in (("workers", arguments.workers), ("schedulers", arguments.schedulers)):
        (place / name).mkdir(parents=True, exist_ok=True)
        tally = Tally(place / name / "tally.json")
        if count:
            kill = kill_workers if name == "workers" else kill_schedulers
            faults += kill(place / name, count, tally, draw)
            print(dict(tally.counts), flush=True)
    if arguments.poison:
        with tempfile.TemporaryDirectory() as folder:
            faults += poison(Path(folder), arguments.poison)
    print(*faults, f"{len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=0, help="workers to kill")
    parser.add_argument("--schedulers", type=int, default=0, help="schedulers to kill")
    parser.add_argument("--poison", type=int, default=0, help="jobs, of which one is deadly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="directory to keep everything in; rerun to resume")
    sys.exit(main(parser.parse_args()))
