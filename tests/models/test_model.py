"""What a model says of itself, and what it refuses."""

from typing import Any

import pytest
import torch
from transformers import JambaConfig, JambaModel

import lipscope as ls
from lipscope._types import UserError
from lipscope.attention.layer import HeadsApart, SelfAttention
from lipscope.models import closed_form
from lipscope.models import model as model_module
from lipscope.models.loading import load
from lipscope.probes.budget.subject import read_subject
from lipscope.train.watched_models import watch
from tests.models.test_loading import words
from tests.models.zoo import BYPASSING, FAMILIES, make, sample

POSITIONS = {"roberta": 38, "t5": None, "vit": None, "falcon": 2048}


@pytest.mark.parametrize("name", [*FAMILIES, *BYPASSING])
def test_layers_heads_and_positions(name):
    model = load(make(name))
    assert (model.layers, model.heads) == (2, 0 if name in BYPASSING else 2)
    assert model.max_positions == POSITIONS.get(name, 40)


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2"])
def test_the_last_position_can_be_measured_and_no_later_one(name):
    model = load(make(name))
    limit = model.max_positions
    assert limit is not None
    model.survey(torch.randint(3, 50, (1, limit)))
    with pytest.raises(UserError, match=f"{limit + 1} tokens are more than the {limit} positions"):
        model.survey(torch.randint(3, 50, (1, limit + 1)))
    with pytest.raises((IndexError, RuntimeError)):
        make(name)(torch.randint(3, 50, (1, limit + 1)))


def test_text_becomes_tokens_and_back():
    model = load(make("bert"), words())
    assert model.encode("w3 w4") == [3, 4]
    assert model.tokens([3, 4]) == ["w3", "w4"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({}, "got none"),
    "two inputs": (
        {"input_ids": [1], "inputs_embeds": torch.zeros(1, 2, 8)},
        "got input_ids, inputs_embeds",
    ),
    "empty": ({"input_ids": []}, "integers"),
    "real ids": ({"input_ids": [0.5]}, "integers"),
    "too deep": ({"input_ids": [[[1]]]}, r"\[B, n\] or \[n\]"),
    "flat embeddings": ({"inputs_embeds": torch.zeros(8)}, "3 dimensions"),
    "scope": (
        {"input_ids": [1, 2], "scopes": ["mlp"]},
        "no scope 'mlp'; the scopes are heads, attention",
    ),
    "layer": (
        {"input_ids": [1, 2], "layers": [2]},
        "layer 2 does not exist: BertModel has layers 0 to 1",
    ),
    "negative layer": ({"input_ids": [1, 2], "layers": [-1]}, "layer -1"),
    "head": (
        {"input_ids": [1, 2], "heads": [2]},
        "head 2 does not exist: layer 0 has heads 0 to 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    arguments, message = BAD[case]
    with pytest.raises(UserError, match=message):
        load(make("bert")).sites(**arguments)


def test_text_needs_a_tokenizer():
    with pytest.raises(UserError, match="has no tokenizer"):
        load(make("bert")).encode("w1")


def test_embeddings_are_taken_in_place_of_tokens():
    module, ids = make("bert"), sample("bert")["input_ids"]
    model, vectors = load(module), module.get_input_embeddings()(ids).detach()
    for a, b in zip(model.sites(ids), model.sites(inputs_embeds=vectors), strict=True):
        torch.testing.assert_close(a.X, b.X, rtol=1e-12, atol=1e-12)


def test_every_length_is_checked_against_eager_attention_and_the_worst_is_kept():
    model = load(make("mistral"))
    lengths = (2, 9, 5)
    for n in lengths:
        model.survey(torch.randint(3, 50, (2, n)))
    assert {check.n for check in model._checks.values()} >= set(lengths)
    assert model.preflight.difference == max(check.difference for check in model._checks.values())


def test_what_is_known_of_a_module_is_forgotten_when_its_weights_change():
    """A live module in training: its projections are probed again after every step."""
    module, ids = make("bert"), sample("bert")["input_ids"]
    model = load(module)
    before = [site.value() for site in model.sites(ids, layers=[0])]
    with torch.no_grad():
        for parameter in module.get_submodule("encoder.layer.0.attention").parameters():
            parameter.mul_(2)
    after = [site.value() for site in model.sites(ids, layers=[0])]
    fresh = [site.value() for site in load(module).sites(ids, layers=[0])]
    for a, b, c in zip(before, after, fresh, strict=True):
        assert torch.equal(b, c) and not torch.allclose(a, b)


def test_a_module_is_probed_once_for_all_lengths(monkeypatch):
    model, probes = load(make("llama")), []
    original = closed_form.attention_call

    def counted(runner, core, call):
        if not call.hidden[0, 0].any():  # the first token of a probe is zero
            probes.append(call)
        return original(runner, core, call)

    monkeypatch.setattr(closed_form, "attention_call", counted)
    for n in (1, 4, 7, 7):
        maps = [site.f for site in model.sites(torch.randint(3, 50, (2, n)))]
        assert all(isinstance(f, SelfAttention | HeadsApart) for f in maps)
    assert len(probes) == 4, "two layers, at one token, where nothing turns, and once more at four"
    model = load(make("qwen3"))
    for n in (4, 7):
        model.sites(torch.randint(3, 50, (2, n)))
    assert len(probes) == 6, "once a layer, and never again where it is not plain self-attention"


def test_eager_attention_sees_the_beginning_of_a_long_text_only(monkeypatch):
    """Its memory grows with the square of the length; what is measured is still the whole text."""
    monkeypatch.setattr(model_module, "COMPARED", 10)
    model = load(make("llama"))
    site = model.survey(torch.randint(3, 50, (1, 30))).site("attention", 0)
    assert model.preflight.n == 10 and site.X.shape[1] == 30


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "map the names of the model's arguments"),
        ({"input_ids": [[1, 2]], "pixel_values": None}, "pixel_values must have 4 dimensions"),
        ({"return_loss": True}, "must contain a tensor"),
        ({"nothing": torch.ones(1, 2)}, "does not run on nothing.*give them all"),
        ({"input_ids": [[50]]}, "token id 50 is not in the vocabulary of BertModel, 0 to 49"),
        ({"input_ids": [[-1]]}, "token id -1 is not in the vocabulary"),
    ],
)
def test_inputs_that_make_no_call_are_refused(inputs, message):
    with pytest.raises(UserError, match=message):
        load(make("bert")).sites(inputs=inputs)


def test_inputs_by_name_are_the_same_as_input_ids():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    model = load(make("bert"))
    named = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for a, b in zip(model.sites(ids), model.sites(inputs=named), strict=True):
        assert a.members == b.members
        torch.testing.assert_close(a.value(), b.value(), rtol=1e-14, atol=1e-14)


class Dropped(torch.nn.Module):
    """A module that returns an empty tensor, as some models do for a part they do not use."""

    def forward(self, x):
        return x[..., :0]


def test_a_module_that_returns_an_empty_tensor_does_no_harm():
    module = make("llama")
    plain = load(module).sites([1, 2, 3], scopes=["attention", "residual"])
    mlp = module.layers[0].mlp
    mlp.dropped = Dropped()

    def drop(_, args):
        mlp.dropped(args[0])

    module.layers[0].register_forward_pre_hook(drop)
    mlp.register_forward_pre_hook(drop)
    spoiled = load(module).sites([1, 2, 3], scopes=["attention", "residual"])
    for a, b in zip(plain, spoiled, strict=True):
        assert torch.equal(a.value(), b.value())


def test_a_limit_below_zero_is_none():
    module = make("bert")
    module.config.max_position_embeddings = -1
    model = load(module)
    assert model.max_positions is None and model.layers == 2


def jamba():
    torch.manual_seed(0)
    config = JambaConfig(
        vocab_size=50, hidden_size=8, intermediate_size=12, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, attn_layer_period=2, attn_layer_offset=1,
        num_experts=1, mamba_d_state=4, mamba_dt_rank=2,
    )  # fmt: skip
    return JambaModel(config).eval()


def test_layers_of_a_hybrid_have_the_numbers_of_its_blocks():
    module = jamba()
    model = load(module)
    ids = torch.arange(6)
    assert (model.layers, model.attending) == (4, (1, 3))
    sites = model.sites(ids, scopes=["attention", "block", "suffix", "model"])
    assert [site.layer for site in sites] == [1, 1, 1, 3, 3, 3, None]
    hidden = module(ids[None], output_hidden_states=True).hidden_states
    for site, entered in zip(sites[1:], [1, 1, None, 3, 3, 0], strict=True):
        if entered is not None:  # attention reads the normalised tokens
            assert torch.allclose(site.X, hidden[entered].double(), atol=1e-5)
    budgeted = read_subject(module, ids, head=False, length=6, samples=1)
    assert sorted(budgeted.attending) == [1, 3] and len(budgeted.layers) == 4


@pytest.mark.parametrize(
    "measured",
    [
        lambda model: model.sites([1, 2], layers=[0]),
        lambda model: ls.measure(model, torch.arange(9), [4], 1, [0]),
        lambda model: ls.attack_model(
            model, torch.arange(9), ls.AttackPlan("direction", layers=(0,), length=4)
        ),
        lambda model: watch(model.trunk, [0]),
    ],
)
def test_a_layer_without_attention_is_refused_by_name(measured):
    expected = "layer 0 of this model has no attention; the layers with attention are 1, 3"
    with pytest.raises(UserError, match=expected):
        measured(load(jamba()))
