"""SIGKILL at any moment: no stored row is lost, and the final table is that of a full run."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lipscope._types import UserError
from lipscope.study.study import Study
from tests.study.fakes import keep_slowly, roll_back
from tests.study.printed import exported

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.wide
def test_a_few_kills(tmp_path, capsys):
    random.seed(0)
    code = (
        f"from tests.study.fakes import keep_slowly; keep_slowly({str(tmp_path / 'killed')!r}, 60)"
    )
    kept = 0
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()  # the study has begun
        time.sleep(random.uniform(0.0, 0.15))
        os.kill(child.pid, signal.SIGKILL)
        acknowledged = len(child.stdout.read().splitlines())
        child.wait()
        roll_back(tmp_path / "killed")
        rows = len(Study.open(tmp_path / "killed").rows)
        assert rows >= kept + acknowledged
        kept = rows
    assert 0 < kept < 60
    keep_slowly(str(tmp_path / "killed"), 60)
    keep_slowly(str(tmp_path / "calm"), 60)
    assert exported(Study.open(tmp_path / "killed")) == exported(Study.open(tmp_path / "calm"))


def wait_for_growth(directory: Path, rows: int) -> None:
    """Until something new has been kept, at the latest after ten seconds."""
    for _ in range(2000):
        try:
            if len(Study.open(directory).rows) > rows:
                return
        except UserError:
            pass  # not a study yet
        time.sleep(0.005)
