"""One outcome comes back per job, whatever happens to the workers."""

import os
import signal
import threading
import time
from functools import partial

import pytest

from lipscope._types import UserError
from lipscope.study.jobs import Job, run_in_process
from lipscope.study.workers import Workers
from tests.study.fakes import (
    Start,
    answer,
    die_at_birth,
    jobs,
    refuse_at_birth,
    start_leaving_orphans,
)


@pytest.fixture(params=["in process", "workers"])
def run(request, tmp_path):
    start = Start(tmp_path)
    if request.param == "in process":
        return partial(run_in_process, start())
    return Workers(start, 2).run


def test_every_job_has_one_outcome(run):
    todo = jobs(10)
    assert sorted(run(todo)) == sorted(answer(job) for job in todo)


def test_an_exception_is_the_result_of_its_job_alone(run):
    todo = jobs(4)
    bad = Job(8, (0,), -2, ("attention",), ())
    outcomes = {outcome.job: outcome for outcome in run([*todo[:2], bad, *todo[2:]])}
    assert outcomes.pop(bad).failure == "RuntimeError: this job\ncannot be done"
    assert outcomes == {job: answer(job) for job in todo}


def test_no_jobs_no_processes(run):
    assert list(run([])) == []


def test_a_dead_worker_costs_its_job_one_try_and_no_neighbour(tmp_path):
    todo = jobs(8)
    outcomes = list(Workers(Start(tmp_path, deadly=(1,), deaths=2), 2).run(todo))
    assert sorted(outcomes) == sorted(answer(job) for job in todo)
    assert len(list(tmp_path.glob("*-1-*"))) >= 4  # two jobs at layer 1, each killed twice


def test_the_third_death_fails_the_job_and_says_why(tmp_path):
    todo = jobs(4)
    outcomes = {
        o.job.layer: o for o in Workers(Start(tmp_path, deadly=(2,), deaths=99), 2).run(todo)
    }
    assert outcomes[2].failure == "the worker was killed by SIGKILL while running this job, 3 times"
    assert [outcomes[layer] for layer in (0, 1, 3)] == [
        answer(job) for job in todo if job.layer != 2
    ]
    assert len(list(tmp_path.glob("8-2-*"))) == 3


def test_death_is_noticed_though_an_orphan_holds_the_pipe():
    began = time.monotonic()
    outcomes = {o.job.layer: o for o in Workers(start_leaving_orphans, 1).run(jobs(3))}
    assert time.monotonic() - began < 30
    assert outcomes[1].failure is not None and "SIGKILL" in outcomes[1].failure
    assert [outcomes[layer].failure for layer in (0, 2)] == [None, None]


def test_workers_live_long_and_keep_to_their_input(tmp_path):
    todo = jobs(16, layers=8)
    list(Workers(Start(tmp_path, seconds=0.02), 2).run(todo))
    pids = {path.name.split("-")[-1] for path in tmp_path.glob("done-*")}
    assert len(pids) == 2
    first_of = {
        (path.name.split("-")[1], path.name.split("-")[-1]) for path in tmp_path.glob("done-*")
    }
    assert (
        len(first_of) <= 3
    )  # two inputs, two workers: each prepares its own, at most one helps the other out


def test_workers_end_when_the_run_is_left_early(tmp_path):
    outcomes = Workers(Start(tmp_path, seconds=0.05), 2).run(jobs(16))
    next(outcomes)
    pids = {int(path.name.split("-")[-1]) for path in tmp_path.glob("done-*")}
    outcomes.close()
    assert not any(alive(pid) for pid in pids)


def test_workers_that_cannot_start_are_told_once():
    with pytest.raises(
        UserError,
        match=r"do not start: the worker was killed by SIGKILL, 3 times.*__main__.*workers=1",
    ):
        list(Workers(die_at_birth, 2).run(jobs(3)))
    with pytest.raises(UserError, match="no such model"):
        list(Workers(refuse_at_birth, 2).run(jobs(3)))


def test_random_deaths_lose_nothing(tmp_path):
    """Whichever worker is shot, whenever: all jobs come back as if nothing had happened."""
    todo = jobs(24)
    seen: set[int] = set()
    over = threading.Event()

    def shoot():
        while not over.is_set() and len(seen) < 3:
            time.sleep(0.4)
            living = {int(path.name.split("-")[-1]) for path in tmp_path.glob("done-*")} - seen
            for pid in list(living)[:1]:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
                seen.add(pid)

    gun = threading.Thread(target=shoot)
    gun.start()
    outcomes = list(Workers(Start(tmp_path, seconds=0.1), 2).run(todo))
    over.set()
    gun.join()
    assert seen
    assert sorted(outcomes) == sorted(answer(job) for job in todo)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
