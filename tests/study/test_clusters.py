"""Where workers come from, what is refused, and the script for Slurm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.study import clusters
from lipscope.study.clusters import check_engine, open_engine
from lipscope.study.study import Study
from tests.study.fakes import answer, jobs, start_answering
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
        (
            1,
            "slurm:4",
            "SLURMCluster needs dask-jobqueue; install it with: pip",
        ),
        (1, "nowhere.yaml", "cannot read the cluster in nowhere.yaml"),
    ],
)
def test_what_is_refused(workers, cluster, told):
    with pytest.raises(UserError, match=told), open_engine(workers, cluster):
        pass


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("nodes: 3", "takes the keys address, class, kwargs"),
        ("[]", "takes the keys address"),
        ("{", "cannot read the cluster"),
        ("workers: 3", "needs address, or module and class"),
        ("{module: distributed, class: NoCluster}", "distributed has no cluster NoCluster"),
        (
            "{module: no_such_package, class: A}",
            "A needs no-such-package; install it",
        ),
        ("{module: distributed, class: LocalCluster, kwargs: {n: 1}}", "cannot be started"),
    ],
)
def test_a_file_that_names_no_cluster(tmp_path, content, told):
    (tmp_path / "cluster.yaml").write_text(content)
    with pytest.raises(UserError, match=told), open_engine(1, str(tmp_path / "cluster.yaml")):
        pass


def test_a_scheduler_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(clusters, "CONNECT", 1)
    with (
        pytest.raises(UserError, match="no scheduler answers at tcp://"),
        open_engine(1, "tcp://127.0.0.1:1"),
    ):
        pass


def test_a_cluster_from_a_file(tmp_path):
    (tmp_path / "cluster.yaml").write_text(
        "version: 1\nmodule: distributed\nclass: LocalCluster\nworkers: 1\n"
        "kwargs: {n_workers: 1, threads_per_worker: 1, processes: false, dashboard_address: null}\n"
    )
    with open_engine(1, str(tmp_path / "cluster.yaml")) as engine:
        assert engine is not None
        assert sorted(engine.run(start_answering, jobs(5))) == sorted(map(answer, jobs(5)))


def test_without_dask_the_message_is_the_pip_line(monkeypatch, tiny, capsys):
    monkeypatch.setattr(clusters, "find_spec", lambda name: None)
    check_engine(1, None)
    assert main(["measure", tiny, "--workers", "2"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "lipscope: workers and clusters need dask; install it with: pip install 'lipscope[cluster]'"
    )


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
