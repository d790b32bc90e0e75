"""Commands that write and read studies: gaps, gates, shards and workers, comparisons."""

import csv
import io
import json
from contextlib import closing
from statistics import median

import pytest

from lipscope.cli import main
from lipscope.study import run
from lipscope.study.engines import SchedulerLostError
from lipscope.study.study import Study
from tests.report.made import grid, study
from tests.study.tiny import PROSE, save_tiny


@pytest.fixture(scope="module")
def measure(tmp_path_factory) -> list[str]:
    place = tmp_path_factory.mktemp("place")
    (place / "prose.txt").write_text(PROSE)
    tiny = save_tiny(place / "tiny", layers=1)
    return f"measure {tiny} --text {place / 'prose.txt'} --lengths 8,16 --samples 2".split()


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
        ("--gap 0", "gap, the relative distance upper / lower - 1, must lie between 0 and 1, got"),
        ("--gap 1.01", "for upper / lower <= 1.01 give 0.01"),
        ("--gap small", "--gap"),
        ("--gap 0.01 --dtype float32", "float32 gives no upper bound; measure in float64"),
        ("--shard 0/4", "the shard must be a whole number from 1 to 4, got 0"),
        ("--shard four", "--shard takes K/N, as in 3/64"),
        ("--workers 2 --cluster tcp://127.0.0.1:1", "not both"),
        ("--workers 0", "workers must be at least 1, got 0"),
    ],
)
def test_what_is_refused(measure, tmp_path, capsys, options, told):
    # Shards and workers are refused before a model is loaded: nobody finds out that there is none.
    model = "no/such/model" if "--gap" not in options else measure[1]
    command = ["measure", model, *measure[2:], *options.split()]
    assert main([*command, "--out", str(tmp_path / "s")]) == 2
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


def test_a_lost_scheduler_is_one_line_and_exit_code_3(monkeypatch, tmp_path, capsys):
    def lose(*arguments, **options):
        raise SchedulerLostError("the scheduler ended; run the same command again to resume")

    monkeypatch.setattr(run, "measure", lose)
    monkeypatch.setattr("lipscope.models.loading.load", lambda *_, **__: None)
    assert main(["measure", "any", "--cluster", "tcp://127.0.0.1:1"]) == 3
    assert capsys.readouterr().err == (
        "lipscope: the scheduler ended; run the same command again to resume\n"
    )


def test_compare_prints_a_table_and_writes_a_page(tmp_path, capsys):
    for name, layers in (("a", 2), ("b", 1), ("c", 2)):
        study(tmp_path / name, grid(layers=layers))
    directories = [str(tmp_path / name) for name in "abc"]
    page = tmp_path / "page.html"
    assert main(["compare", *directories, "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "3 studies: fake/model" in said
    assert all(f"fake/model, {name}" in said for name in "abc")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_json_holds_the_numbers_of_the_table(tmp_path, capsys):
    for name, layers in (("a", 2), ("b", 1)):
        study(tmp_path / name, grid(layers=layers))
    words = [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "page.html")]
    assert main(["compare", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["studies"]] == ["fake/model, a", "fake/model, b"]
    with closing(Study.open(tmp_path / "a")) as one:
        largest = max(row.n for row in one.sigma)
        assert found["n"] == largest
        for line in found["maps"]:
            rows = one.largest(line["scope"], line["layer"])
            middle = median(row.value for row in rows if row.n == largest)
            assert line["sigma"] == pytest.approx([middle] * 2) and line["ratio"] == 1
    assert found["maps"] and {line["layer"] for line in found["maps"]} == {0}


def test_compare_needs_two_studies(tmp_path, capsys):
    study(tmp_path / "a", grid())
    assert main(["compare", str(tmp_path / "a")]) == 2
    assert "at least two studies" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "a"), str(tmp_path)]) == 2
    assert "is not a study" in capsys.readouterr().err


def test_lost_rows_end_with_their_exit_code(tmp_path, capsys, monkeypatch):
    for name in "ab":
        study(tmp_path / name, grid())
    monkeypatch.setattr("lipscope.study.study.Study.damage", "3 rows are lost")
    page = str(tmp_path / "page.html")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", page, "-q"]) == 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("3 rows are lost") == 2
