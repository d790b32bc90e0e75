"""Where workers come from, what is refused, and the script for Slurm."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import dask
import pytest
from distributed import Scheduler
from distributed.deploy.spec import ProcessInterface

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.study import engines
from lipscope.study import jobs as job_module
from lipscope.study.engines import open_engine
from lipscope.study.jobs import check_engine
from lipscope.study.study import Study
from tests.study.fakes import Start, answer, jobs, start_answering
from tests.study.printed import exported

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
