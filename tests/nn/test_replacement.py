"""A layer in another's place answers the calls that the other was given."""

import math

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.nn.dot_attention import DotSelfAttention
from tests.nn.watched import DIM, HEADS, TOKENS

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
    ls.convert(model, "l2", (X, mask))
    x = X[:, :1]
    alone = model.attention.layer(x) + model.attention.bias
    for own in (None, torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool)):
        assert torch.equal(model(x, own), alone)
    with pytest.raises(ls.UserError, match="neither causal nor empty"):
        model(x, torch.full((1, 1), -math.inf))


def test_a_sample_of_one_token_is_refused_as_it_does_not_tell_causal_attention_from_other():
    for inputs in (torch.randn(2, 1, DIM), (torch.randn(1, 1, DIM), torch.zeros(1, 1))):
        model = Attending()
        with pytest.raises(ls.UserError, match=r"attention .*the first sample has 1 token, padding apart; give two"):
            ls.convert(model, "l2", inputs)
        assert isinstance(model.attention, nn.MultiheadAttention)
    padding = torch.ones(1, TOKENS, dtype=torch.bool)
    for real in (1, 0):
        padding[0, :real], padding[0, real:] = False, True
        with pytest.raises(ls.UserError, match=f"has {real} token"):
            ls.convert(Attending(), "l2", (torch.randn(1, TOKENS, DIM), None, padding))
    with pytest.raises(ls.UserError, match="has 1 token"):
        ls.convert(nn.Sequential(DotSelfAttention(DIM, HEADS, causal=True)), "l2", torch.randn(1, 1, DIM))
