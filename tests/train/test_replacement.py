"""A layer in another's place answers the calls that the other was given."""

import copy
import math

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.nn.attention_layer import DotSelfAttention
from tests.train.watched import DIM, HEADS, TOKENS

CAUSAL = nn.Transformer.generate_square_subsequent_mask(TOKENS)


class Attending(nn.Module):
    """One nn.MultiheadAttention as its users call it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, X, mask=None, padding=None):
        return self.attention(X, X, X, attn_mask=mask, key_padding_mask=padding)[0]


@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["full", "causal"])
def test_a_single_token_may_come_with_a_mask_or_without(mask):
    torch.manual_seed(0)
    model, X = Attending().eval(), torch.randn(2, TOKENS, DIM)
    ls.convert_model(model, "l2", (X, mask))
    x = X[:, :1]
    alone = model.attention.layer(x) + model.attention.bias
    for own in (None, torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool)):
        assert torch.equal(model(x, own), alone)
    with pytest.raises(ls.UserError, match="neither causal nor empty"):
        model(x, torch.full((1, 1), -math.inf))


def test_a_sample_of_one_token_is_refused_as_it_does_not_tell_causal_attention_from_other():
    for inputs in (torch.randn(2, 1, DIM), (torch.randn(1, 1, DIM), torch.zeros(1, 1))):
        model = Attending()
        with pytest.raises(
            ls.UserError, match=r"attention .*the first sample has 1 token without padding"
        ):
            ls.convert_model(model, "l2", inputs)
        assert isinstance(model.attention, nn.MultiheadAttention)
    padding = torch.ones(1, TOKENS, dtype=torch.bool)
    for real in (1, 0):
        padding[0, :real], padding[0, real:] = False, True
        with pytest.raises(ls.UserError, match=f"has {real} token"):
            ls.convert_model(Attending(), "l2", (torch.randn(1, TOKENS, DIM), None, padding))
    with pytest.raises(ls.UserError, match="has 1 token"):
        ls.convert_model(
            nn.Sequential(DotSelfAttention(DIM, HEADS, causal=True)), "l2", torch.randn(1, 1, DIM)
        )


def converted(to="l2", mask=None, batch_first=True):
    """An attention that was nn.MultiheadAttention, and that one."""
    torch.manual_seed(0)
    model, X = Attending().eval(), torch.randn(2, TOKENS, DIM)
    with torch.no_grad():
        model.attention.in_proj_bias[2 * DIM :] = torch.randn(DIM)
    old = copy.deepcopy(model.attention)
    ls.convert_model(model, to, (X, mask))
    model.attention.batch_first = old.batch_first = batch_first
    return model.attention, old


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["none", "boolean", "additive", "one sequence"])
def test_to_dot_every_argument_means_what_it_meant(kind, mask, batch_first):
    new, old = converted("dot", mask, batch_first)
    X = torch.randn(3, TOKENS, DIM)
    hidden = torch.zeros(3, TOKENS, dtype=torch.bool)
    hidden[0, 4:] = hidden[1, 2:] = kind != "none"
    X, hidden = (X[0], hidden[0]) if kind == "one sequence" else (X, hidden)
    padding = (
        torch.zeros(hidden.shape).masked_fill(hidden, -math.inf) if kind == "additive" else hidden
    )
    given = X.transpose(0, 1) if not batch_first and X.ndim == 3 else X
    for average in (True, False):
        options = {"key_padding_mask": padding, "attn_mask": mask, "average_attn_weights": average}
        (y, P), (z, R) = (layer(given, given, given, **options) for layer in (new, old))
        y, z = (v.transpose(0, 1) if not batch_first and X.ndim == 3 else v for v in (y, z))
        assert torch.allclose(y[~hidden], z[~hidden], atol=1e-5)
        P, R = (A if average else A.movedim(-3, -2).flatten(-2) for A in (P, R))
        assert P.shape == R.shape and torch.allclose(P[~hidden], R[~hidden], atol=1e-6)
        assert torch.equal(y[hidden], new.bias.expand_as(y[hidden])) and (P[hidden] == 0).all()
    y_too, nothing = new(given, given, given, padding, need_weights=False, attn_mask=mask)
    assert nothing is None and torch.equal(
        y_too.transpose(0, 1) if y_too.shape != y.shape else y_too, y
    )


def test_is_causal_speaks_where_there_is_no_mask_and_never_against_the_layer():
    X = torch.randn(2, TOKENS, DIM)
    causal, _ = converted(mask=CAUSAL)
    expected = causal(X, X, X, attn_mask=CAUSAL)[0]
    assert torch.equal(causal(X, X, X, is_causal=True)[0], expected)
    assert torch.equal(causal(X, X, X, attn_mask=CAUSAL, is_causal=True)[0], expected)
    full, _ = converted()
    with pytest.raises(ls.UserError, match="converted with no attn_mask"):
        full(X, X, X, is_causal=True)
    with pytest.raises(ls.UserError, match="converted with a causal attn_mask"):
        causal(X, X, X)


def test_what_a_padding_mask_cannot_be_is_refused():
    layer, _ = converted()
    X = torch.randn(2, TOKENS, DIM)
    with pytest.raises(ls.UserError, match="only 0 and -inf"):
        layer(X, X, X, key_padding_mask=torch.full((2, TOKENS), -1e9))
    with pytest.raises(ls.UserError, match=r"padding must be a boolean tensor \[2, 6\]"):
        layer(X, X, X, key_padding_mask=torch.zeros(2, TOKENS + 1, dtype=torch.bool))
    for key, value in ((X + 1, X), (X, X + 1)):
        with pytest.raises(ls.UserError, match="key or value is not the query"):
            layer(X, key, value)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_keeps_to_the_converted_attention_on_every_path(training):
    """In evaluation torch's encoder has a fused kernel and nested tensors; neither may be used."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True)
    model, X = nn.TransformerEncoder(layer, 2).train(training), torch.randn(3, TOKENS, DIM)
    ls.convert_model(model, "contractive", X)
    stacked = nn.TransformerEncoder(model.layers[0], 2).train(training)
    hidden = torch.zeros(3, TOKENS, dtype=torch.bool)
    hidden[1, 3:] = True
    for net in (model, stacked):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                y = net(X, src_key_padding_mask=hidden)
                assert (
                    torch.allclose(y[1, :3], net(X[1:2, :3])[0], atol=1e-5) and y.shape == X.shape
                )
