"""The generated part of docs/error_budgets.md is made from the stored figures."""

import json

import pytest

from benchmarks import error_budget_tables
from benchmarks.error_budget_tables import (
    BEGIN,
    END,
    PAGE,
    bug_outcome,
    claims_table,
    figures,
    long_table,
    runs_table,
    store,
    stored,
)


def test_the_page_has_the_stored_figures():
    text = PAGE.read_text()
    generated = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert generated.strip() == figures(stored()), "python -m benchmarks.error_budgets --page"


def test_a_table_has_the_extremes_of_all_states():
    results = {
        "train/a": {"last": 1.5},
        "runs/a/bf16/64": {"ratios": [1.0, 0.9]},
        "runs/b/bf16/64": {"ratios": [5.0]},
        "runs/a/fp16/128": {"ratios": [1.2, 1.1]},
        "long/8": {"n": 4096, "heads": 6, "seconds": 1.04, "GiB": 2.04, "bytes per token": 1234.5},
    }
    rows = runs_table(results).splitlines()[2:]
    assert rows[0] == "| a | 1.50 | 64, 128 | 2 | 4 | 0.90 to 1.20 |"
    assert rows[1] == "| b | – | 64 | 1 | 1 | 5.00 to 5.00 |"
    assert long_table(results).splitlines()[2:] == ["| 4,096 | 6 | 1.0 | 2.0 | 1,234 |"]
    (claim,) = claims_table(results).splitlines()[2:]
    assert claim.endswith("| 0.85 to 1.15 | 0.9 to 5 | 5 | no |")


@pytest.mark.parametrize(
    ("layer", "named", "outcome"),
    [
        (1, "layer 1", "named at its layer"),
        (1, "layer 2", "named at another layer"),
        (None, "layer 0", "named at its layer"),
        (None, "embeddings", "named at its layer"),
        (0, None, "within the budget"),
    ],
)
def test_outcomes_of_bugs(layer, named, outcome):
    assert bug_outcome({"layer": layer, "named": named}) == outcome


def test_figures_of_another_training_replace_all_figures_of_the_model(tmp_path, monkeypatch):
    place, new = tmp_path / "stored.json", tmp_path / "new.json"
    monkeypatch.setattr(error_budget_tables, "FILES", [place, tmp_path / "none.json"])
    old = {"train/a": {"last": 1}, "runs/a/bf16/64": 1, "train/b": {"last": 2}, "kl/b": 2}
    place.write_text(json.dumps(old))
    new.write_text(json.dumps({"train/a": {"last": 3}, "kl/a": 3, "train/b": {"last": 2}}))
    store([new])
    assert stored() == {"train/b": {"last": 2}, "kl/b": 2, "train/a": {"last": 3}, "kl/a": 3}
