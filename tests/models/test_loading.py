"""What is loaded is what was asked for, recorded, reproducible, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lipscope._types import UserError
from lipscope.models import repository
from lipscope.models.loading import _saved_prefix, load, tokenizer_hash, weights_hash
from tests.models.zoo import FAMILIES, make, sample

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def words(size=50):
    """A tokenizer that knows w0, w1, ..."""
    vocabulary = {f"w{i}": i for i in range(size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama as transformers saves it."""
    make("llama").save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    return tmp_path


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_and_the_live_module_are_the_same_model(folder):
    stored, live = load(str(folder)), load(make("llama"), words())
    assert stored.card.weights == live.card.weights
    assert stored.card.tokenizer == live.card.tokenizer
    assert (stored.owned, live.owned) == (True, False)
    for a, b in zip(stored.sites(**sample("llama")), live.sites(**sample("llama")), strict=True):
        torch.testing.assert_close(a.value(), b.value(), rtol=1e-13, atol=1e-13)


def test_the_card_records_what_was_loaded(folder):
    card = load(str(folder), dtype="float32").card
    assert (card.name, card.revision, card.architecture) == (str(folder), None, "LlamaModel")
    assert (card.dtype, card.device, card.random_init) == ("float32", "cpu", None)
    assert card.weights == weights_hash(make("llama"))
    assert card.versions["torch"] == torch.__version__ and "transformers" in card.versions


def test_every_weight_decides_the_hash():
    module = make("llama")
    before = weights_hash(module)
    with torch.no_grad():
        list(module.parameters())[-1][-1] += 1e-6
    assert weights_hash(module) != before
    assert weights_hash(make("llama").bfloat16()) != before


def test_the_tokenizer_hash_sees_the_vocabulary_and_not_its_use():
    a, b = words(), words()
    b("w1 w2", truncation=True, max_length=1)
    assert tokenizer_hash(a) == tokenizer_hash(b) != tokenizer_hash(words(51))


def test_random_weights_are_reproducible_and_of_the_same_architecture(folder):
    a, b, c = (load(str(folder), random_init=seed) for seed in (3, 3, 4))
    assert a.card.weights == b.card.weights != c.card.weights
    assert a.card.weights != load(str(folder)).card.weights
    assert a.card.random_init == 3 and a.layers == 2
    live = make("llama")
    assert load(live, random_init=3).card.weights == a.card.weights
    assert weights_hash(live) == weights_hash(make("llama"))


def test_random_weights_leave_the_callers_randomness_alone(folder):
    before = torch.get_rng_state()
    load(str(folder), random_init=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_shards_are_read(folder):
    module = make("llama")
    (folder / "model.safetensors").unlink()
    module.save_pretrained(folder, max_shard_size="2KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    assert load(str(folder)).card.weights == weights_hash(module)


def test_half_precision_weights_are_measured_in_float64(tmp_path):
    module = make("llama").bfloat16()
    module.save_pretrained(tmp_path)
    model = load(str(tmp_path))
    assert model.card.weights == weights_hash(module)
    assert {p.dtype for p in model.trunk.parameters()} == {torch.float64}
    for p, q in zip(model.trunk.parameters(), module.parameters(), strict=True):
        assert torch.equal(p, q.double())


def test_a_wrapped_model_is_measured_from_embeddings_to_last_hidden_state(tmp_path):
    from transformers import BertForSequenceClassification

    module = BertForSequenceClassification(make("bert").config)
    module.save_pretrained(tmp_path)
    assert load(module).card.weights == load(str(tmp_path)).card.weights
    assert load(module).card.architecture == "BertModel"


def test_of_an_encoder_decoder_the_encoder_is_measured(tmp_path):
    from transformers import T5Config, T5Model

    module = T5Model(T5Config(**FAMILIES["t5"].options)).double().eval()
    module.save_pretrained(tmp_path)
    model = load(str(tmp_path))
    assert model.card.architecture == "T5Model (encoder)" and model.layers == 2
    expected = module.encoder(**sample("t5")).last_hidden_state
    (site,) = model.sites(**sample("t5"), scopes=["model"])
    torch.testing.assert_close(site.value(), expected, rtol=1e-4, atol=1e-4)


def test_weights_that_are_not_there_never_pass_for_measured_ones(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="missing"):
        load(str(folder)).sites(**sample("llama"))


def test_a_missing_pooler_does_no_harm(tmp_path):
    module = make("bert")
    module.register_module("pooler", None)
    module.save_pretrained(tmp_path)
    assert load(str(tmp_path)).preflight.routed


class Hub:
    """A hub with one repository, files in a folder named by the commit."""

    def __init__(self, folder: Path):
        self.snapshot = folder / "snapshots" / COMMIT
        self.asked: list[tuple[Any, Any, Any]] = []
        self.snapshot.mkdir(parents=True)

    def hf_hub_download(self, name, filename, revision):
        self.asked.append((name, filename, revision))
        return str(self.snapshot / filename)

    def snapshot_download(self, name, revision, allow_patterns):
        self.asked.append((name, allow_patterns, revision))
        return str(self.snapshot)


def test_a_hub_revision_is_pinned_and_recorded(tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    make("llama").save_pretrained(hub.snapshot)
    monkeypatch.setattr(repository, "hf_hub_download", hub.hf_hub_download)
    monkeypatch.setattr(repository, "snapshot_download", hub.snapshot_download)
    model = load("somebody/llama", revision="v1")
    assert (model.card.name, model.card.revision) == ("somebody/llama", COMMIT)
    (_, _, first), (_, patterns, second) = hub.asked
    assert (first, second) == ("v1", COMMIT)
    fetched = [
        name
        for name in (
            "modeling_x.py",
            "pytorch_model.bin",
            "a.pkl",
            "model.gguf",
            "model.safetensors",
        )
        if any(Path(name).match(pattern) for pattern in patterns)
    ]
    assert fetched == ["model.safetensors"]
    load("somebody/llama", random_init=0)
    assert not any("safetensors" in pattern for pattern in hub.asked[-1][1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": torch.nn.Linear(2, 2)}, "local_lipschitz"),
        ({"source": "embedded", "revision": "v1"}, "one revision"),
        ({"source": "{folder}", "dtype": "float8_e4m3fn"}, "float64, float32"),
        ({"source": "{folder}", "dtype": torch.int8}, "dtype must be one of"),
        ({"source": "{folder}", "device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"source": "{folder}", "device": "nowhere"}, "try cpu"),
        ({"source": "{folder}/nothing"}, "not a folder with a model"),
        ({"source": "{folder}/config.json"}, "not a folder with a model"),
        ({"source": "./nothing"}, "not a folder with a model"),
        ({"source": "{empty}"}, "no config.json"),
        ({"source": "{folder}", "revision": "v1"}, "is a folder and has no revisions"),
        ({"source": "~nosuchuser/x"}, "is not a folder with a model"),
        ({"source": "a" * 5000}, "is not a folder with a model"),
        ({"source": "{folder}", "random_init": -1}, "random_init must be an integer from 0"),
        ({"source": "{folder}", "random_init": 2**64}, "random_init must be an integer from 0"),
        ({"source": "{folder}", "random_init": True}, "random_init must be an integer from 0"),
        ({"source": "{folder}", "tokenizer": 5}, "tokenizer must be a folder, a name"),
        ({"source": "{folder}", "tokenizer": "./nothing"}, "./nothing is not a folder"),
        ({"source": "two words"}, "neither a folder nor the name"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_sentence_or_two(
    folder, tmp_path_factory, arguments, message
):
    places = {"folder": folder, "empty": tmp_path_factory.mktemp("empty")}
    source = arguments.pop("source")
    with pytest.raises(UserError, match=message) as caught:
        load(source.format(**places) if isinstance(source, str) else source, **arguments)
    assert str(caught.value).count(". ") <= 1


def test_a_tokenizer_lies_in_a_folder_of_its_own(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("words")
    words(30).save_pretrained(other)
    for given in (str(other), other):
        model = load(folder, given)
        assert len(model.tokenizer) == 30 and model.encode("w29 w40") == [29, 0]
    with pytest.raises(UserError, match=r"has no tokenizer; expected tokenizer.json"):
        load(folder, tmp_path_factory.mktemp("empty"))


def adapter(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')


def checkpoints(folder):
    for step in (200, 1000):
        make("llama").save_pretrained(folder / f"checkpoint-{step}")


def cache(folder):
    make("llama").save_pretrained(folder / "snapshots" / COMMIT)


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (adapter, r"holds an adapter \(LoRA\).*merge_and_unload"),
        (checkpoints, "holds 2 folders with one.*checkpoint-1000"),
        (cache, f"snapshots/{COMMIT}"),
    ],
)
def test_what_lies_in_a_folder_without_a_model_is_named(fill, message, tmp_path):
    fill(tmp_path)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


class Packed(torch.Tensor):
    """Stands in for the weights of torchao, which pretend to be float32."""


def dynamic(module):
    return torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear}, dtype=torch.qint8)


def packed(module):
    linear = module.encoder.layer[0].attention.self.query
    linear.weight = torch.nn.Parameter(linear.weight.data.as_subclass(Packed))
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("change", "name"), [(dynamic, "quantized.*Linear"), (packed, "Packed")])
def test_quantised_live_modules_are_refused_by_name(change, name):
    with pytest.raises(UserError, match=rf"quantised or packed \(.*{name}\)"):
        load(change(make("bert").float()))


def test_weights_of_zero_are_named(tmp_path):
    module = make("bert")
    for weight in module.parameters():
        weight.data.zero_()
    with pytest.raises(UserError, match="its weights are all 0"):
        load(module).layers  # noqa: B018


@pytest.mark.parametrize("architectures", [None, [], ["NoSuchModel"], [5], ["BertModel"]])
def test_without_a_known_class_a_checkpoint_has_no_prefix(architectures):
    trunk = make("bert")
    trunk.config.architectures = architectures
    assert _saved_prefix(trunk) == ""
    trunk.config.architectures = ["BertForMaskedLM"]
    assert _saved_prefix(trunk) == "bert."
