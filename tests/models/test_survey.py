"""The survey of architectures: what it asks, what it plants, and that it can find a fault."""

import json

import pytest
import torch

import lipscope as ls
from lipscope.models.capture import capture
from tests.models import survey, survey_budgets, survey_page
from tests.probes.budget.tiny import some_ids, tiny


@pytest.fixture(scope="module")
def row():
    return survey.examine("gpt2")


@pytest.mark.wide
def test_an_architecture_gets_scopes_budgets_and_verdicts(row):
    assert row["outcome"] == "measured" and "model" in row["scopes"]
    cells = {name: cell["outcome"] for name, cell in row["budgets"].items()}
    assert cells == {
        "bf16": "stated",
        "int8": "stated",
        "kv4": "stated",
        "clean": "explained",
        "planted": "named",
    }
    assert 0.8 <= row["budgets"]["bf16"]["ratio"] <= 1.25


def test_a_bug_is_planted_where_it_matters():
    model = tiny("llama")
    # A dead path: its sign changes nothing, so it must not be chosen.
    for layer in model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.up_proj.weight.data *= 1e-9
    model.layers[2].mlp.up_proj.weight.data *= 1e9
    given = {"text": some_ids(4, 12)}
    bug = survey_budgets.find_bug(model, ["layers"], given)
    assert bug["weight"].startswith("layers.2.mlp.") and bug["layer"] == 2
    exact, wrong = tiny("llama"), model
    exact.load_state_dict(model.state_dict())
    dict(wrong.named_parameters())[bug["weight"]].data.neg_()
    outputs = []
    for one in (exact, wrong):
        with (
            capture({one.layers[2]: "output"}, lambda found: outputs.append(found.value)),
            torch.no_grad(),
        ):
            one(given["text"])
    moved = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert moved > survey_budgets.MATTERS * 2**-9 / 2


def test_a_model_whose_signs_do_not_matter_is_said_to_be_one():
    model = tiny("llama")
    for layer in model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    bug = survey_budgets.find_bug(model, ["layers"], {"text": some_ids(4, 12)})
    assert bug == {"weight": None, "layer": None, "effect": 0.0}


@pytest.mark.wide
def test_wrong_verdicts_are_seen(monkeypatch):
    model, given = ls.load(tiny("llama")), {"text": some_ids(4, 12)}
    cells = dict(survey_budgets.budget_cells(model, given))
    right = ls.check_run
    monkeypatch.setattr(
        ls,
        "check_run",
        lambda a, b, *args, **options: right(a, survey_budgets.in_bf16(a.trunk), *args, **options),
    )
    assert cells["planted"]()["outcome"] == "missed"

    def accuse(a, b, *args, **options):
        b.embed_tokens.weight.data *= 1.1
        return right(a, b, *args, **options)

    monkeypatch.setattr(ls, "check_run", accuse)
    assert cells["clean"]()["outcome"] == "accused"
    assert cells["planted"]()["outcome"] == "elsewhere"


def test_failures_are_told_apart():
    def refuse():
        raise ls.UserError("no")

    def crash():
        raise KeyError("x")

    def wait():
        while True:
            pass

    assert survey.limited(refuse)["outcome"] == "refused"
    assert survey.limited(crash)["outcome"] == "crashed"
    old, survey.SECONDS = survey.SECONDS, 0.2
    try:
        assert survey.limited(wait)["outcome"] == "slow"
    finally:
        survey.SECONDS = old


def test_a_process_that_dies_is_a_result(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        survey,
        "examine",
        lambda name: {"name": name, "outcome": "x"} if name == "a" else survey.os._exit(3),
    )
    path = tmp_path / "results.jsonl"
    survey.examine_all(["a", "b"], 2, path)
    found = survey.read_results(path)
    assert found["a"]["outcome"] == "x" and found["b"]["reason"] == "the process died"
    path.write_text(path.read_text() + '{"name": "c", "outc')  # cut short
    assert set(survey.read_results(path)) == {"a", "b"}


def test_pages_count_what_was_found(row):
    wrong = json.loads(
        json.dumps(row).replace('"named"', '"missed"').replace("explained", "accused")
    )
    wrong["budgets"]["bf16"]["ratio"] = 3.0
    wrong["budgets"]["int8"]["ratio"] = 0.1
    wrong["budgets"]["kv4"] |= {"ratio": 9.0, "warned": True}
    refused = {"name": "c", "outcome": "refused", "reason": "no trunk"}
    found = {"a": row, "b": wrong, "c": refused}
    totals = survey_page.totals(found)
    assert "of 2 architectures" in totals and "1 of 2 between 0.8 and 1.25" in totals
    assert "1 named at that layer, 0 at another one, 1 missed" in totals
    assert "1 explained by rounding, 1 accused" in totals
    marks = [
        survey_page.SUPPORTED.read_text().count(m) for m in (survey_page.BEGIN, survey_page.END)
    ]
    assert marks == [1, 1]
    assert "without a warning | 1 of 4 |" in totals
    page = survey_page.page(found)
    assert "| 9.00 (warned) |" in page
    assert "| measured | 2 |" in page and "| `b` | 3.00 |" in page and "1: `c`" in page
