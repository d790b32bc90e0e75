"""The character models are causal, compute what their names say, and some are invertible."""

import math

import pytest
import torch

from lipscope._types import UserError
from lipscope.nn import ATTENTIONS
from lipscope.papers.charlm.language_model import (
    VARIANTS,
    Architecture,
    CharacterLSTM,
    CharacterTransformer,
    UntiedL2Attention,
    described,
    unrolled,
)
from lipscope.papers.charlm.training import layer_constants


def small(attention: str, invertible: bool = False, norm: str = "pre") -> CharacterTransformer:
    torch.manual_seed(0)
    return CharacterTransformer(
        Architecture(11, attention, 3, 8, 2, 12, invertible, norm=norm)
    ).double()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("norm", "count"), [("pre", 7), ("post", 6), ("none", 0)])
def test_no_character_sees_what_follows_it(attention, norm, count):
    model = small(attention, norm=norm)
    ids = torch.arange(10) % 11
    changed = ids.clone()
    changed[6:] = 3
    before, after = model(ids[None])[0], model(changed[None])[0]
    torch.testing.assert_close(before[:6], after[:6])
    assert (before[6:] - after[6:]).abs().amax(dim=1).min() > 1e-6
    assert sum(isinstance(m, torch.nn.LayerNorm) for m in model.modules()) == count


def test_every_attention_of_the_table_is_in_the_model():
    for name in ATTENTIONS:
        layers = small(name).attention_layers()
        assert len(layers) == 3
        assert all(layer.causal and layer.dim == 8 and layer.heads == 2 for layer in layers)


def test_an_invertible_trunk_is_inverted_and_keeps_its_bound():
    model = small("contractive", invertible=True)
    X = 3 * torch.randn(9, 8, dtype=torch.float64)
    with torch.no_grad():
        Y = model.trunk(X)
    assert (model.trunk_inverse(Y) - X).norm() <= 1e-12 * X.norm()
    J = torch.autograd.functional.jacobian(model.trunk, X).reshape(72, 72)
    sigma = torch.linalg.svdvals(J)
    assert model.trunk_bound() == pytest.approx(1.9**6)
    assert sigma[0] <= model.trunk_bound() and sigma[-1] >= 0.1**6
    assert small("l2").trunk_bound() == math.inf


@pytest.mark.parametrize(("norm", "count"), [("pre", 1), ("none", 0)])
def test_an_invertible_model_has_no_norm_in_its_blocks(norm, count):
    model = small("contractive", invertible=True, norm=norm)
    assert sum(isinstance(m, torch.nn.LayerNorm) for m in model.modules()) == count
    assert isinstance(model.norm, torch.nn.LayerNorm) == bool(count)


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_blocks_are_what_they_are_called(norm):
    block, X = small("dot", norm=norm).blocks[0], torch.randn(5, 8, dtype=torch.float64)

    def normal(x: torch.Tensor) -> torch.Tensor:
        variance = x.var(-1, correction=0, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt()

    inner, outer = {
        "pre": (normal, lambda x: x),
        "post": (lambda x: x, normal),
        "none": (lambda x: x,) * 2,
    }[norm]
    half = outer(X + block.attention(inner(X)))
    torch.testing.assert_close(block(X), outer(half + block.mlp(inner(half))))


def test_only_invertible_trunks_are_inverted():
    with pytest.raises(UserError, match="not invertible"):
        small("l2").trunk_inverse(torch.zeros(3, 8, dtype=torch.float64))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_layer_constants_are_those_of_dense_autograd(attention):
    model = small(attention)
    ids = torch.tensor([1, 5, 2, 7, 9, 3])
    X = model.embed(ids)
    expected = []
    for block in model.blocks:
        tokens = block.attention_norm(X).detach()
        J = torch.autograd.functional.jacobian(block.attention, tokens).reshape(48, 48)
        expected.append(torch.linalg.matrix_norm(J, 2).item())
        X = block(X)
    assert layer_constants(model, ids) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"attention": "linear"}, "no attention 'linear'; choose one of dot, l2"),
        ({"depth": 0}, "depth must be a whole number"),
        ({"width": 9}, "multiple of the number of heads"),
        ({"constant": 0.0}, "constant must be a positive number"),
        ({"constant": math.nan}, "constant must be a positive number"),
        ({"invertible": True}, "choose attention contractive"),
        ({"invertible": True, "attention": "contractive", "constant": 1.0}, "below 1"),
        (
            {"invertible": True, "attention": "contractive", "norm": "post"},
            "choose norm pre .* or none",
        ),
        ({"norm": "batch"}, "no norm 'batch'; choose one of pre, post, none"),
    ],
)
def test_architectures_that_cannot_be_are_refused(options, complaint):
    with pytest.raises(UserError, match=complaint):
        Architecture(**{"vocabulary": 11, "width": 8, "heads": 2, **options})


def test_a_text_longer_than_the_context_is_refused():
    with pytest.raises(UserError, match="more than the 12 positions"):
        small("l2")(torch.zeros(1, 13, dtype=torch.long))


SMALL = Architecture(vocabulary=11, attention="dot", depth=2, width=8, heads=2, context=6)


def test_the_recurrence_is_that_of_torch():
    torch.manual_seed(0)
    cell = torch.nn.LSTMCell(5, 5)
    whole = torch.nn.LSTM(5, 5, batch_first=True)
    whole.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    X = torch.randn(3, 7, 5)
    torch.testing.assert_close(unrolled(cell, X), whole(X)[0])


def test_an_lstm_reads_only_the_past():
    torch.manual_seed(0)
    model, ids = CharacterLSTM(SMALL), torch.randint(11, (1, 6))
    changed = ids.clone()
    changed[0, 4] = (ids[0, 4] + 1) % 11
    same = torch.isclose(model(ids), model(changed)).all(dim=-1)[0]
    assert same.tolist() == [True] * 4 + [False] * 2
    assert len(model.cells) == 2


def test_untied_l2_attention_written_out():
    torch.manual_seed(0)
    layer = UntiedL2Attention(8, 2, causal=True).double()
    X = torch.randn(5, 8, dtype=torch.float64)
    heads = []
    for Q, K, V in zip(
        *(p.weight.chunk(2) for p in (layer.query, layer.key, layer.value)), strict=True
    ):
        S = -torch.cdist(X @ Q.T, X @ K.T).square() / math.sqrt(4)
        P = S.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(dim=1)
        heads.append(P @ X @ V.T)
    torch.testing.assert_close(layer(X), torch.cat(heads, dim=1) @ layer.out.weight.T)
    assert layer.lipschitz_bound(5) == math.inf


def test_what_is_called_lipschitz_has_a_constant():
    for name, variant in VARIANTS.items():
        model = variant.model(Architecture(11, variant.attention, 1, 8, 2, 6))
        assert model(torch.zeros(2, 6, dtype=torch.long)).shape == (2, 6, 11)
        layers = [m for m in model.modules() if hasattr(m, "lipschitz_bound")]
        bounded = [math.isfinite(layer.lipschitz_bound(6)) for layer in layers]
        assert bounded == [variant.lipschitz] * len(layers)
        assert ("not Lipschitz" in described(name)) == (name == "L2 untied")
