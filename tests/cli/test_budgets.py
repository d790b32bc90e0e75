"""The commands budget and check, end to end, on a tiny model in a folder."""

import csv
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lipscope.cli import main
from lipscope.models.loading import load
from tests.study.tiny import PROSE, save_tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("budget")
    save_tiny(place / "tiny", layers=2)
    (place / "prose.txt").write_text(PROSE)
    return place


def arguments(place, *more):
    sizes = ["--length", "12", "--samples", "2", "--probes", "4"]
    return [str(place / "tiny"), *more, "--text", str(place / "prose.txt"), *sizes]


def test_budget_prints_totals_and_shares_and_writes_exports(place, capsys):
    rows = place / "rows.csv"
    words = ["--format", "bf16,int8,kv4", "--observe", "--csv", str(rows)]
    assert main(["budget", *arguments(place), *words]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("bf16", "int8", "kv4", "2 sequences, 24 tokens, 4 probes"))
    found = list(csv.DictReader(rows.open()))
    assert {row["format"] for row in found} == {"bf16", "int8", "kv4"}
    assert all(float(r["observed"]) > 0 for r in found if r["kind"] == "total")


def test_budget_is_saved_resumed_and_reported(place, capsys):
    study = place / "study"
    words = ["budget", *arguments(place), "--format", "int8,kv4", "--out", str(study), "--json"]
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert first["metric"] == "output" and first["rows"][-1]["kind"] == "total"
    assert main(["report", str(study), "--out", str(place / "report.html")]) == 0
    page = (place / "report.html").read_text()
    assert "What does low precision cost?" in page and "lipscope budget" in page
    capsys.readouterr()
    assert main(["export", str(study)]) == 0
    found = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert {json.loads(row["extra"])["format"] for row in found} == {"int8", "kv4"}


def test_check_says_whether_rounding_explains_the_difference(place, capsys):
    model = load(str(place / "tiny"))
    ids = torch.tensor([model.encode(PROSE)[:12]])
    with torch.no_grad():
        states = model.trunk.bfloat16()(ids, output_hidden_states=True).hidden_states
    tensors = {f"hidden_states.{i}": h.contiguous() for i, h in enumerate(states)}
    right, wrong = place / "right.safetensors", place / "wrong.safetensors"
    save_file({**tensors, "input_ids": ids}, right)
    tensors["hidden_states.1"] = tensors["hidden_states.1"] * 2
    save_file({**tensors, "input_ids": ids}, wrong)
    assert main(["check", str(place / "tiny"), str(right), "--probes", "4"]) == 0
    assert "explains the difference" in capsys.readouterr().out
    assert main(["check", str(place / "tiny"), str(wrong), "--probes", "4", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first_outside"] == "layer 0" and not found["ok"]


def test_check_reads_npz_and_refuses_foreign_token_ids(place, capsys):
    model = load(str(place / "tiny"))
    ids = torch.tensor([model.encode(PROSE)[:12]])
    with torch.no_grad():
        states = model.trunk.bfloat16()(ids, output_hidden_states=True).hidden_states
    arrays = {f"hidden_states.{i}": h.float().numpy() for i, h in enumerate(states)}
    np.savez(place / "right.npz", **arrays, input_ids=ids.numpy())
    assert main(["check", str(place / "tiny"), str(place / "right.npz"), "--probes", "4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Rounding to bf16 explains" in out and "compare in fp32 to see smaller bugs" in out
    for wrong in (-3, 10**15):
        np.savez(place / "wrong.npz", **arrays, input_ids=np.full(ids.shape, wrong))
        assert main(["check", str(place / "tiny"), str(place / "wrong.npz")]) == 2
        assert f"token id {wrong} is not in the vocabulary" in " ".join(
            capsys.readouterr().err.split()
        )


def test_bad_input_ends_with_exit_code_2(place, capsys):
    assert main(["budget", *arguments(place), "--format", "int77"]) == 2
    assert "there is no format 'int77'" in capsys.readouterr().err
    assert main(["check", str(place / "tiny"), str(place / "none.safetensors")]) == 2
    assert "cannot read" in capsys.readouterr().err
    again = str(place / "tiny")
    assert main(["check", again, again, "--format", "int8"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "format must be one of fp32, bf16, fp16, got 'int8'" in told
    assert "all other formats are for `lipscope budget`" in told


def test_the_truth_is_more_accurate_than_the_format(place, capsys):
    words = ["--format", "fp32", "--dtype", "float32"]
    assert main(["check", *arguments(place, str(place / "tiny")), *words]) == 2
    assert "load it in float64" in " ".join(capsys.readouterr().err.split())
    assert main(["budget", *arguments(place), "--format", "bf16", "--dtype", "float16"]) == 0
    capsys.readouterr()
    for coarse in ("bf16", "fp16"):
        assert main(["budget", *arguments(place), "--format", coarse, "--dtype", "bfloat16"]) == 2
        assert "tiny is loaded in bfloat16" in " ".join(capsys.readouterr().err.split())


def test_random_weights_and_a_float32_reference(place, capsys):
    words = ["--random-init", "1", "--format", "int8", "--json"]
    found = []
    for dtype in ("float64", "float32"):
        assert main(["budget", *arguments(place), *words, "--dtype", dtype]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        found.append(rows[-1]["predicted"])
    assert found[0] != found[1] and found[1] == pytest.approx(found[0], rel=1e-3)
    assert main(["budget", *arguments(place), "--format", "int8", "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)["rows"][-1]["predicted"]
    assert trained != pytest.approx(found[0], rel=1e-3)
    # The weights of one seed are the same on both sides; those of the folder are not used.
    words = ["--random-init", "1", "--format", "bf16", "--json"]
    assert main(["check", *arguments(place, str(place / "tiny")), *words]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_check_takes_two_folders(place, capsys):
    assert main(["check", *arguments(place, str(place / "tiny")), "--format", "fp16"]) == 0
    assert "Rounding to fp16 explains the difference" in " ".join(capsys.readouterr().out.split())
