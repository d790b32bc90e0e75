"""Sweeps: which studies a file asks for, and that each is made once."""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.models.loading import load
from lipscope.study import sweep as sweep_module
from lipscope.study.jobs import Shard
from lipscope.study.run import measure
from lipscope.study.study import Study
from lipscope.study.sweep import Entry, read_sweep
from tests.study.bad_sweeps import bad_sweeps, outcome
from tests.study.printed import exported

FILE = """
models = ["runs/a/checkpoint", "runs/b/checkpoint"]
texts = ["prose.txt", {file = "news.csv", column = "title"}]

[settings.short]
lengths = [4, 6]
samples = 1

[settings.seeded]
lengths = [5]
samples = 1
seed = 3
scopes = ["attention"]
"""


@pytest.fixture
def place(tmp_path, tiny, prose) -> Path:
    for run in ("a", "b"):
        shutil.copytree(tiny, tmp_path / "runs" / run / "checkpoint")
    (tmp_path / "prose.txt").write_text(prose)
    lines = "\n".join(f'{i},"{prose[20 * i : 20 * i + 60]}"' for i in range(20))
    (tmp_path / "news.csv").write_text(f"id,title\n{lines}\n")
    (tmp_path / "sweep.toml").write_text(FILE)
    return tmp_path


def test_models_times_texts_times_settings(place):
    entries = read_sweep(place / "sweep.toml").entries
    assert [entry.out.name for entry in entries] == [
        f"{run}-checkpoint--{text}--{setting}"
        for run in "ab"
        for setting in ("short", "seeded")
        for text in ("prose.txt", "title")
    ]
    assert {entry.out.parent for entry in entries} == {place / "sweep"}
    parts = [read_sweep(place / "sweep.toml").part(Shard(k, 5)).entries for k in range(1, 6)]
    assert sorted(e.out for part in parts for e in part) == sorted(e.out for e in entries)
    # All studies of a model are in one part.
    assert sum(len({entry.model for entry in part}) for part in parts) == 2


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_each_study_is_made_once_and_each_model_loaded_once(place, monkeypatch, prose):
    loaded: list[str] = []
    load = sweep_module.load
    monkeypatch.setattr(
        sweep_module, "load", lambda name, **options: loaded.append(name) or load(name, **options)
    )

    def run() -> list[str]:
        sweep = read_sweep(place / "sweep.toml")
        return [ending.how for ending in sweep.run(nullcontext, lambda entry: None)]

    assert run() == ["measured"] * 8
    assert [Path(name).parent.name for name in loaded] == ["a", "b"]
    found = Study.open(place / "sweep" / "b-checkpoint--prose.txt--seeded")
    alone = measure(loaded[1], place / "prose.txt", [5], 1, None, None, ["attention"], seed=3)
    assert exported(found) == exported(alone)
    # Again: nothing is loaded; what has changed is made again, where that is the same study.
    loaded.clear()
    assert run() == ["finished before"] * 8 and loaded == []
    text = (place / "sweep.toml").read_text()
    (place / "sweep.toml").write_text(text.replace("lengths = [5]", "lengths = [5, 7]"))
    assert (
        run()
        == ["finished before"] * 2 + ["measured"] * 2 + ["finished before"] * 2 + ["measured"] * 2
    )
    assert {row.n for row in Study.open(found.directory).rows} == {5, 7}
    # Another text in the same place is refused by name, and the rest is done.
    loaded.clear()
    (place / "prose.txt").write_text(prose[:600])
    told = run()
    assert [how == "finished before" for how in told] == [False, True] * 4
    assert all("another text" in how for how in told[::2])
    assert main(["sweep", str(place / "sweep.toml"), "--quiet"]) == 3


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_a_sweep_on_workers_is_the_same_and_compare_reads_it(place, capsys):
    (place / "sweep.toml").write_text(
        'models = ["runs/a/checkpoint", "runs/b/checkpoint"]\ntexts = ["prose.txt"]\n'
        "out = 'here'\n[settings.one]\nlengths = [4, 6]\nsamples = 1\n"
    )
    assert main(["sweep", str(place / "sweep.toml"), "--workers", "2"]) == 0
    said = capsys.readouterr().err
    assert said.count("measured") == 3 and "the dashboard is at http://127.0.0.1:" in said
    directories = sorted((place / "here").iterdir())
    alone = measure(str(place / "runs/a/checkpoint"), place / "prose.txt", [4, 6], 1)
    assert exported(Study.open(directories[0])) == exported(alone)
    page = place / "page.html"
    assert main(["compare", *map(str, directories), "--out", str(page), "--quiet"]) == 0
    assert "a-checkpoint" in page.read_text() or "checkpoint" in page.read_text()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("models = [", "cannot read the sweep in"),
        ("", "models must be a list of model ids and directories, got None"),
        ("models = []", "models must be a list"),
        ("models = ['m']\nlengths = [4]", "lengths is not known; the keys are models, texts"),
        ("models = ['m']\nsettings = 3", "settings are tables with names"),
        ("models = ['m']\n[settings.a]\nlength = 3", r"settings.a: length is not known"),
        ("models = ['m']\ntexts = [3]", "texts are files, or tables"),
        ("models = ['m', 'm']", "names a model or a text twice"),
        ("models = ['m']\n[settings.\"a\\u0007\"]", "a study cannot be called"),
        (f'models = ["{"m" * 300}"]', "cannot look for the models: .*too long"),
    ],
)
def test_what_is_refused(tmp_path, content, told):
    (tmp_path / "sweep.toml").write_text(content)
    with pytest.raises(UserError, match=told):
        read_sweep(tmp_path / "sweep.toml")


def test_a_pattern_searches_no_disk(tmp_path):
    (tmp_path / "models" / "a").mkdir(parents=True)
    for pattern in ("/**/x", f"{tmp_path}/**", "models/*"):
        (tmp_path / "sweep.toml").write_text(f"models = ['{pattern}']\n[settings.a]")
        with pytest.raises(UserError, match=r"is neither a folder nor|is not a folder"):
            (entry,) = read_sweep(tmp_path / "sweep.toml").entries
            load(entry.model)


def test_without_texts_and_settings_the_defaults_are_measured(tmp_path):
    (tmp_path / "sweep.toml").write_text("models = ['embedded', 'org/name']")
    first, second = read_sweep(tmp_path / "sweep.toml").entries
    assert (first.out.name, second.out.name, second.model) == ("embedded", "name", "org/name")
    assert first.text is None and first.measuring["samples"] == 3


@pytest.mark.wide
def test_bad_sweep_files_end_with_a_sentence_inside_their_directory(tiny):
    cases = list(bad_sweeps().items())[:90]
    assert {name: said for name, text in cases if (said := outcome(text, Path(tiny)))} == {}


def test_settings_are_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep_module.Sweep, "run", lambda *_: pytest.fail("a study began"))
    for line, told in {
        'special_tokens = "no"': "special_tokens must be True or False, got 'no'",
        "seed = 0.5": "seed must be an integer, got 0.5",
        "layers = [true]": "layers must be a list of integers or None, got [True]",
        "tol = 2": "tol, a relative residual, must lie between 0 and 1, got 2",
        'scopes = ["head"]': "there is no scope 'head'",
        'dtype = "float99"': "dtype must be one of",
        "random_init = -1": "random_init must be an integer from 0",
    }.items():
        (tmp_path / "s.toml").write_text(f"models = ['m']\n[settings.a]\n[settings.b]\n{line}\n")
        assert main(["sweep", str(tmp_path / "s.toml")]) == 2
        said = capsys.readouterr().err
        assert "settings.b: " in said and told in said


def test_one_wrong_study_does_not_stop_the_others(place, monkeypatch):
    def failing(entry, *_):
        if entry.measuring["seed"] == 3:
            raise ZeroDivisionError("by zero")
        return "measured", False

    monkeypatch.setattr(sweep_module.Entry, "measure", failing)
    monkeypatch.setattr(sweep_module, "load", lambda *_, **__: object())
    endings = list(read_sweep(place / "sweep.toml").run(nullcontext, lambda entry: None))
    assert [ending.failed for ending in endings] == [False, False, True, True] * 2
    assert endings[2].how == "ZeroDivisionError: by zero"


def test_a_byte_order_mark_is_ignored_and_parents_have_names(tmp_path):
    (tmp_path / "here" / "deep").mkdir(parents=True)
    file = tmp_path / "here" / "deep" / "sweep.toml"
    file.write_text("\ufeffmodels = ['..', '../..']")
    out = [entry.out for entry in read_sweep(file).entries]
    assert out == [file.with_suffix("") / name for name in ("here", tmp_path.name)]


@pytest.mark.parametrize("wrong", [{"special_tokens": "no"}, {"seed": 0.5}, {"layers": [True]}])
def test_python_arguments_are_checked_alike(wrong, model, prose):
    (name,) = wrong
    with pytest.raises(UserError, match=f"{name} must be"):
        measure(model, prose, [4], **wrong)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_a_model_that_is_written_again_makes_another_study(tmp_path, name):
    """Also with the same number of bytes, as weights of one architecture always have."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in ("model.safetensors", "config.json", "notes.txt"):
        (folder / file).write_bytes(b"0" * 64)
    entry = Entry(str(folder), {}, None, {}, tmp_path / "out")
    stamp = entry.stamp()
    (folder / "notes.txt").write_bytes(b"1" * 64)  # no part of the model
    assert entry.stamp() == stamp
    before = (folder / name).stat().st_mtime_ns
    (folder / name).write_bytes(b"1" * 64)
    os.utime(folder / name, ns=(before + 1000, before + 1000))
    assert entry.stamp() != stamp
