"""`lipscope measure --gap`: the option, what is printed of it, and what is refused."""

import csv
import io
import json

import pytest

from lipscope.cli import main
from lipscope.study.study import Study
from tests.study.tiny import PROSE, save_tiny


@pytest.fixture(scope="module")
def measure(tmp_path_factory) -> list[str]:
    place = tmp_path_factory.mktemp("place")
    (place / "prose.txt").write_text(PROSE)
    tiny = save_tiny(place / "tiny", layers=1)
    return [
        "measure",
        tiny,
        "--text",
        str(place / "prose.txt"),
        "--lengths",
        "8,16",
        "--samples",
        "2",
    ]


def test_measure_show_and_export_hold_the_closed_certificates(measure, tmp_path, capsys):
    out = str(tmp_path / "s")
    assert main([*measure, "--gap", "0.01", "--json", "--out", out]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identity"]["gap"] == 0.01 and "--gap 0.01" in found["about"]["command"]
    assert all(row["upper"] <= 1.01 * row["lower"] for row in found["rows"])
    assert main(["show", out]) == 0 and "bound, at most " in capsys.readouterr().out
    assert main(["export", out]) == 0
    table = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [float(row["upper"]) for row in table] == [row["upper"] for row in found["rows"]]
    assert main([*measure, "--out", out]) == 2
    assert "gap = 0.01, and this run has 0.1" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--gap", "0"],
            "gap, the relative distance upper / lower - 1, must lie between 0 and 1, got 0",
        ),
        (["--gap", "-0.5"], "must lie between 0 and 1, got -0.5"),
        (["--gap", "1.01"], "for upper / lower <= 1.01 give 0.01"),
        (["--gap", "small"], "--gap"),
        (
            ["--gap", "0.01", "--dtype", "float32"],
            "float32 gives no upper bound; measure in float64",
        ),
    ],
)
def test_what_is_refused(measure, tmp_path, capsys, options, told):
    assert main([*measure, *options, "--out", str(tmp_path / "s")]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "s").exists()


def test_the_page_of_a_study_holds_what_other_commands_add(measure, tmp_path, capsys):
    out = tmp_path / "s"
    words = [*measure[1:4], "--out", str(out)]
    assert main(["bounds", *words, "--lengths", "8"]) == 0
    assert f"`lipscope report {out}` writes its page" in " ".join(capsys.readouterr().err.split())
    assert not (out / "report.html").exists()
    assert main(["report", str(out), "--quiet"]) == 0
    page = (out / "report.html").read_text()
    assert main(["attack", *words, "--kind", "direction", "--length", "8"]) == 0
    assert "the report is in" in capsys.readouterr().err
    assert "lipscope attack" in (out / "report.html").read_text() and "lipscope attack" not in page


def test_a_gate_that_measured_nothing_does_not_pass(measure, capsys):
    """Exit code 0 would let a build pass on the strength of no number at all."""
    empty = [*measure, "--shard", "7/1000", "--quiet"]
    assert main([*empty, "--fail-above", "1e-9"]) == 3
    assert "nothing was measured (the part is empty)" in capsys.readouterr().err
    assert main(empty) == 0  # without a gate, an empty part is a part like any other
    assert main([*measure, "--fail-above", "1e9", "--quiet"]) == 0
    assert main([*measure, "--fail-above", "1e-9", "--quiet"]) == 1


def test_a_gate_does_not_pass_rows_without_a_value(measure, monkeypatch, capsys):
    monkeypatch.setattr(Study, "failed", property(lambda study: study.sigma[:1]))
    assert main([*measure, "--fail-above", "1e9", "--quiet"]) == 3
    assert "not everything was measured (1 rows have no value)" in capsys.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["budget", "--probes", "99999999999"], "probes must be a whole number up to 10000"),
        (["budget", "--probes", "10001"], "each is a backward pass"),
        (["simulate", "--n", "999999999"], "n and dim must be at most 20000"),
        (["simulate", "--dim", "999999999"], "every step computes n x n attention weights"),
    ],
)
def test_numbers_without_an_end_are_refused(command, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    assert told in capsys.readouterr().err


def test_half_of_a_surrogate_pair_in_a_table_is_named(measure, tmp_path, capsys):
    (tmp_path / "news.jsonl").write_text('{"title": "a day \\ud800 in June"}\n')
    command = ["measure", measure[1], "--text", str(tmp_path / "news.jsonl"), "--column", "title"]
    assert main(command) == 2
    assert "the text contains \\ud800 (character 7)" in capsys.readouterr().err
