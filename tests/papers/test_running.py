"""Runs are kept and resumed, damage is noticed, stand-ins are named, failures are counted."""

import json
from dataclasses import replace

import pytest

from lipscope.cli import main
from lipscope.papers.claims import Kind, NotAvailable, judged
from lipscope.papers.running import PAGE, Record, decide, reproduce_papers
from lipscope.papers.setting import Setting
from tests.papers.planted import claim


def test_a_verdict_comes_from_stored_numbers_and_a_stored_claim_is_not_run_again(
    registered, tmp_path
):
    calls = []

    def run(setting):
        calls.append(setting.quick)
        return {"x": 2}

    registered.append(claim(run))
    (first,) = reproduce_papers(out=tmp_path)
    assert first.word == "REPRODUCED" and first.verdict.interval == (1, 3)
    registered[0] = claim(run, lambda numbers, quoted: judged(numbers["x"] == 3, "x against 3"))
    (again,) = reproduce_papers(out=tmp_path)
    assert again.word == "DIFFERS" and calls == [False]  # judged again, not run again
    assert "DIFFERS" in (tmp_path / PAGE).read_text()
    (quick,) = reproduce_papers(out=tmp_path, quick=True)  # a full run is good enough
    assert quick.record.quick is False and calls == [False]
    reproduce_papers(out=tmp_path, seed=1)
    assert calls == [False, False]


def test_numbers_of_another_run_function_are_not_used(registered, tmp_path):
    registered.append(claim(lambda setting: {"x": 2}))
    reproduce_papers(out=tmp_path)
    registered[0] = claim(lambda setting: {"x": 1 + 4})
    (outcome,) = reproduce_papers(out=tmp_path)
    assert outcome.record.numbers == {"x": 5} and outcome.word == "DIFFERS"


def test_a_stand_in_is_named_and_replaced_once_the_text_is_there(registered, tmp_path):
    def run(setting: Setting):
        words, stand_in = setting.text("alice")
        return {"x": 2, "length": len(words), "stand_in": stand_in}

    registered.append(claim(run))
    (outcome,) = reproduce_papers(out=tmp_path / "out")
    assert outcome.word == "STAND-IN: REPRODUCED" and outcome.verdict.kind is Kind.STAND_IN
    assert "Python's help topics in place of alice" in outcome.verdict.reason
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "alice.txt").write_text("Alice was beginning to get very tired")
    (outcome,) = reproduce_papers(out=tmp_path / "out", texts=texts)
    assert outcome.word == "REPRODUCED" and outcome.record.numbers["length"] == 37
    assert outcome.record.used["alice"].startswith("sha256 ")


def test_a_tokenizer_stands_in_only_where_a_text_was_read():
    used = {"gpt2": "random weights, seed 0", "gpt2 tokenizer": "stand-in another one"}
    record = Record("C1", {"x": 2}, True, 0, "cpu", 1.0, used)
    one = claim(lambda setting: {})
    assert decide(one, record).kind is Kind.REPRODUCED
    record = replace(record, used=used | {"alice": "sha256 0"})
    verdict = decide(one, record)
    assert verdict.kind is Kind.STAND_IN and "another one in place of gpt2 tok" in verdict.reason


def test_what_is_missing_is_a_verdict_and_what_fails_is_exit_code_3(registered, capsys, tmp_path):
    def missing(setting):
        raise NotAvailable("a GPU")

    def failing(setting):
        raise ZeroDivisionError("by zero")

    registered.append(claim(missing))
    assert main(["reproduce", "--quiet"]) == 0
    assert main(["reproduce"]) == 0
    assert capsys.readouterr().out.startswith("C1   NEEDS")
    registered[0] = claim(failing)
    registered.append(claim(lambda setting: {"x": 2}, id="C2"))
    assert main(["reproduce", "--json", "--out", str(tmp_path / "out")]) == 3
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found[0]["verdict"] is None and found[0]["reason"] == "ZeroDivisionError: by zero"
    assert found[1]["verdict"] == "REPRODUCED" and found[1]["numbers"] == {"x": 2}
    assert "1 of 2 claims could not be run: C1" in captured.err


def test_an_interrupted_run_resumes_where_it_left_off(registered, tmp_path):
    def interrupted(setting):
        raise KeyboardInterrupt

    calls = []
    registered += [
        claim(lambda setting: calls.append(1) or {"x": 2}),
        claim(interrupted, id="C2"),
    ]
    with pytest.raises(KeyboardInterrupt) as stop:
        reproduce_papers(out=tmp_path)
    (note,) = stop.value.__notes__
    assert "1 of 2 jobs are saved" in note and "to resume" in note
    registered[1] = claim(lambda setting: {"x": 2}, id="C2")
    seen = []
    outcomes = reproduce_papers(out=tmp_path, progress=lambda done, total: seen.append(done))
    assert [one.word for one in outcomes] == ["REPRODUCED"] * 2 and calls == [1]
    assert seen == [0, 1]


def test_a_claim_that_needs_a_gpu_is_run_again_once_there_is_one(registered, tmp_path):
    registered.append(claim(lambda setting: {"x": 2}, needs="gpu"))
    reproduce_papers(out=tmp_path)
    (outcome,) = reproduce_papers(out=tmp_path, device="cuda")
    assert outcome.record.device == "cuda"
    (outcome,) = reproduce_papers(out=tmp_path)
    assert outcome.record.device == "cuda"  # the processor does not undo it


def test_folders_that_are_not_there_are_refused(registered, capsys, tmp_path):
    assert main(["reproduce", "--models", str(tmp_path / "none")]) == 2
    assert "models must be a folder" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["reproduce", "--out", str(tmp_path)]) == 2
    assert "neither a reproduction nor empty" in capsys.readouterr().err
