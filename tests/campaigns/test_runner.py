"""A campaign resumes where it stopped, counts nothing twice and does not hide a fault."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures.process import BrokenProcessPool

import pytest

from tests.campaigns.runner import Result, campaign, read


def chunk(number: int) -> Result:
    result = Result(worst={"even": float(number)})
    result.count("even" if number % 2 == 0 else "odd", "problems", 10)
    return result


def faulty(number: int) -> Result:
    result = chunk(number)
    result.faults += [f"chunk {number} is wrong"] if number == 2 else []
    return result


def dies(number: int) -> Result:
    os._exit(1)


def run(monkeypatch, *words: str, work=chunk) -> int:
    monkeypatch.setattr(sys, "argv", ["campaign", *words])
    return campaign(work, 10, 100, "")


def test_it_resumes_after_a_stop_in_the_middle_of_a_line(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run(monkeypatch, "45", "--out", str(out)) == 0
    whole = out.read_text().splitlines(keepends=True)
    assert sorted(json.loads(line)["chunk"] for line in whole) == list(range(5))
    out.write_text("".join(whole[:3]) + whole[3][:7])
    assert run(monkeypatch, "45", "--out", str(out), "--workers", "2") == 0
    assert sorted(json.loads(line)["chunk"] for line in out.read_text().splitlines()) == [*range(5)]
    total, done = read(out, range(5))
    assert done == set(range(5)) and total.total() == {"problems": 50}
    assert total.worst == {"even": 4.0}
    assert "5 of 5 chunks of 10" in capsys.readouterr().out


def test_more_can_be_asked_for_later(monkeypatch, tmp_path):
    out = tmp_path / "out.jsonl"
    for count in ("20", "40", "40"):
        assert run(monkeypatch, count, "--out", str(out)) == 0
    assert len(out.read_text().splitlines()) == 4


def test_a_fault_is_said_each_time(monkeypatch, tmp_path, capsys):
    for _ in range(2):
        assert run(monkeypatch, "--out", str(tmp_path / "out.jsonl"), work=faulty) == 1
        assert "1 faults\nchunk 2 is wrong" in capsys.readouterr().out


def test_what_is_not_done_in_time_is_not_a_success(monkeypatch):
    assert run(monkeypatch, "--minutes", "0") == 1


def test_a_worker_that_dies_ends_the_campaign(monkeypatch):
    with pytest.raises(BrokenProcessPool):
        run(monkeypatch, work=dies)
