"""`lipscope simulate`: what it writes and says, and every mistake in one line."""

import json

import pytest

from lipscope.cli import main
from lipscope.dynamics.simulation import PRESETS

FILES = ["figure.png", "series.csv", "simulation.json"]


def test_it_writes_and_says_what_it_found(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(f"simulate --n 12 --time 6 --seed 3 --out {out}".split()) == 0
    said = capsys.readouterr().out
    assert "clusters" in said and "seed 3" in said and str(out)[:40] in said
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert json.loads((out / "simulation.json").read_text())["seed"] == 3


def test_without_out_the_folder_is_named_after_the_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "--preset", "masked", "--n", "5", "--time", "0.5"]) == 0
    assert sorted(path.name for path in (tmp_path / "simulation-masked").iterdir()) == FILES


@pytest.mark.parametrize(
    "options",
    [
        *(f"--preset {name} --n 1" for name in PRESETS),
        "--preset growth --n 4 --time 1e5",
        "--preset growth --n 6 --time 500",
        "--preset growth --n 2 --time 1e300",
        "--preset gaussian --n 2 --time 1e307",
        "--preset gaussian --n 3 --dim 1 --time 1e4",
    ],
)
def test_the_smallest_and_the_longest_are_drawn(options, tmp_path, recwarn):
    assert main(["simulate", *options.split(), "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    assert not [w for w in recwarn if "tight" not in str(w.message)]


def test_help_lists_every_preset(capsys):
    assert main(["simulate", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (*PRESETS, "n = 200, d = 2, t = 10"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--preset nonsense", "the presets are clusters, gaussian, masked, growth"),
        ("--n 0", "n, the number of tokens, must be an integer of at least 1, got 0"),
        ("--n many", "--n"),
        ("--dim -2", "dim, the size of a token, must be an integer of at least 1, got -2"),
        ("--time -1", "must be a positive number, got -1.0"),
        ("--time inf", "must be a positive number, got inf"),
        ("--time 5e-324", "time must be large enough for 65 distinct times, got 5e-324"),
        ("--seed -4", "seed must be an integer from 0 to 2^63 - 1, got -4"),
        ("--device abacus", "device 'abacus' cannot be used here"),
        ("--device cuda:77", "device 'cuda:77' cannot be used here"),
    ],
)
def test_a_mistake_is_told_in_a_line(options, told, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["simulate", *options.split(), "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert told in said.err and said.out == "" and said.err.count("\n") == 1
    assert not out.exists()
