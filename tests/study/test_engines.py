"""One outcome comes back per job, whatever happens to the workers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import dask
import pytest
from distributed import Scheduler
from distributed.deploy.spec import ProcessInterface

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.study import engines
from lipscope.study import jobs as job_module
from lipscope.study.engines import Engine, SchedulerLostError, open_engine
from lipscope.study.jobs import Job, check_engine
from lipscope.study.study import Study
from tests.study.fakes import (
    Start,
    answer,
    die_at_birth,
    jobs,
    refuse_at_birth,
    start_answering,
)
from tests.study.printed import exported

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


ROOT = Path(__file__).resolve().parents[2]


def test_one_worker_is_this_process():
    with open_engine() as engine:
        assert engine is None


@pytest.mark.parametrize(
    ("workers", "cluster", "told"),
    [
        (0, None, "workers must be at least 1, got 0"),
        (2, "tcp://host:1", "give workers or a cluster, not both"),
        (1, "slurm", "'slurm' is not a cluster; give the address of a scheduler"),
        (1, "slurm:many", "slurm:many: give the number of batch jobs, as in slurm:64"),
        (1, "slurm:0", "give the number of batch jobs"),
        (1, "cluster.yaml", "'cluster.yaml' is not a cluster"),
    ],
)
def test_what_is_refused(workers, cluster, told):
    with pytest.raises(UserError, match=told), open_engine(workers, cluster):
        pass


def test_a_scheduler_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(engines, "CONNECT", 1)
    with (
        pytest.raises(UserError, match="no scheduler answers at tcp://"),
        open_engine(1, "tcp://127.0.0.1:1"),
    ):
        pass


def test_a_cluster_that_is_started():
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False}
    options |= {"dashboard_address": None}
    with engines._started("distributed", "LocalCluster", options, 1) as engine:
        assert sorted(engine.run(start_answering, jobs(5))) == sorted(map(answer, jobs(5)))
    with (
        pytest.raises(UserError, match="LocalCluster cannot be started"),
        engines._started("distributed", "LocalCluster", {"n": 1}, 1),
    ):
        pass


def test_an_interrupt_while_the_client_ends_does_not_leave_the_cluster_behind(monkeypatch):
    closed = []

    class Interrupted:
        def __init__(self, *_: object, **__: object) -> None:
            self.loop = MagicMock()

        def close(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("distributed.Client", Interrupted)
    cluster = SimpleNamespace(close=lambda: closed.append(True))
    with pytest.raises(KeyboardInterrupt), engines._connected(cluster):
        pass
    assert closed


class RefusedJob(ProcessInterface):
    """A job that the batch system does not accept."""

    async def start(self):
        raise RuntimeError("Command exited with code 1.\nstderr:\nno partition gpu")


def test_a_job_that_is_refused_ends_the_command():
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard_address": None}}
    options = {"worker": {"cls": RefusedJob}, "scheduler": scheduler}
    told = "SpecCluster cannot be started: Command exited with code 1. stderr: no partition gpu"
    with (
        pytest.raises(UserError, match=told),
        engines._started("distributed", "SpecCluster", options, 2),
    ):
        pass


@pytest.mark.skipif(find_spec("dask_jobqueue") is not None, reason="dask-jobqueue is installed")
def test_a_batch_system_needs_its_package():
    told = "SLURMCluster needs dask-jobqueue; install it with: pip install dask-jobqueue"
    with pytest.raises(UserError, match=told), open_engine(1, "slurm:4"):
        pass


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder of batch jobs; stubs of Slurm's commands run each in a process group of its own."""
    pytest.importorskip("dask_jobqueue")  # its import also sets its part of dask's configuration
    place, batch = tmp_path / "bin", tmp_path / "batch"
    place.mkdir()
    batch.mkdir()
    # dask-jobqueue deletes the script as soon as it is submitted.
    stub(
        place / "sbatch",
        f"script=$(mktemp {batch}/XXXXXX)\ncp $1 $script\n"
        "setsid bash $script > $script.log 2>&1 < /dev/null &\n"
        'echo $! > $script.number\necho "Submitted batch job $!"',
    )
    stub(place / "scancel", f"echo $1 >> {batch}/cancelled\nkill -- -$1")
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with dask.config.set(
        {
            "jobqueue.slurm.cores": 4,  # dask-jobqueue would make 4 workers of it
            "jobqueue.slurm.memory": "4GB",
            "jobqueue.slurm.scheduler-options": {"host": "127.0.0.1", "dashboard_address": None},
            "distributed.deploy.lost-worker-timeout": "1s",
        }
    ):
        yield batch


@pytest.mark.slow
def test_measure_on_two_batch_jobs(slurm, tiny, prose, tmp_path):
    (tmp_path / "text.txt").write_text(prose)
    asked = ["measure", tiny, "--text", str(tmp_path / "text.txt"), "--lengths", "4-9"]
    asked += ["--samples", "1", "--no-report"]
    assert main([*asked, "--out", str(tmp_path / "batch jobs"), "--cluster", "slurm:2"]) == 0
    assert main([*asked, "--out", str(tmp_path / "here")]) == 0
    found, wanted = (Study.open(tmp_path / name) for name in ("batch jobs", "here"))
    assert exported(found) == exported(wanted)
    assert len((slurm / "cancelled").read_text().split()) == 2


def test_a_batch_job_that_ends_is_replaced(slurm, tmp_path):
    with open_engine(1, "slurm:1") as engine:
        outcomes = engine.run(Start(tmp_path, seconds=0.1), jobs(20))
        first = [next(outcomes) for _ in range(3)]
        (number,) = slurm.glob("*.number")
        os.killpg(int(number.read_text()), signal.SIGKILL)  # as at the time limit
        assert sorted([*first, *outcomes]) == sorted(map(answer, jobs(20)))
    assert len(list(slurm.glob("*.number"))) == 2


def test_without_the_commands_of_slurm(slurm, monkeypatch):
    monkeypatch.setenv("PATH", "")
    told = "SLURMCluster cannot be started: .*No such file or directory: 'sbatch'"
    with pytest.raises(UserError, match=told), open_engine(1, "slurm:2"):
        pass


def test_without_dask_the_message_is_the_pip_line(monkeypatch, tiny, capsys):
    monkeypatch.setattr(job_module, "find_spec", lambda name: None)
    check_engine(1, None)
    assert main(["measure", tiny, "--workers", "2"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "lipscope: workers and clusters need dask; install it with: pip install 'lipscope[cluster]'"
    )


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_the_array_script_through_a_stub_of_sbatch(tiny, prose, tmp_path):
    (tmp_path / "text.txt").write_text(prose)
    place = tmp_path / "bin"
    place.mkdir()
    # As Slurm does it: one process per task, which knows its number; a subset has its own count.
    stub(
        place / "sbatch",
        'case "$1" in --array=*) tasks=${1#--array=}; shift;; *) tasks=1,2;; esac\n'
        "count=$(echo $tasks | tr , '\\n' | wc -l)\n"
        "for task in ${tasks//,/ }; do\n"
        "  SLURM_ARRAY_TASK_ID=$task SLURM_ARRAY_TASK_COUNT=$count SLURM_CPUS_PER_TASK=1 "
        'bash "$@"\ndone',
    )
    stub(place / "lipscope", f'exec {sys.executable} -m lipscope "$@"')
    environment = {
        **os.environ,
        "PATH": f"{place}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "LIPSCOPE_SHARDS": "2",
    }
    asked = [tiny, "--text", str(tmp_path / "text.txt"), "--lengths", "4-9", "--samples", "1"]
    script = str(ROOT / "examples" / "slurm_array.sh")
    for options in (["--array=2"], ["--array=1"]):
        subprocess.run(
            ["sbatch", *options, script, "study", *asked],
            cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    parts = sorted((tmp_path / "study.parts").iterdir())
    assert [part.name for part in parts] == ["1", "2"]
    rows = [len(Study.open(part).rows) for part in parts]
    assert all(rows) and "of 12 jobs are done" in Study.open(parts[0]).unfinished
    assert main(["merge", str(tmp_path / "study"), *map(str, parts)]) == 0
    assert main(["measure", *asked, "--no-report", "--out", str(tmp_path / "whole")]) == 0
    merged, whole = (Study.open(tmp_path / name) for name in ("study", "whole"))
    assert exported(merged) == exported(whole) and merged.commands == whole.commands
    assert not merged.unfinished


def stub(path: Path, lines: str) -> None:
    path.write_text(f"#!/bin/bash\nset -e\n{lines}\n")
    path.chmod(0o755)
