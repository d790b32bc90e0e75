"""The file of a monitor: continued without silent losses; damage is an error, later a warning."""

import csv

import pytest

import lipscope as ls
from lipscope.nn.attention_layer import DotSelfAttention
from lipscope.train.monitor import HEADER, Reading, SigmaTable, SmoothnessMonitor, SmoothnessWarning
from tests.train.watched import DIM, HEADS, batches

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
    with pytest.raises(
        ls.UserError, match="was not written by a SmoothnessMonitor; choose another file"
    ):
        SmoothnessMonitor(DotSelfAttention(DIM, HEADS), csv=path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_file_damaged_during_the_training_is_complained_of_once(content, tmp_path):
    path = tmp_path / "sigma.csv"
    model, X = DotSelfAttention(DIM, HEADS), batches(1)[0]
    logged = []
    monitor = SmoothnessMonitor(
        model, every=1, csv=path, log=lambda values, step: logged.append(step)
    )
    model(X)
    monitor.step()
    path.write_bytes(content)
    with pytest.warns(SmoothnessWarning) as caught:
        for _ in range(3):
            model(X)
            assert len(monitor.step()) == 1
    (warning,) = caught
    assert f"step 1: no readings in {path}: it cannot be written" in str(warning.message)
    assert path.read_bytes() == content and logged == [0, 1, 2, 3]


def test_a_file_taken_away_is_begun_again(tmp_path):
    path = tmp_path / "sigma.csv"
    table = SigmaTable(path)
    table.write([Reading(0, "a", 1.0, 0.0, 5, 3, "converged")])
    path.unlink()
    table.write([Reading(1, "a", 2.0, 0.0, 5, 3, "converged")])
    with open(path) as file:
        assert [(row["step"], row["sigma"]) for row in csv.DictReader(file)] == [("1", "2.0")]


def test_a_resumed_training_continues_the_file_without_doubles(tmp_path):
    path = tmp_path / "sigma.csv"
    model = DotSelfAttention(DIM, HEADS)

    def run(first, last):
        monitor = SmoothnessMonitor(model, every=2, csv=path)
        for number in range(first, last):
            model(batches(1)[0])
            monitor.step(number)

    def steps():
        with open(path) as file:
            return [int(row["step"]) for row in csv.DictReader(file)]

    run(0, 9)
    assert steps() == [0, 2, 4, 6, 8]
    with open(path, "a") as file:
        file.write("10,DotSelf")  # torn by a kill
    run(9, 13)
    assert steps() == [0, 2, 4, 6, 8, 10, 12]
    with pytest.warns(
        SmoothnessWarning, match=r"step 6 was measured again: replaced 4 rows of .*sigma.csv"
    ):
        run(5, 11)
    assert steps() == [0, 2, 4, 6, 8, 10]
    with pytest.warns(SmoothnessWarning, match=r"step 0 was measured again: replaced 6 rows"):
        run(0, 3)
    assert steps() == [0, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["sigma.csv"]


@pytest.mark.filterwarnings("error")
def test_a_monitor_begun_again_without_numbers_goes_on_after_the_last_line(tmp_path):
    path = tmp_path / "sigma.csv"
    model = DotSelfAttention(DIM, HEADS)

    def monitor():
        return SmoothnessMonitor(model, every=2, csv=path)

    def step(monitor, *number):
        model(batches(1)[0])
        return [reading.step for reading in monitor.step(*number)]

    first = monitor()
    assert [step(first) for _ in range(5)] == [[0], [], [2], [], [4]]
    lines = path.read_text().splitlines()
    second = monitor()
    with pytest.warns(
        SmoothnessWarning,
        match=r"sigma.csv ends at step 4: steps without numbers continue from 5; ",
    ):
        assert step(second) == []
    assert [step(second) for _ in range(3)] == [[6], [], [8]]
    assert path.read_text().splitlines()[:4] == lines
    assert [line.split(",")[0] for line in path.read_text().splitlines()[1:]] == [
        "0",
        "2",
        "4",
        "6",
        "8",
    ]
    third = monitor()
    assert step(third, 10) == [10] and [step(third) for _ in range(2)] == [[], [12]]
    announced = monitor()
    announced.before(14)
    assert step(announced) == [14]
