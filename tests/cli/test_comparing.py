"""The command `compare`: a table on the terminal, a page on disk, and errors that help."""

import json
from contextlib import closing
from statistics import median

import pytest

from lipscope.cli import main
from lipscope.study.study import Study
from tests.report.made import grid, study


def test_it_prints_a_table_and_writes_a_page(tmp_path, capsys):
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


def test_it_needs_two_studies(tmp_path, capsys):
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
