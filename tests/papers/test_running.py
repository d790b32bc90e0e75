"""Claims are chosen, run once, kept, resumed, spread over workers, merged and judged."""

import json
import os
import signal
from dataclasses import replace
from functools import partial

import pytest

from lipscope import UserError, __version__
from lipscope.cli import main
from lipscope.models import embedded
from lipscope.papers import setting as settings
from lipscope.papers.claims import PAPERS, QUOTED, Kind, NotAvailable, judged
from lipscope.papers.running import (
    PAGE,
    ClaimJob,
    ClaimWork,
    Record,
    chosen,
    claims,
    code_of,
    decide,
    find_record,
    group_of,
    open_claims,
    reproduce_papers,
    start_claims,
)
from lipscope.papers.setting import Setting
from lipscope.study.directory import FILE
from lipscope.study.store import Store
from lipscope.study.study import merge_directories as merge
from tests.papers.planted import claim

IDS = [
    *(f"C{i}" for i in range(1, 35)),
    *(f"S{i}" for i in range(1, 12)),
    *(f"V{i}" for i in range(1, 9)),
    *(f"N{i}" for i in range(1, 4)),
    *(f"K{i}" for i in range(1, 11)),
    "A1",
]


def test_all_67_claims_are_registered_once_with_their_source():
    found = claims()
    assert [one.id for one in found] == IDS and len(IDS) == 67
    assert set(QUOTED) == set(IDS)
    for one in found:
        assert one.paper in PAPERS and one.says and one.needs and QUOTED[one.id].source


def test_claims_are_chosen_by_name_range_and_paper():
    assert [c.id for c in chosen(None, ["C3", "S1-S3"])] == ["C3", "S1", "S2", "S3"]
    assert {c.paper for c in chosen("kim2021")} == {"kim2021"}
    assert len(chosen("castin2024")) == 56
    with pytest.raises(UserError, match=r"there is no claim 'C35'.*--list"):
        chosen(None, ["C35"])
    with pytest.raises(UserError, match="there is no claim 'K1' of castin2024"):
        chosen("castin2024", ["K1"])
    with pytest.raises(UserError, match="there is no paper 'smith2020'"):
        chosen("smith2020")


def test_the_command_lists_claims_as_lines_and_as_json(capsys):
    assert main(["reproduce", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == IDS
    assert main(["reproduce", "kim2021", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0].keys() == {"id", "paper", "says", "needs"} and found[0]["id"] == "K1"


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


def two(setting):
    return {"x": 2}


def text(setting):
    return {"x": 2, "length": len(setting.text("alice")[0])}


def test_numbers_name_the_prose_and_another_text_runs_the_claim_again(
    registered, tmp_path, monkeypatch
):
    registered.append(claim(text))
    (outcome,) = reproduce_papers(out=tmp_path)
    assert outcome.word == "STAND-IN: REPRODUCED"
    assert "sha256" not in outcome.verdict.reason and "sha256" in outcome.record.used["alice"]
    monkeypatch.setattr(embedded, "default_text", lambda: "Another text.")
    settings._prose_digest.cache_clear()
    (outcome,) = reproduce_papers(out=tmp_path)
    settings._prose_digest.cache_clear()
    assert outcome.record.numbers["length"] == len("Another text.")


def test_every_stand_in_is_found_again(tmp_path):
    """What a run notes is what the next one compares, for the long-context model too."""
    store, setting = open_claims(None), Setting(quick=True)
    for one in chosen(None, ["S11", "V7"]):
        for name in ("long-context", "bert-base-uncased", "gpt2"):
            assert setting.folder(name) is None
        used = setting.used | {"long-context": "stand-in a Llama with random weights"}
        found = Record(one.id, {}, True, 0, "cpu", 1.0, used, code=code_of(one))
        store.put(*found.stored())
        assert find_record(store, one, Setting(quick=True)) == found
        assert find_record(store, one, Setting(quick=False)) is None


def test_the_newest_record_of_one_set_of_conditions_counts(tmp_path):
    store, one = open_claims(tmp_path), claim(two)
    for x in (1, 2):
        store.put(*Record("C1", {"x": x}, False, 0, "cpu", 1.0, {}, code=code_of(one)).stored())
    store.close()
    store = open_claims(tmp_path)
    assert find_record(store, one, Setting()).numbers == {"x": 2}
    store.close()


def test_runs_of_two_machines_are_merged_in_any_order(registered, tmp_path, capsys):
    registered += [claim(two, needs="gpu"), claim(two, id="C2")]
    for place, options in (("gpu", {"device": "cuda"}), ("cpu", {}), ("quick", {"quick": True})):
        only = None if place == "cpu" else ["C1"]
        reproduce_papers(only=only, out=tmp_path / place, **options)
    for i, parts in enumerate((["gpu", "cpu", "quick"], ["quick", "cpu", "gpu"])):
        out = tmp_path / f"both {i}"
        assert main(["merge", str(out), *(str(tmp_path / part) for part in parts)]) == 0
        assert "4 claims are in" in capsys.readouterr().err
        for quick in (True, False):
            first, second = reproduce_papers(out=out, quick=quick)
            assert (first.record.device, first.record.quick) == ("cuda", False)
            assert (second.record.device, second.record.quick) == ("cpu", False)


def test_damage_is_named_and_the_rest_can_be_repaired(registered, tmp_path, capsys):
    registered += [claim(two), claim(two, id="C2")]
    out = tmp_path / "papers"
    reproduce_papers(out=out)
    content = (out / FILE).read_bytes()
    assert content.count(b'"id": "C2", "numbers": {"x": 2}') == 1
    (out / FILE).write_bytes(
        content.replace(b'"id": "C2", "numbers": {"x": 2}', b'"id": "C2", "numbers": {"x": 7}')
    )
    with pytest.raises(UserError, match="lost claim C2 full seed 0"):
        reproduce_papers(out=out)
    assert main(["doctor", str(out), "--repair"]) == 3
    printed = capsys.readouterr().out
    assert "lost: claim C2 full seed 0" in printed and "holds 1 intact claims; lost: 1" in printed
    registered[1] = claim(lambda setting: {"x": 3}, id="C2")
    first, second = reproduce_papers(out=tmp_path / "papers.repaired")
    assert first.word == "REPRODUCED" and second.word == "DIFFERS"


def test_the_directory_of_another_study_is_refused(registered, tmp_path):
    from tests.study.fakes import info

    Store.create(tmp_path, info()).close()
    with pytest.raises(UserError, match="is a study of another model"):
        reproduce_papers(out=tmp_path)


def measured_once(folder, setting):
    """A measurement that several claims share, which leaves a file each time it is made."""

    def make():
        made = len(list(folder.iterdir()))
        (folder / f"{os.getpid()}-{made}").touch()
        return {"x": 2, "pid": os.getpid()}

    return setting.shared("once", make)


def die(setting):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(setting):
    raise ZeroDivisionError("by zero")


def lack(setting):
    raise NotAvailable("a GPU")


def test_groups_are_the_claims_that_share_a_measurement():
    groups = {}
    for one in claims():
        groups.setdefault(group_of(one), []).append(one.id)
    together = [ids for ids in groups.values() if len(ids) > 1]
    assert ["C1", "C2", "C3", "C4"] in together and ["C25", "C26", "C27", "C28", "C29"] in together
    assert ["K4", "K5"] in together and ["K7", "K8"] in together
    assert ["C30"] in groups.values()


@pytest.mark.wide
def test_two_workers_give_what_one_process_gives(tmp_path):
    only = ["C34", "S1", "S3", "S9", "S10", "V4"]
    alone = reproduce_papers(only=only, quick=True)
    shared = reproduce_papers(only=only, quick=True, workers=2, out=tmp_path)
    for one, other in zip(alone, shared, strict=True):
        assert (one.claim.id, one.word) == (other.claim.id, other.word)
        assert one.record.used == other.record.used and other.record.code
        expected = pytest.approx(other.verdict.interval or (), rel=1e-6)
        assert (one.verdict.interval or ()) == expected
    again = reproduce_papers(only=only, quick=True, workers=2, out=tmp_path)  # judged alone
    assert [one.record for one in again] == [one.record for one in shared]


@pytest.mark.wide
def test_a_claim_that_kills_its_worker_fails_alone_and_the_rest_is_kept(
    registered, tmp_path, capsys
):
    (tmp_path / "made").mkdir()
    run = partial(measured_once, tmp_path / "made")
    registered += [
        claim(die, id="C1"),
        *(claim(run, id=f"C{i}") for i in (2, 3, 4)),
        claim(fail, id="C5"),
        claim(lack, id="C6"),
    ]
    command = ["reproduce", "--workers", "2", "--out", str(tmp_path / "out")]
    assert main(command) == 3
    lines = capsys.readouterr().out.splitlines()
    words = [line.split()[:2] for line in lines[:6]]
    assert words == [
        ["C1", "FAILED"],
        ["C2", "REPRODUCED"],
        ["C3", "REPRODUCED"],
        ["C4", "REPRODUCED"],
        ["C5", "FAILED"],
        ["C6", "NEEDS"],
    ]
    assert "the worker died while running this job, 3 times" in lines[0]
    assert "ZeroDivisionError: by zero" in lines[4]
    # Three claims share one measurement: made once, or once more where a worker had died.
    assert len(list((tmp_path / "made").iterdir())) <= 2
    del registered[0]
    registered[3] = claim(lambda setting: {"x": 2}, id="C5")
    outcomes = reproduce_papers(out=tmp_path / "out")
    assert [one.word for one in outcomes] == ["REPRODUCED"] * 4 + ["NEEDS"]
    assert len({one.record.numbers["pid"] for one in outcomes[:3]} - {os.getpid()}) >= 1


def test_a_worker_with_another_version_or_without_the_folders_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"the worker has lipscope .*, not 0\.0"):
        start_claims("0.0", claims, Setting().options, 1)
    options = Setting(models=tmp_path).options
    tmp_path.rmdir()
    with pytest.raises(UserError, match="models must be a folder"):
        start_claims(__version__, claims, options, 1)


def test_what_is_missing_is_named_and_not_kept():
    work = ClaimWork({"C1": claim(lack)}, Setting())
    found = work(ClaimJob("C1", ""))
    assert found.failure == "needs: a GPU" and not found.records


def test_shards_share_the_claims_and_are_merged(registered, tmp_path):
    registered += [claim(lambda setting: {"x": 2}, id=f"C{i}") for i in range(1, 7)]
    parts = [tmp_path / str(k) for k in (1, 2, 3)]
    ran = [
        one.claim.id
        for k, part in enumerate(parts, 1)
        for one in reproduce_papers(out=part, shard=(k, 3))
    ]
    assert sorted(ran) == [f"C{i}" for i in range(1, 7)]
    merge(tmp_path / "all", parts)
    seen = []
    outcomes = reproduce_papers(out=tmp_path / "all", progress=lambda *at: seen.append(at))
    assert [one.word for one in outcomes] == ["REPRODUCED"] * 6 and seen == [(0.0, 0)]


def test_workers_are_checked_before_anything_is_run(capsys):
    assert main(["reproduce", "--workers", "0"]) == 2
    assert "workers must be at least 1" in capsys.readouterr().err
