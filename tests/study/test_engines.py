"""One outcome comes back per job, whatever happens to the workers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lipscope._types import UserError
from lipscope.study.engines import Engine, SchedulerLostError, open_engine
from lipscope.study.jobs import Job
from tests.study.fakes import (
    Start,
    answer,
    die_at_birth,
    jobs,
    refuse_at_birth,
    start_answering,
)

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine():
    with open_engine(2) as opened:
        assert opened is not None
        yield opened


def test_every_job_has_one_outcome_and_an_exception_is_that_of_its_job(engine, tmp_path):
    todo = jobs(4)
    bad = Job(8, (0,), -2, ("attention",), ())
    found = engine.run(Start(tmp_path), [*todo[:2], bad, *todo[2:]])
    outcomes = {outcome.job: outcome for outcome in found}
    assert outcomes.pop(bad).failure == "RuntimeError: this job\ncannot be done"
    assert outcomes == {job: answer(job) for job in todo}
    assert list(engine.run(Start(tmp_path), [])) == []


@pytest.mark.wide
def test_a_dead_worker_costs_its_job_one_try_and_no_neighbour(engine, tmp_path):
    todo = jobs(8)
    outcomes = list(engine.run(Start(tmp_path, deadly=(1,), deaths=2), todo))
    assert sorted(outcomes) == sorted(answer(job) for job in todo)
    assert len(list(tmp_path.glob("*-1-?"))) == 4  # two jobs at layer 1, each killed twice


def test_the_third_death_fails_the_job_and_says_why(engine, tmp_path):
    todo = jobs(4)
    outcomes = {o.job.layer: o for o in engine.run(Start(tmp_path, deadly=(2,), deaths=99), todo)}
    assert outcomes[2].failure == "the worker died while running this job, 3 times"
    assert [outcomes[layer] for layer in (0, 1, 3)] == [
        answer(job) for job in todo if job.layer != 2
    ]
    assert len(list(tmp_path.glob("8-2-?"))) == 3


def test_workers_live_long_and_keep_to_their_input(engine, tmp_path):
    list(engine.run(Start(tmp_path, seconds=0.02), jobs(16, layers=8)))
    done = [path.name.split("-") for path in tmp_path.glob("done-*")]
    assert len({pid for *_, pid in done}) <= 2
    # Two inputs, two workers: each prepares its own, and at most one helps the other out.
    assert len({(n, pid) for _, n, _, pid in done}) <= 3


def test_a_run_left_early_leaves_the_workers_to_the_next(engine, tmp_path):
    outcomes = engine.run(Start(tmp_path, seconds=0.05), jobs(16))
    next(outcomes)
    outcomes.close()
    time.sleep(0.3)
    before = len(list(tmp_path.glob("done-*")))
    assert sorted(engine.run(start_answering, jobs(4))) == sorted(map(answer, jobs(4)))
    assert len(list(tmp_path.glob("done-*"))) == before < 16


def test_another_run_on_the_same_workers_costs_only_time(engine, tmp_path):
    """A worker keeps one work; that of the first run is set up again when its turn comes."""
    todo = jobs(12)
    first = engine.run(Start(tmp_path), todo)
    found = [next(first), next(first)]
    assert sorted(engine.run(start_answering, jobs(4))) == sorted(map(answer, jobs(4)))
    found += first
    assert sorted(found) == sorted(map(answer, todo))


@pytest.mark.wide
def test_workers_that_cannot_start_are_named_once(engine):
    with pytest.raises(UserError, match="a worker cannot be set up: no such model"):
        list(engine.run(refuse_at_birth, jobs(3)))
    with pytest.raises(UserError, match=r"workers do not start: 3 in a row.*__main__"):
        list(engine.run(die_at_birth, jobs(3)))
    assert len(list(engine.run(start_answering, jobs(3)))) == 3  # the engine survives both


@pytest.mark.wide
def test_random_deaths_lose_nothing(engine, tmp_path):
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
    outcomes = list(engine.run(Start(tmp_path, seconds=0.1), todo))
    over.set()
    gun.join()
    assert seen
    assert sorted(outcomes) == sorted(answer(job) for job in todo)


def test_workers_end_with_the_engine_and_listen_on_loopback_only(tmp_path):
    with open_engine(2) as opened:
        assert isinstance(opened, Engine)
        pids = set(opened.client.run(os.getpid).values())
        assert len(pids) == 2 and all(map(alive, pids))
        addresses = listening({os.getpid(), *pids})
        assert len(addresses) >= 5 and all(a.startswith("0100007F") for a in addresses)
        assert opened.client.scheduler.address.startswith("tls://127.0.0.1:")
        assert all(map(blocks_ctrl_c, pids)) and not blocks_ctrl_c(os.getpid())
    for _ in range(100):
        if not any(map(alive, pids)):
            break
        time.sleep(0.05)
    assert not any(map(alive, pids))


@pytest.mark.wide
def test_the_death_of_a_scheduler_is_one_line(tmp_path):
    """`dask scheduler` and a worker in processes of their own; the scheduler is killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    file = tmp_path / "scheduler.json"
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1",
         "--port", "0", "--no-dashboard", "--scheduler-file", str(file)],
        env=environment, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    worker = subprocess.Popen(
        [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(file),
         "--nthreads", "1", "--no-nanny", "--death-timeout", "60"],
        env=environment, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(600):
            if file.exists() and file.read_text().endswith("}"):
                break
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        with (
            pytest.raises(SchedulerLostError, match="run the same command again to resume"),
            open_engine(cluster=address) as opened,
        ):
            assert opened is not None
            for i, outcome in enumerate(opened.run(Start(tmp_path, seconds=0.02), jobs(500))):
                assert outcome == answer(outcome.job)
                if i == 3:
                    scheduler.kill()
    finally:
        for process in (scheduler, worker):
            process.kill()
            process.wait()


def listening(pids: set[int]) -> list[str]:
    """The local addresses, in hexadecimal, at which some processes wait for connections."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(link))
            except OSError:
                continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                found.append(local)
    return found


def blocks_ctrl_c(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    blocked = next(line for line in lines if line.startswith("SigBlk"))
    return bool(int(blocked.split()[1], 16) >> (signal.SIGINT - 1) & 1)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
