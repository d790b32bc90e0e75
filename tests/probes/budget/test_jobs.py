"""Budgets in a study: resumed runs add up to the same numbers, and every number is a row."""

import csv
import io
import math

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.probes.budget import prediction
from lipscope.probes.budget.jobs import stored_budgets
from lipscope.study.export import write_csv
from lipscope.study.study import merge_directories as merge
from tests.probes.budget.tiny import some_ids, tiny
from tests.study.tiny import PROSE, save_tiny

FORMATS = "bf16,int8,kv4"


def priced(**options):
    given = {"formats": FORMATS, "probes": 3, "observe": True, **options}
    return ls.error_budget(tiny("llama"), some_ids(3, 12), **given)


@pytest.mark.wide
def test_a_run_that_was_interrupted_resumes(tmp_path, monkeypatch):
    whole, worked = priced(), []
    price = prediction._price_sequence

    def counted(work, wanted, b):
        worked.append((b, [f.name for f in wanted]))
        if len(worked) == 3:
            raise KeyboardInterrupt
        return price(work, wanted, b)

    monkeypatch.setattr(prediction, "_price_sequence", counted)
    with pytest.raises(KeyboardInterrupt):
        priced(out=tmp_path)
    again = priced(out=tmp_path)
    assert [b for b, _ in worked] == [0, 1, 2, 2]
    assert again.records() == whole.records() and again.second_order == whole.second_order
    assert priced(out=tmp_path).records() == whole.records() and len(worked) == 4
    priced(out=tmp_path, formats="int8,int4:16")
    assert worked[4:] == [(b, ["int4:16"]) for b in range(3)]


@pytest.mark.wide
def test_a_study_gives_its_budgets_back(tmp_path):
    made = priced(out=tmp_path)
    study = ls.Study.open(tmp_path)
    (found,) = stored_budgets(study)
    assert found.records() == made.records()
    assert (found.sequences, found.tokens, found.probes) == (3, 36, 3)
    with pytest.raises(ls.UserError, match="no model to compute tolerances"):
        found.tolerance(0, "bf16")


@pytest.mark.wide
def test_every_number_is_a_row_of_the_study(tmp_path):
    made = priced(out=tmp_path)
    study, text = ls.Study.open(tmp_path), io.StringIO()
    write_csv(study, text)
    rows = list(csv.DictReader(io.StringIO(text.getvalue())))
    totals = [r for r in rows if r["kind"] == "total" and r["probe"].startswith("budget")]
    assert len(totals) == 9 and len(rows) == 3 * (len(made.rows) + 6)
    # Sequences of equal size: squared errors are averaged, up to the sizes of their outputs.
    for name in made.formats:
        values = [float(r["value"]) for r in totals if r["probe"] == f"budget: {name}"]
        mean = math.sqrt(sum(v * v for v in values) / 3)
        assert math.isclose(mean, made.total(name).value, rel_tol=0.05)
    assert not study.sigma and not study.failed and study.unfinished == ""


@pytest.mark.wide
def test_worst_cases_are_kept_and_resumed(tmp_path, monkeypatch):
    made = priced(out=tmp_path, formats="bf16,int8", worst=True)
    assert set(made.worst) == {"int8"} and made.worst == priced(worst=True, formats="int8").worst
    (found,) = stored_budgets(ls.Study.open(tmp_path))
    assert found.worst == made.worst
    rows = [row for row in ls.Study.open(tmp_path).rows if row.probe.startswith("worst case")]
    assert [(row.extra["format"], row.value) for row in rows] == list(made.worst.items())
    asked, price = [], prediction.worst_cases

    def counted(subject, formats, metric, progress):
        asked.append([f.name for f in formats])
        return price(subject, formats, metric, progress)

    monkeypatch.setattr(prediction, "worst_cases", counted)
    again = priced(out=tmp_path, formats="int8,kv4", worst=True)
    assert asked == [["kv4"]] and again.worst["int8"] == made.worst["int8"]
    assert set(again.worst) == {"int8", "kv4"}
    assert priced(out=tmp_path, formats="int8").worst == {}
    with pytest.raises(ls.UserError, match="worst case is of the output"):
        priced(metric="kl", worst=True)


@pytest.mark.wide
def test_progress_covers_the_worst_case(tmp_path):
    shares = []
    priced(formats="int8", worst=True, progress=lambda done, total: shares.append(done / total))
    assert shares == sorted(shares) and shares[0] == 0 and shares[3] == 0.5
    assert 0.5 < shares[-2] < 1 == shares[-1]


@pytest.mark.wide
def test_what_cannot_be_resumed_is_refused(tmp_path):
    with pytest.raises(ls.UserError, match="functions cannot be recognised"):
        priced(out=tmp_path, formats={"mine": torch.round})
    plain = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    with pytest.raises(ls.UserError, match="not a transformers model"):
        ls.error_budget(plain, torch.arange(9), formats="int8", out=tmp_path)
    priced(out=tmp_path)
    with pytest.raises(ls.UserError, match="seed"):
        priced(out=tmp_path, seed=1)


@pytest.mark.wide
def test_workers_and_shards_give_the_same_numbers(tmp_path):
    model = ls.load(save_tiny(tmp_path / "tiny", layers=2))
    asked = {"formats": FORMATS, "probes": 3, "observe": True, "worst": True}
    asked |= {"length": 12, "samples": 3}

    def rows(study):
        return [row._replace(seconds=0) for row in ls.Study.open(study).rows]

    whole = ls.error_budget(model, PROSE, **asked, out=tmp_path / "whole")
    parallel = ls.error_budget(model, PROSE, **asked, workers=2, out=tmp_path / "workers")
    assert parallel.as_dict() == whole.as_dict()
    assert rows(tmp_path / "workers") == rows(tmp_path / "whole")
    parts = [tmp_path / str(k) for k in (1, 2, 3)]
    for k, part in enumerate(parts, 1):
        ls.error_budget(model, PROSE, **asked, shard=(k, 3), out=part)
    merge(tmp_path / "all", parts)
    assert rows(tmp_path / "all") == rows(tmp_path / "whole")
    again = ls.error_budget(model, PROSE, **asked, out=tmp_path / "all")
    assert again.as_dict() == whole.as_dict()
