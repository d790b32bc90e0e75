"""No code that comes with a model ever runs, and every broken repository gets an error message."""

import json
import pickle
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file

from lipscope._types import UserError
from lipscope.models import loading, repository
from lipscope.models.attention import configs
from lipscope.models.loading import load
from lipscope.models.repository import scrub
from tests.models.test_loading import edit, words
from tests.models.zoo import make, sample

HOSTILE = {
    "_attn_implementation": "owner/repo",
    "attn_implementation": {"": "owner/repo"},
    "_attn_implementation_internal": "owner/repo",
    "_experts_implementation": "owner/repo",
    "auto_map": {
        "AutoConfig": "evil.Config",
        "AutoModel": "evil.Model",
        "AutoTokenizer": ["evil.Words", None],
    },
    "transformers_weights": "pytorch_model.bin",
    "fusion_config": {"a": True},
    "use_kernels": True,
    "custom_pipelines": {"x": {"impl": "evil.Pipeline"}},
}


class Payload:
    """Unpickling it is the end."""

    def __reduce__(self):
        return sys.exit, ("a pickle was read",)


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A good model in a folder that tries everything else."""
    make("llama").save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    edit(tmp_path, **HOSTILE)
    spoken = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**spoken, **HOSTILE}))
    (tmp_path / "evil.py").write_text("raise SystemExit('code from the repository ran')\n")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "owner/repo"})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"custom_generate": "owner/repo"}))

    def run(*_, **__):
        raise AssertionError("transformers was about to load code from a repository")

    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_from_dynamic_module", run)
    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_in_module", run)
    monkeypatch.setattr(torch, "load", run)
    return tmp_path


def test_a_hostile_folder_gives_a_plain_model(hostile):
    model = load(str(hostile))
    assert {config._attn_implementation for config in configs(model.trunk)} == {"eager"}
    assert type(model.trunk).__module__ == "transformers.models.llama.modeling_llama"
    assert not any(hasattr(config, "auto_map") for config in configs(model.trunk))
    assert model.card.weights == load(make("llama")).card.weights
    assert model.encode("w1 w2") == [1, 2]
    assert model.sites(**sample("llama"))
    assert not any(name.startswith("transformers_modules") for name in sys.modules)


def test_what_is_in_force_is_asserted_not_believed(hostile, monkeypatch):
    """The planted bug: something, somewhere, overrides what was asked for."""
    model = make("llama")
    model.config._attn_implementation_internal = "owner/repo"
    monkeypatch.setattr(loading, "_random", lambda *_: model)
    with pytest.raises(UserError, match="refused to load: the model selects attention"):
        load(str(hostile), random_init=0)


def test_scrubbing_reaches_any_depth_and_keeps_the_rest():
    config = {
        "hidden_size": 8,
        "conv_kernel": [3],
        "layers": [{"a": {**HOSTILE, "b": 1}}],
        **HOSTILE,
    }
    assert scrub(config) == {"hidden_size": 8, "conv_kernel": [3], "layers": [{"a": {"b": 1}}]}


def only_pickles(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def index_that_leads_outside(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "../model.safetensors", "b": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def torn_weights(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def weights_of_another_size(folder):
    edit(folder, hidden_size=16)


def eight_bit_weights(folder):
    save_file({"norm.weight": torch.ones(8).to(torch.float8_e4m3fn)}, folder / "model.safetensors")


def integers(dtype):
    def spoil(folder):
        weights = load_file(folder / "model.safetensors")
        weights["layers.0.mlp.up_proj.weight"] = weights["layers.0.mlp.up_proj.weight"].to(dtype)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def gguf(folder):
    (folder / "model.safetensors").rename(folder / "model.gguf")


def odd_index(value):
    def spoil(folder):
        (folder / "model.safetensors").unlink()
        index = {"weight_map": value}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return spoil


WRONG = {
    "int8 weights": (integers(torch.int8), r"in torch.int8 \(layers.0.mlp.up_proj.weight\)"),
    "bool weights": (integers(torch.bool), "in torch.bool"),
    "GGUF": (gguf, "only GGUF weights"),
    "index with a list": (odd_index([1]), "names \\[1\\], expected files such as"),
    "index with a number": (odd_index({"a": 5}), "names 5, expected files such as"),
    "index that begins well and leads outside": (
        odd_index({"a": "model/../../x.safetensors"}),
        "names 'model/../../x.safetensors', expected files such as",
    ),
    "index with null": (odd_index({"a": None}), "names None, expected files such as"),
    "list as type": (lambda f: edit(f, model_type=["bert"]), r"of type \['bert'\]"),
    "tokenizer that is a list": (
        lambda f: (f / "tokenizer.json").write_text("[]"),
        "tokenizer.json must contain a JSON object, got list",
    ),
    "tokenizer class that is a number": (
        lambda f: (f / "tokenizer_config.json").write_text('{"tokenizer_class": 5}'),
        "tokenizer",
    ),
    "special tokens that are a list": (
        lambda f: (f / "special_tokens_map.json").write_text("[1, 2]"),
        "special_tokens_map.json must contain a JSON object, got list",
    ),
    "only pickles": (only_pickles, "only pickled weights.*write safetensors.*or use random_init"),
    "no weights": (no_weights, "expected weights in model.safetensors.*got none"),
    "index that leads outside": (
        index_that_leads_outside,
        "names '../model.safetensors', expected files such as",
    ),
    "torn weights": (torn_weights, "cannot be read"),
    "weights of another size": (
        weights_of_another_size,
        r"do not fit its configuration: .* has shape \(.*\), expected",
    ),
    "fp8 weights": (eight_bit_weights, "float8_e4m3fn.*float16 or finer"),
    "fp8 configuration": (
        lambda f: edit(f, quantization_config={"quant_method": "fp8"}),
        r"quantised \(fp8\)",
    ),
    "unknown type": (
        lambda f: edit(f, model_type="evil"),
        "never runs code that comes with a model",
    ),
    "no type": (
        lambda f: edit(f, model_type=None),
        "None, which this version of transformers does not contain",
    ),
    "nonsense": (lambda f: edit(f, num_hidden_layers="many"), "does not describe a llama model"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "must contain a JSON object, got list",
    ),
    "broken tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        "tokenizer cannot be read.*pass another tokenizer",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_repository_that_is_wrong_is_refused(case, tmp_path):
    make("llama").save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    spoil, message = WRONG[case]
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load(str(tmp_path))
    assert str(caught.value).count("\n") == 0


def test_random_weights_need_no_weights(tmp_path):
    make("llama").save_pretrained(tmp_path)
    edit(tmp_path, quantization_config={"quant_method": "fp8"})
    only_pickles(tmp_path)
    assert load(str(tmp_path), random_init=0).preflight.routed


def answer(kind):
    return kind("refused by the hub", response=SimpleNamespace(headers={}, request=None))


HUB = {
    "unknown": (
        lambda: answer(RepositoryNotFoundError),
        "there is no model 'owner/name' on the hub",
    ),
    "gated": (lambda: answer(GatedRepoError), "owner/name is gated.*hf auth login"),
    "revision": (lambda: answer(RevisionNotFoundError), "has no revision 'v9'"),
    "server": (lambda: answer(HfHubHTTPError), "the hub did not answer for owner/name"),
    "no config": (lambda: EntryNotFoundError("no entry"), "has no config.json"),
    "no network": (
        lambda: LocalEntryNotFoundError("no network"),
        "the hub cannot be reached.*check the connection",
    ),
}


@pytest.mark.parametrize("case", HUB)
def test_the_hubs_answers_become_letters(case, monkeypatch):
    make_error, message = HUB[case]

    def fail(*_, **__):
        raise make_error()

    monkeypatch.setattr(repository, "hf_hub_download", fail)
    with pytest.raises(UserError, match=message) as caught:
        load("owner/name", revision="v9")
    assert str(caught.value).count(". ") <= 2


def test_offline_is_honoured(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE prevents"):
        load("owner/name")


def test_a_path_that_is_not_there_is_not_asked_of_the_hub(monkeypatch):
    """Names on the hub have one slash at most."""
    monkeypatch.setattr(repository, "hf_hub_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(UserError, match="is not a folder with a model; check the path"):
        load("models/llama/small")
