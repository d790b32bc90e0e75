"""Small stand-ins for tests of the study: rows, facts, and work that needs no model."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from lipscope.study.jobs import Job, Outcome
from lipscope.study.records import Description, Fingerprint, Row, Sensitivity, StudyHeader

IDENTITY = Fingerprint(
    weights="w" * 64,
    config="c" * 64,
    revision="none",
    tokenizer="t" * 64,
    text="x" * 64,
    special_tokens=False,
    dtype="float64",
    mask="bidirectional",
    tol=1e-6,
    seed=0,
    numeric_version=1,
)
ABOUT = Description(
    model="fake/model",
    architecture="FakeModel",
    layers=3,
    heads=2,
    device="cpu",
    text="a text",
    text_tokens=1000,
    scopes={"heads": "each head", "attention": "all heads"},
    difference_to_eager=0.0,
    confidence=1 - 1e-9,
    versions={"lipscope": "0"},
    command="lipscope measure",
)


def info(**changes) -> StudyHeader:
    """The facts of a study, with some of its identity changed."""
    return StudyHeader(replace(IDENTITY, **changes), ABOUT)


def row(scope="attention", layer=0, head=None, n=8, sample=0, value=2.0, **changes) -> Row:
    fields = {
        "probe": "sigma", "scope": scope, "layer": layer, "head": head, "n": n, "sample": sample,
        "kind": "local", "norm": "2",
        "value": value, "lower": value * (1 - 1e-12), "upper": value * 1.01,
        "residual": 1e-7, "status": "converged", "radius": 3.0, "dtype": "float64", "device": "cpu",
        "seconds": 0.01,
    }  # fmt: skip
    return Row(**{**fields, **changes})


def sensitivity(of: Row) -> Sensitivity:
    weights = [1.0 + i for i in range(of.n)]
    norm = math.sqrt(sum(w * w for w in weights))
    right = tuple(w / norm for w in weights)
    return Sensitivity(of.scope, of.layer, of.head, of.n, of.sample, right, right[::-1])


def jobs(count: int, layers: int = 4) -> list[Job]:
    return [
        Job(8 * (1 + i // layers), (0,), i % layers, ("attention",), (0, 1)) for i in range(count)
    ]


def answer(job: Job) -> Outcome:
    """A made-up but fixed result for a job."""
    rows = tuple(
        row(scope, layer, head, n, sample, value=math.sqrt(n) * (1 + (layer or 0)) + sample)
        for scope, layer, head, n, sample in job.row_keys()
    )
    return Outcome(job, rows, tuple(sensitivity(r) for r in rows))


@dataclass(frozen=True)
class Start:
    """Work for a worker: `deadly` layers kill it `deaths` times (counted in files in `notes`)."""

    notes: Path
    deadly: tuple[int, ...] = ()
    deaths: int = 0
    seconds: float = 0.0

    def __call__(self, threads: int):
        return self.work

    def work(self, job: Job) -> Outcome:
        time.sleep(self.seconds)
        if job.layer == -2:
            raise RuntimeError("this job\ncannot be done")
        if job.layer in self.deadly:
            seen = len(list(self.notes.glob(f"{job.n}-{job.layer}-*")))
            if seen < self.deaths:
                (self.notes / f"{job.n}-{job.layer}-{seen}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        (self.notes / f"done-{job.n}-{job.layer}-{os.getpid()}").touch()
        return answer(job)


def die_at_birth(threads: int):
    os.kill(os.getpid(), signal.SIGKILL)


def refuse_at_birth(threads: int):
    from lipscope._types import UserError

    raise UserError("no such model")


def keep_slowly(directory: str, count: int) -> None:
    """A study of `count` fake jobs in a process that may be killed; prints every stored job."""
    from lipscope.study.run import run_jobs
    from lipscope.study.store import Store

    def work(job: Job) -> Outcome:
        time.sleep(0.01)
        return answer(job)

    store = Store.create(Path(directory), info())
    done = store.done("sigma")
    todo = [job for job in jobs(count) if not set(job.row_keys()) <= done]
    run_jobs(work, None, todo, store, info(), progress=lambda done, total: print(done, flush=True))


def roll_back(directory: Path) -> None:
    """Undo what a killed run had begun, as the next run does: reading alone changes nothing."""
    from lipscope.study.directory import claim

    claim(directory).release()


def many_rows(number: int) -> list[Row]:
    """The rows of a job: enough of them that a transaction changes several pages."""
    return [row("heads", layer, 0, 8 + number, 0, value=1.0 + layer) for layer in range(40)]


def keep_and_merge(top: str, jobs: int, synchronous: str = "") -> None:
    """Write a study and merge it; note each job on stderr when the store has acknowledged it."""
    from lipscope.study.store import Store
    from lipscope.study.study import merge_directories as merge

    place = Path(top) / "new" / "study"
    store = Store.create(place, info())
    if synchronous:
        store._db.execute(f"PRAGMA synchronous = {synchronous}")
    for number in range(jobs):
        rows = many_rows(number)
        store.write(rows, [sensitivity(one) for one in rows[:5]])
        os.write(2, f"job {number}\n".encode())
    store.close()
    merge(Path(top) / "merged", [place])
    os.write(2, b"merged\n")


def start_answering(threads: int):
    """Empty work for a worker: a made-up result, at once."""
    return answer
