"""Invalid calls of convert_model, and unusual ones: frozen layers, shared layers."""

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.nn.attention_layer import DotSelfAttention
from lipscope.nn.l2_attention import L2SelfAttention
from tests.train.watched import DIM, HEADS, TOKENS, batches, unchecked


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True), 2)


@pytest.mark.parametrize(
    ("inputs", "layers", "message"),
    [
        (None, None, "inputs must be a tensor, a tuple .* got NoneType"),
        ("hello", None, "inputs must be a tensor, a tuple .* got str"),
        (
            [torch.ones(1, TOKENS, DIM)],
            None,
            r"got list; if the model takes such an object, pass \(inputs,\)",
        ),
        (torch.ones(2, 3, DIM + 1), None, r"TransformerEncoder does not run on the inputs \(.*9"),
        ({"foo": torch.ones(2, 3, DIM)}, None, "does not run on the inputs .*'foo'"),
        (torch.ones(2, 3, DIM), [], "layers is empty"),
        (torch.ones(2, 3, DIM), "layers.0.self_attn", "layers must be a list of layers"),
        (torch.ones(2, 3, DIM), [0], "must be names or modules, got 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(inputs, layers, message):
    model = encoder()
    with unchecked(), pytest.raises(ls.UserError, match=message):
        ls.convert_model(model, "l2", inputs, layers=layers)
    assert all(isinstance(layer.self_attn, nn.MultiheadAttention) for layer in model.layers)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_model_or_a_kind_that_is_none_is_refused():
    with unchecked():
        with pytest.raises(ls.UserError, match="convert_model takes a torch module, got NoneType"):
            ls.convert_model(None, "l2", batches(1)[0])
        for kind in (None, ["l2"]):
            with pytest.raises(ls.UserError, match=r"there is no attention .* to convert to"):
                ls.convert_model(encoder(), kind, batches(1)[0])


def test_frozen_layers_stay_frozen_and_the_others_train():
    model = encoder()
    model.layers[0].requires_grad_(False)
    model.layers[1].self_attn.out_proj.requires_grad_(False)
    ls.convert_model(model, "l2", batches(1)[0])
    assert not any(p.requires_grad for p in model.layers[0].parameters())
    assert all(p.requires_grad for p in model.layers[1].self_attn.parameters())
    own = nn.Sequential(DotSelfAttention(DIM, HEADS)).requires_grad_(False)
    ls.convert_model(own, "contractive", batches(1)[0], fresh=True)
    assert not any(p.requires_grad for p in own.parameters())


class Shared(nn.Module):
    """One attention under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, X, mask=None):
        Y = self.first(X, X, X)[0]
        return self.second(Y, Y, Y, attn_mask=mask)[0]


def test_a_layer_under_two_names_stays_one_layer():
    torch.manual_seed(0)
    model, X = Shared(), batches(1)[0]
    report = ls.convert_model(model, "l2", X)
    assert len(report.layers) == 1 and model.first is model.second
    assert isinstance(model.first.layer, L2SelfAttention) and model(X).shape == X.shape
    mixed = Shared()
    with pytest.raises(ls.UserError, match="converted with a causal attn_mask"):
        ls.convert_model(mixed, "l2", (X, nn.Transformer.generate_square_subsequent_mask(TOKENS)))
    assert isinstance(mixed.first, nn.MultiheadAttention) and mixed.first is mixed.second
