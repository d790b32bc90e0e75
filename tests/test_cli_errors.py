"""Every error of the user: one line that names it and the remedy, exit code 2, no partial files."""

import io
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from lipscope.cli import main
from lipscope.study.store import Store
from tests.study.fakes import info
from tests.study.tiny import PROSE, save_tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with good and bad models, texts and studies."""
    place = tmp_path_factory.mktemp("place")
    good = Path(save_tiny(place / "tiny", layers=2))
    for name in ("fp8", "pickled", "silent", "broken"):
        shutil.copytree(good, place / name)
    weights = load_file(good / "model.safetensors")
    key = "encoder.layer.0.attention.self.query.weight"
    save_file(
        {**weights, key: weights[key].to(torch.float8_e4m3fn)}, place / "fp8" / "model.safetensors"
    )
    (place / "pickled" / "model.safetensors").rename(place / "pickled" / "pytorch_model.bin")
    for path in (place / "silent").glob("tokenizer*"):
        path.unlink()
    (place / "broken" / "config.json").write_text("{")
    (place / "empty").mkdir()
    (place / "mine").mkdir()
    (place / "mine" / "thesis.tex").touch()
    (place / "text").write_text(PROSE)
    (place / "short").write_text("ba be bi")
    (place / "blank").write_text(" \n\t\n")
    (place / "nothing").touch()
    (place / "latin1").write_bytes("café".encode("latin1"))
    Store.create(place / "study", info()).close()
    Store.create(place / "newer", info()).close()
    with sqlite3.connect(place / "newer" / "study.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    return place


TINY = "measure @tiny --text @text --out @out"
CASES = {  # where @name is something in the place
    "measure @tiny --text @nowhere": "cannot read the text",
    "measure @tiny --text @mine": "cannot read the text",
    "measure @tiny --text @nothing": "the text is empty",
    "measure @tiny --text @blank": "the text is empty",
    "measure @tiny --text -": "the text is empty",
    "measure @tiny --text @latin1": "latin1 is not UTF-8 text (byte 3)",
    "measure @tiny --text @short": "the text has 3 tokens, too few for length 8",
    f"{TINY} --lengths 8,301": "length 301 is above the 48 positions",
    "measure @tiny --text @short --lengths 2,4": "too few for length 4; give a longer text",
    f"{TINY} --lengths 8,49": "length 49 is above the 48 positions",
    f"{TINY} --lengths eight": "--lengths takes integers and ranges",
    f"{TINY} --lengths 8,,16": "--lengths takes integers and ranges",
    f"{TINY} --lengths -8": "--lengths takes integers",
    f"{TINY} --lengths 9-3": "the range 9-3 is empty",
    f"{TINY} --lengths 0": "a length must be at least 1",
    f"{TINY} --lengths 2 --special-tokens": "a length must be at least 3",
    f"{TINY} --samples 0": "samples must be at least 1",
    f"{TINY} --samples many": "--samples",
    f"{TINY} --layers 2": "layer 2 does not exist",
    f"{TINY} --layers last": "--layers takes integers",
    f"{TINY} --heads 0,2": "head 2 does not exist",
    f"{TINY} --scope smoothness": "there is no scope 'smoothness'; the scopes are heads, attention",
    f"{TINY} --scope normed": "normalise",
    f"{TINY} --tol 0": "tol, a relative residual, must lie between 0 and 1",
    f"{TINY} --tol small": "--tol",
    f"{TINY} --seed -1": "seed must not be negative",
    f"{TINY} --workers 0": "workers must be at least 1",
    f"{TINY} --dtype fp8": "dtype must be one of float64, float32, bfloat16, float16",
    f"{TINY} --device abacus": "device 'abacus' cannot be used here",
    f"{TINY} --random-init yes": "--random-init",
    "measure @fp8 --text @text --out @out": "float8",
    "measure @pickled --text @text --out @out": "safetensors",
    "measure @silent --text @text --out @out": "tokenizer",
    "measure @broken --text @text --out @out": "config.json cannot be read",
    "measure @empty --text @text --out @out": "config.json",
    "measure ./no/such/model --text @text --out @out": "is not a folder with a model",
    "measure owner/unknown --text @text --out @out": "there is no model 'owner/unknown' on the hub",
    "measure owner/gated --text @text --out @out": "owner/gated is gated",
    "measure owner/offline --text @text --out @out": "not in the local cache",
    "measure @tiny --text @text --out @text": "is a file; --out takes a directory",
    "measure @tiny --text @text --out @text/below": "cannot write to",
    "measure @tiny --text @text --out @mine": "neither a study nor empty (it contains thesis.tex)",
    "measure @tiny --text @text --out @study": "is a study of another model",
    "measure @tiny --text @text --out @newer": "newer lipscope",
    "show": "Missing argument 'DIR'. Try `lipscope show --help`",
    "show @nowhere": "does not exist",
    "show @mine": "is not a study",
    "show @newer": "newer lipscope",
    "export @mine": "is not a study",
    "export @study --csv --parquet": "exclude each other",
    "export @study --parquet": "--parquet needs a file",
    "export @study @nowhere/rows.csv": "cannot write",
    "measure --colour red": "--colour",
    "weigh @tiny": "weigh",
}


def hub(name: str, *_: object, **__: object) -> None:
    """A hub with three models, none of which can be downloaded."""
    response = httpx2.Response(404, request=httpx2.Request("GET", "https://example.org"))
    if name == "owner/gated":
        raise GatedRepoError("gated", response=response)
    if name == "owner/offline":
        raise LocalEntryNotFoundError("not here")
    raise RepositoryNotFoundError("no such thing", response=response)


@pytest.mark.parametrize("command", CASES)
def test_a_mistake_is_told_in_a_line(command, place, monkeypatch, capsys):
    monkeypatch.setattr("lipscope.models.repository.hf_hub_download", hub)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO()))
    before = snapshot(place)
    words = [str(place / word[1:]) if word[0] == "@" else word for word in command.split()]
    assert main(words) == 2
    said = capsys.readouterr()
    assert CASES[command] in said.err
    assert said.out == "" and "Traceback" not in said.err
    assert len(said.err.splitlines()) == 1 and len(said.err) < 400
    assert snapshot(place) == before


def snapshot(place: Path) -> dict[Path, bytes]:
    """Every file, locks aside: they hold nothing and may stay."""
    return {
        path: path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and path.name != "study.lock"
    }


def test_bytes_on_stdin_that_are_no_text_are_refused(place, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"caf\xe9")))
    assert main(["measure", str(place / "tiny"), "--text", "-"]) == 2
    assert "not UTF-8" in capsys.readouterr().err
