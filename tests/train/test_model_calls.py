"""Calls of convert on transformers models that cannot be meant, or have a turn of their own."""

import pytest
import torch

import lipscope as ls
from lipscope.train.convert import convert_model
from tests.models import zoo
from tests.train.watched import unchecked

IDS = zoo.sample("gpt2")["input_ids"]


@pytest.mark.parametrize(
    ("inputs", "layers", "message"),
    [
        (None, None, "the model was called with no tokens"),
        ("hello", None, "inputs must be token ids .*encode a text with"),
        (["a", "text"], None, "inputs must be token ids .*encode a text with"),
        ([[1, 2, 3], [4, 5]], None, "inputs must be token ids"),
        ((IDS, IDS), None, "inputs must be token ids .* or a dictionary"),
        (IDS, [], "layers is empty"),
        (IDS, "0", "layers must be a list of layers"),
        (IDS, 1, r"as in layers=\[1\], got int"),
        (IDS, [0, 0], "layer 0 is listed 2 times"),
        (IDS, ["0"], "layer '0' does not exist: the model has layers 0 to 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(inputs, layers, message):
    model = zoo.make("gpt2")
    with unchecked(), pytest.raises(ls.UserError, match=message):
        convert_model(model, "l2", inputs, layers=layers)
    assert {type(block.attn).__name__ for block in model.h} == {"GPT2Attention"}


@pytest.mark.parametrize(
    "inputs", [[1, 2, 3], [[1, 2, 3], [4, 5, 6]], (torch.tensor([[1, 2, 3]]),)]
)
def test_ids_may_be_lists_or_the_only_argument(inputs):
    expected = convert_model(zoo.make("gpt2"), "l2", torch.tensor([[1, 2, 3]]))
    found = convert_model(zoo.make("gpt2"), "l2", inputs)
    values = [row.after.value for row in expected.layers]
    assert [row.after.value for row in found.layers] == pytest.approx(values, rel=1e-12)


def test_the_layers_of_a_converted_model_go_by_name():
    model = zoo.make("gpt2")
    convert_model(model, "l2", IDS, layers=[1])
    for layers in ([0], [1]):
        with pytest.raises(
            ls.UserError,
            match=r"is selected by name, as in layers=\['h.1.attn.layer'\]; to convert more",
        ):
            convert_model(model, "dot", IDS, layers=layers)
    report = convert_model(model, "dot", IDS, layers=["h.1.attn.layer"])
    assert [(row.old, row.new) for row in report.layers] == [
        ("L2SelfAttention", "DotSelfAttention")
    ]


@pytest.mark.parametrize(
    ("name", "path"), [("gpt2", "h.0.attn"), ("bert", "encoder.layer.0.attention")]
)
def test_a_frozen_model_stays_frozen(name, path):
    model = zoo.make(name).requires_grad_(False)
    model.get_submodule(path.replace("0", "1")).requires_grad_(True)
    convert_model(model, "l2", zoo.sample(name))
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    assert trained and all(key.startswith(path.replace("0", "1")) for key in trained)
    assert any(key.endswith("layer.query.weight") for key in trained)


def test_arguments_by_position_mean_what_they_meant_to_the_old_attention():
    X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([[1, 1, 1, 0, 0]])
    gpt2, bert = zoo.make("gpt2"), zoo.make("bert")
    convert_model(gpt2, "l2", IDS)
    convert_model(bert, "l2", IDS)
    causal, full = gpt2.h[0].attn, bert.encoder.layer[0].attention.self
    with pytest.raises(ls.UserError, match="has no cache"):
        causal(X, object())
    for module, args in ((causal, (None, padding)), (full, (padding,))):
        expected = module(X[:, :3])[0]
        assert torch.allclose(module(X, *args)[0][:, :3], expected, atol=1e-6)
        assert torch.allclose(
            module(hidden_states=X, attention_mask=padding)[0][:, :3], expected, atol=1e-6
        )
    assert not torch.allclose(full(X)[0][:, :3], full(X[:, :3])[0], atol=1e-3)
