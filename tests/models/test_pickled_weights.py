"""Pickled weights become safetensors that load to the same model, and nothing else happens."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file

from lipscope._types import UserError
from lipscope.models.loading import load
from lipscope.models.pickled_weights import to_safetensors
from tests.models.hostile_cases import Payload
from tests.models.zoo import make


@pytest.fixture
def pickled(tmp_path):
    """A tiny Llama whose weights are pickled."""
    model = make("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    return tmp_path


def test_the_same_model_comes_back(pickled):
    assert [path.name for path in to_safetensors(pickled)] == ["model.safetensors"]
    assert load(str(pickled)).card.weights == load(make("llama")).card.weights
    assert (pickled / "pytorch_model.bin").exists()
    assert not list(pickled.glob(".unfinished*"))


def test_tied_weights_and_views_are_written_apart(tmp_path):
    table = torch.arange(12.0).view(4, 3)
    torch.save(
        {"embed.weight": table, "head.weight": table, "part": table[1:3], "turned": table.T},
        tmp_path / "pytorch_model.bin",
    )
    to_safetensors(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["embed.weight"], table) and torch.equal(found["head.weight"], table)
    assert torch.equal(found["part"], table[1:3]) and torch.equal(found["turned"], table.T)


def test_shards_keep_their_parts_and_the_index_comes_last(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = model.state_dict()
    parts = [dict(list(state.items())[i::2]) for i in range(2)]
    where = {}
    for i, part in enumerate(parts, start=1):
        name = f"pytorch_model-0000{i}-of-00002.bin"
        torch.save(part, tmp_path / name)
        where |= dict.fromkeys(part, name)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    written = to_safetensors(str(tmp_path))
    assert written[-1].name == "model.safetensors.index.json" and len(written) == 3
    assert load(str(tmp_path)).card.weights == load(model).card.weights


def test_code_in_a_pickle_does_not_run(pickled):
    canary = pickled.parent / "canary"
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(UserError, match=r"pytorch_model.bin contains more than tensors"):
        to_safetensors(pickled)
    assert not canary.exists() and not list(pickled.glob("*.safetensors"))


def point_outside(folder):
    (folder / "pytorch_model.bin").rename(folder.parent / "outside.bin")
    index = {"weight_map": {"a": "../outside.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def link_outside(folder):
    (folder / "pytorch_model.bin").rename(folder.parent / "outside.bin")
    (folder / "pytorch_model.bin").symlink_to("../outside.bin")


WRONG = {
    "already there": (
        lambda f: (f / "model.safetensors").touch(),
        "has model.safetensors already, and no file is replaced",
    ),
    "no weights": (lambda f: (f / "pytorch_model.bin").unlink(), "has no pytorch_model.bin"),
    "damaged": (
        lambda f: (f / "pytorch_model.bin").write_bytes(b"PK\x03\x04nonsense"),
        "or is damaged",
    ),
    "not a table": (
        lambda f: torch.save([torch.ones(2)], f / "pytorch_model.bin"),
        "not a table of weights by name",
    ),
    "not all tensors": (
        lambda f: torch.save({"a": torch.ones(2), "step": 5}, f / "pytorch_model.bin"),
        "not a table of weights by name",
    ),
    "points outside": (point_outside, "names '../outside.bin', expected files such as"),
    "link outside": (link_outside, "link that leads out of the folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_converted_is_refused_and_nothing_is_written(case, pickled):
    spoil, message = WRONG[case]
    spoil(pickled)
    before = sorted(path.name for path in pickled.iterdir())
    with pytest.raises(UserError, match=message):
        to_safetensors(pickled)
    assert sorted(path.name for path in pickled.iterdir()) == before


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        to_safetensors(tmp_path / "nothing")
