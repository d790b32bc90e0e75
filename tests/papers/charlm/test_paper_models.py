"""The models of the second paper compute what their names say."""

import math

import torch

from lipscope.papers.charlm.language_model import (
    VARIANTS,
    Architecture,
    CharacterLSTM,
    UntiedL2Attention,
    described,
    unrolled,
)

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
