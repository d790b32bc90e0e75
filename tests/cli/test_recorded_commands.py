"""The command that a study records measures it again: from another folder, to the same numbers."""

import shlex
from contextlib import closing

import pytest
from typer.main import get_command

import lipscope as ls
from lipscope.cli import main
from lipscope.cli.commands import app
from lipscope.study.study import Study
from tests.study.tiny import PROSE, save_tiny

OF_LOADING = {"--device", "--dtype", "--random-init", "--seed", "--tokenizer", "--column"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model that has no tokenizer, one that has, and a table of texts."""
    place = tmp_path_factory.mktemp("recorded")
    save_tiny(place / "whole", layers=2)
    save_tiny(place / "bare", layers=2)
    for file in (place / "bare").glob("*token*"):
        file.unlink()
    (place / "prose.csv").write_text(f"label,words\n1,{PROSE}\n")
    return place


def told(study):
    """Everything that a study holds of its numbers, without the time they took."""
    return [str(row._replace(seconds=0.0)) for row in study.rows]


SHORT = "--length 8 --samples 2 --probes 2"


@pytest.mark.parametrize(
    "command",
    [
        "measure --lengths 4,8 --samples 2 --scope block --layers 1",
        "measure --lengths 4,6 --samples 1 --scope attention --scope heads --heads 1 --seed 5 "
        "--tol 1e-4 --special-tokens",
        "measure --lengths 4 --random-init 3 --dtype float32",
        "bounds --lengths 4 --layers 0 --seed 2",
        "attack --kind direction --length 4 --layers 1",
        f"budget {SHORT} --format int8,kv8 --observe --worst --seed 1",
        f"budget {SHORT} --format bf16 --random-init 5 --dtype float32",
    ],
)
def test_a_recorded_command_measures_it_again(place, tmp_path, monkeypatch, command, capsys):
    monkeypatch.chdir(place)
    words = command.split()
    given = ["bare", "--tokenizer", "whole", "--text", "prose.csv", "--column", "words"]
    first, again = tmp_path / "first", tmp_path / "again"
    assert main([words[0], *given, *words[1:], "--out", str(first), "--quiet"]) == 0
    with closing(Study.open(first)) as study:
        (line,), numbers, identity = study.commands, told(study), study.info.identity
    assert shlex.split(line)[:2] == ["lipscope", words[0]] and numbers
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main([*shlex.split(line)[1:], "--out", str(again), "--quiet"]) == 0
    with closing(Study.open(again)) as study:
        assert told(study) == numbers and study.info.identity == identity
        assert study.commands == [line]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("verb", ["measure", "bounds", "attack", "budget", "check"])
def test_every_verb_that_measures_loads_models_alike(verb):
    command = get_command(app).commands[verb]
    options = {name for parameter in command.params for name in parameter.opts}
    assert options >= OF_LOADING


@pytest.mark.wide
def test_objects_of_python_have_no_command(place, tmp_path):
    text = place / "prose.csv"
    folder = ls.load(str(place / "whole"))
    borrowed = ls.load(str(place / "bare"), folder.tokenizer)
    live = ls.load(folder.trunk, str(place / "whole"))
    assert borrowed.card.option is None and live.card.option is None
    for i, model in enumerate((borrowed, live)):
        study = ls.measure(model, text, lengths=[4], samples=1, scopes=["block"], layers=[0])
        assert study.commands == [] and study.info.about.command == ""
        ls.error_budget(
            model, text, formats="int8", probes=2, length=4, samples=1, out=tmp_path / str(i)
        )
        assert ls.Study.open(tmp_path / str(i)).commands == []
