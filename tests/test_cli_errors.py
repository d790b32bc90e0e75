"""Every error of the user: one line that names it and the remedy, exit code 2, no partial files."""

import io
import shutil
import sqlite3
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Case:
    """A command line, where @name is something in the place, and what must be said."""

    command: str
    told: str
    stdin: bytes = b""


TINY = "measure @tiny --text @text --out @out"
CASES = [
    Case("measure @tiny --text @nowhere", "cannot read the text"),
    Case("measure @tiny --text @mine", "cannot read the text"),
    Case("measure @tiny --text @nothing", "the text is empty"),
    Case("measure @tiny --text @blank", "the text is empty"),
    Case("measure @tiny --text -", "the text is empty"),
    Case("measure @tiny --text -", "not UTF-8", stdin=b"caf\xe9"),
    Case("measure @tiny --text @latin1", "latin1 is not UTF-8 text (byte 3)"),
    Case("measure @tiny --text @short", "the text has 3 tokens, too few for length 8"),
    Case(f"{TINY} --lengths 8,301", "length 301 is above the 48 positions"),
    Case(
        "measure @tiny --text @short --lengths 2,4 --out @out",
        "too few for length 4; give a longer text",
    ),
    Case(f"{TINY} --lengths 8,49", "length 49 is above the 48 positions"),
    Case(f"{TINY} --lengths eight", "--lengths takes integers and ranges"),
    Case(f"{TINY} --lengths 8,,16", "--lengths takes integers and ranges"),
    Case(f"{TINY} --lengths -8", "--lengths takes integers"),
    Case(f"{TINY} --lengths 9-3", "the range 9-3 is empty"),
    Case(f"{TINY} --lengths 0", "a length must be at least 1"),
    Case(f"{TINY} --lengths 2 --special-tokens", "a length must be at least 3"),
    Case(f"{TINY} --samples 0", "samples must be at least 1"),
    Case(f"{TINY} --samples many", "--samples"),
    Case(f"{TINY} --layers 2", "layer 2 does not exist"),
    Case(f"{TINY} --layers last", "--layers takes integers"),
    Case(f"{TINY} --heads 0,2", "head 2 does not exist"),
    Case(
        f"{TINY} --scope smoothness",
        "there is no scope 'smoothness'; the scopes are heads, attention",
    ),
    Case(f"{TINY} --scope normed", "normalise"),
    Case(f"{TINY} --tol 0", "tol, a relative residual, must lie between 0 and 1"),
    Case(f"{TINY} --tol small", "--tol"),
    Case(f"{TINY} --seed -1", "seed must not be negative"),
    Case(f"{TINY} --workers 0", "workers must be at least 1"),
    Case(f"{TINY} --dtype fp8", "dtype must be one of float64, float32, bfloat16, float16"),
    Case(f"{TINY} --device abacus", "device 'abacus' cannot be used here"),
    Case(f"{TINY} --random-init yes", "--random-init"),
    Case("measure @fp8 --text @text --out @out", "float8"),
    Case("measure @pickled --text @text --out @out", "safetensors"),
    Case("measure @silent --text @text --out @out", "tokenizer"),
    Case("measure @broken --text @text --out @out", "config.json cannot be read"),
    Case("measure @empty --text @text --out @out", "config.json"),
    Case("measure ./no/such/model --text @text --out @out", "is not a folder with a model"),
    Case(
        "measure owner/unknown --text @text --out @out",
        "there is no model 'owner/unknown' on the hub",
    ),
    Case("measure owner/gated --text @text --out @out", "owner/gated is gated"),
    Case("measure owner/offline --text @text --out @out", "not in the local cache"),
    Case("measure @tiny --text @text --out @text", "is a file; --out takes a directory"),
    Case("measure @tiny --text @text --out @text/below", "cannot write to"),
    Case(
        "measure @tiny --text @text --out @mine",
        "neither a study nor empty (it contains thesis.tex)",
    ),
    Case("measure @tiny --text @text --out @study", "is a study of another model"),
    Case("measure @tiny --text @text --out @newer", "newer lipscope"),
    Case("show", "Missing argument 'DIR'. Try `lipscope show --help`"),
    Case("show @nowhere", "does not exist"),
    Case("show @mine", "is not a study"),
    Case("show @newer", "newer lipscope"),
    Case("export @mine", "is not a study"),
    Case("export @study --csv --parquet", "exclude each other"),
    Case("export @study --parquet", "--parquet needs a file"),
    Case("export @study @nowhere/rows.csv", "cannot write"),
    Case("measure --colour red", "--colour"),
    Case("weigh @tiny", "weigh"),
]


def hub(name: str, *_: object, **__: object) -> None:
    """A hub with three models, none of which can be downloaded."""
    response = httpx2.Response(404, request=httpx2.Request("GET", "https://example.org"))
    if name == "owner/gated":
        raise GatedRepoError("gated", response=response)
    if name == "owner/offline":
        raise LocalEntryNotFoundError("not here")
    raise RepositoryNotFoundError("no such thing", response=response)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.command)
def test_a_mistake_is_told_in_a_line(case, place, monkeypatch, capsys):
    monkeypatch.setattr("lipscope.models.repository.hf_hub_download", hub)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(case.stdin)))
    before = snapshot(place)
    words = [
        str(place / word[1:]) if word.startswith("@") else word for word in case.command.split()
    ]
    assert main(words) == 2
    said = capsys.readouterr()
    assert case.told in said.err
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


def test_there_are_enough_of_them():
    assert len({case.told for case in CASES}) >= 25
