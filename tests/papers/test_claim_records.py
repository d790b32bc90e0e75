"""Records of claims: found under the same conditions alone, damage reported."""

import json

import pytest

from lipscope import UserError
from lipscope.cli import main
from lipscope.models import embedded
from lipscope.papers import setting as settings
from lipscope.papers.claim_runs import Record, code_of, find_record, open_claims
from lipscope.papers.registry import chosen
from lipscope.papers.running import reproduce_papers
from lipscope.papers.setting import Setting
from lipscope.study.directory import FILE
from lipscope.study.salvage import CLAIM
from lipscope.study.store import Store
from tests.papers.planted import claim


def two(setting):
    return {"x": 2}


def text(setting):
    return {"x": 2, "length": len(setting.text("alice")[0])}


def test_a_record_is_kept_in_the_store_of_a_study(registered, tmp_path):
    registered.append(claim(two))
    (outcome,) = reproduce_papers(out=tmp_path)
    store = Store.open(tmp_path)
    ((key, value),) = store.records(CLAIM)
    store.close()
    assert key == outcome.record.key and key.startswith("C1 full seed 0 cpu ")
    assert Record(**json.loads(value)) == outcome.record


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
