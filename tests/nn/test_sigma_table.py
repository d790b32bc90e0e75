"""The file of a monitor when something has happened to it: refused at the start, complained of later."""

import csv

import pytest

import lipscope as ls
from lipscope.nn.dot_attention import DotSelfAttention
from lipscope.nn.monitor import SmoothnessMonitor, SmoothnessWarning
from lipscope.nn.sigma_table import HEADER, Reading, SigmaTable
from tests.nn.watched import DIM, HEADS, batches

HEAD = ",".join(HEADER).encode() + b"\n"
LINE = b"0,a,1.0,0.0,5,3,converged\n"
DAMAGE = {
    "not text": HEAD + b"0,\xff\xfe,1.0,0.0,5,3,converged\n1,a",
    "another table": b"a,b\n1,2\n3",
    "a line too short": HEAD + LINE + b"1,a\n2",
    "no number": HEAD + b"one,a,1.0,0.0,5,3,converged\n2",
    "a field without end": HEAD + b'0,"' + b"x" * 200_000 + b"\n1",
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_is_no_table_is_refused_at_the_start_and_left_alone(content, tmp_path):
    path = tmp_path / "sigma.csv"
    path.write_bytes(content)
    with pytest.raises(ls.UserError, match="is no table of a SmoothnessMonitor; choose another file"):
        SmoothnessMonitor(DotSelfAttention(DIM, HEADS), csv=path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_file_damaged_during_the_training_is_complained_of_once(content, tmp_path):
    path = tmp_path / "sigma.csv"
    model, X = DotSelfAttention(DIM, HEADS), batches(1)[0]
    logged = []
    monitor = SmoothnessMonitor(model, every=1, csv=path, log=lambda values, step: logged.append(step))
    model(X)
    monitor.step()
    path.write_bytes(content)
    with pytest.warns(SmoothnessWarning) as caught:
        for _ in range(3):
            model(X)
            assert len(monitor.step()) == 1
    (warning,) = caught
    assert f"step 1: no readings of {path}: it cannot be written" in str(warning.message)
    assert path.read_bytes() == content and logged == [0, 1, 2, 3]


def test_a_file_taken_away_is_begun_again(tmp_path):
    path = tmp_path / "sigma.csv"
    table = SigmaTable(path)
    table.write([Reading(0, "a", 1.0, 0.0, 5, 3, "converged")])
    path.unlink()
    table.write([Reading(1, "a", 2.0, 0.0, 5, 3, "converged")])
    with open(path) as file:
        assert [(row["step"], row["sigma"]) for row in csv.DictReader(file)] == [("1", "2.0")]
