"""Strings that are names of files are refused wherever a text is read, and only those."""

import os
from pathlib import Path

import pytest

import lipscope as ls
from lipscope.cli import main
from lipscope.papers.charlm import train_character_model
from lipscope.study.reading import Prose, TextColumn, content
from tests.study.tiny import PROSE


@pytest.fixture
def named(tmp_path, monkeypatch) -> str:
    """The name of a text in the current directory."""
    (tmp_path / "val.txt").write_text(PROSE)
    monkeypatch.chdir(tmp_path)
    return "val.txt"


def test_names_of_files_in_every_form_are_refused(named, tmp_path):
    (tmp_path / "link").symlink_to(named)
    os.mkfifo(tmp_path / "pipe")
    for name in (named, "./val.txt", str(tmp_path / named), "link", "pipe", "/dev/null"):
        with pytest.raises(ls.UserError, match=r"is the name of a file; give Path\(.* to read"):
            content(name)
    assert content(Path(named)) == PROSE
    assert content(Prose(named)) == named


def test_texts_that_cannot_be_files_or_name_directories_are_texts(named, tmp_path):
    (tmp_path / "data").mkdir()
    texts = ["", ".", "data", "no such file", f"{named}\n", "a\0b", "\ud800", "x" * 10**6, PROSE]
    assert [content(text) for text in texts] == texts


@pytest.mark.parametrize(
    ("column", "cells"),
    [("1", ["one", "two"]), ("2", ["first, quoted", "second"]), ("3", ["7", "8"])],
)
def test_columns_of_a_table_without_a_header_have_numbers(tmp_path, column, cells):
    (tmp_path / "t.csv").write_text('one,"first, quoted",7\ntwo,second,8\n')
    assert list(TextColumn(tmp_path / "t.csv", column)._cells(_text(tmp_path))) == cells
    for beyond in ("0", "4", "name"):
        with pytest.raises(ls.UserError, match="has no column"):
            list(TextColumn(tmp_path / "t.csv", beyond)._cells(_text(tmp_path)))


def _text(folder: Path) -> str:
    return (folder / "t.csv").read_text()


@pytest.mark.parametrize(
    "call",
    [
        lambda model, text: ls.measure(model, text, lengths=[2]),
        lambda model, text: ls.audit_model(model, text),
        lambda model, text: ls.attack_model(model, text, ls.AttackPlan("direction")),
        lambda model, text: ls.error_budget(model, text),
        lambda model, text: ls.check_run(model, model.trunk, text),
    ],
    ids=["measure", "audit_model", "attack_model", "error_budget", "check_run"],
)
def test_public_functions_refuse_names_of_files(model, named, call):
    for text in (named, ["some words", named]):
        with pytest.raises(ls.UserError, match=r"'val\.txt' is the name of a file"):
            call(model, text)


def test_training_refuses_names_of_files(named, tmp_path):
    with pytest.raises(ls.UserError, match="is the name of a file"):
        train_character_model(named, out=tmp_path / "trained")


def test_the_command_line_reads_names_from_stdin_as_text(tiny, named, monkeypatch):
    """`printf val.txt | lipscope measure --text -` measures these characters."""
    read, write = os.pipe()
    os.write(write, named.encode())
    os.close(write)
    with open(read) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["measure", tiny, "--text", "-", "--lengths", "2", "--quiet"]) == 0
