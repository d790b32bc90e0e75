"""Normalised weights: all have their norm and train, in any module, and exceptions are named."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.nn.parametrize import LeftAsTheyAre, sigma_reparametrise, spectrally_normalise
from tests.train.watched import unchecked

both = pytest.mark.parametrize("normalise", [spectrally_normalise, sigma_reparametrise])


def norm(W: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(W.detach().double(), 2).item()


@pytest.mark.parametrize("normalise", [lambda m: spectrally_normalise(m, 2.0), sigma_reparametrise])
def test_normalised_weights_have_their_norm_and_train(normalise):
    torch.manual_seed(0)
    m, X = normalise(ls.nn.DotSelfAttention(8, 2)), torch.randn(2, 5, 8)
    norms = [
        torch.linalg.matrix_norm(part.weight.double(), 2).item()
        for part in (m.query, m.key, m.value, m.out)
    ]
    expected = 1.0 if normalise is sigma_reparametrise else 2.0
    assert norms == pytest.approx([expected] * 4, rel=1e-6)
    optimiser = torch.optim.Adam(m.parameters(), 0.1)
    for _ in range(3):
        optimiser.zero_grad()
        m(X).square().sum().backward()
        optimiser.step()
    gammas = [p.abs().item() for name, p in m.named_parameters() if name.endswith("gamma")] or [
        2.0
    ] * 4
    norms = [
        torch.linalg.matrix_norm(part.weight.double(), 2).item()
        for part in (m.query, m.key, m.value, m.out)
    ]
    assert sorted(norms) == pytest.approx(sorted(gammas), rel=1e-6)
    again = normalise(ls.nn.DotSelfAttention(8, 2))
    again.load_state_dict(m.state_dict())
    assert torch.equal(again(X), m(X))
    torch.testing.assert_close(
        copy.deepcopy(m).bfloat16()(X.bfloat16()).float(), m(X), rtol=0.1, atol=0.05
    )


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_norm_is_never_above_what_was_asked_for(normalise, dtype):
    torch.manual_seed(0)
    for size in range(1, 30):
        linear = nn.Linear(size, size, bias=False).to(dtype)
        nn.init.constant_(linear.weight, 1.0) if size % 2 else nn.init.normal_(linear.weight)
        normalise(linear)
        assert 1 - 2 * torch.finfo(dtype).eps - 1e-6 <= norm(linear.weight) <= 1


@both
def test_queries_keys_and_values_of_torchs_attention_each_have_the_norm(normalise):
    torch.manual_seed(0)
    f, X = normalise(nn.MultiheadAttention(8, 2, batch_first=True)), torch.randn(2, 5, 8)
    assert [norm(W) for W in (*f.in_proj_weight.chunk(3), f.out_proj.weight)] == pytest.approx(
        [1.0] * 4, rel=1e-6
    )
    f(X, X, X)[0].square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in f.parameters() if p.ndim == 2)
    training = f(X, X, X, need_weights=False)[0]
    with torch.no_grad():  # where torch has a faster way
        torch.testing.assert_close(
            f.eval()(X, X, X, need_weights=False)[0], training, rtol=1e-5, atol=1e-6
        )
    apart = normalise(nn.MultiheadAttention(8, 2, kdim=4, vdim=6))
    weights = apart.q_proj_weight, apart.k_proj_weight, apart.v_proj_weight, apart.out_proj.weight
    assert [norm(W) for W in weights] == pytest.approx([1.0] * 4, rel=1e-6)
    again = normalise(nn.MultiheadAttention(8, 2, batch_first=True)).eval()
    again.load_state_dict(f.state_dict())
    assert torch.equal(again(X, X, X)[0], f(X, X, X)[0])


def test_three_gammas_scale_three_matrices():
    f = sigma_reparametrise(nn.MultiheadAttention(8, 2))
    with torch.no_grad():
        f.parametrizations.in_proj_weight[0].gamma.copy_(torch.tensor([0.5, -2.0, 3.0]))
    assert [norm(W) for W in f.in_proj_weight.chunk(3)] == pytest.approx([0.5, 2.0, 3.0], rel=1e-6)


class Conv1D(nn.Module):
    """As in transformers: x W + b with W [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


@both
def test_the_real_one_is_known_too(normalise):
    from transformers.pytorch_utils import Conv1D as Theirs

    f = normalise(nn.Sequential(Theirs(12, 4)))
    assert norm(f[0].weight) == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(ls.UserError, match=r"0\.weight is already parametrized"):
        normalise(f)


class Tied(nn.Module):
    """A small language model: embedding, a Conv1D, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(11, 8), Conv1D(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(ids)))


@both
def test_a_head_tied_to_an_embedding_stays_and_is_named(normalise):
    torch.manual_seed(0)
    f = Tied()
    table = f.embedding.weight.clone()
    with pytest.warns(
        LeftAsTheyAre, match=r"left as they are: head.weight \(tied to embedding.weight\)$"
    ):
        normalise(f)
    assert norm(f.layer.weight) == pytest.approx(1.0, rel=1e-6)
    assert f.head.weight is f.embedding.weight and torch.equal(f.head.weight, table)
    f(torch.arange(5)).sum().backward()


@both
def test_linear_layers_that_share_a_weight_go_on_sharing_it(normalise):
    f = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    f[2].weight = f[0].weight
    normalise(f)
    with torch.no_grad():
        for p in f.parameters():
            p.mul_(0.5)
    assert torch.equal(f[0].weight, f[2].weight)
    assert norm(f[0].weight) == pytest.approx(
        0.5 if normalise is sigma_reparametrise else 1.0, rel=1e-6
    )


@both
def test_matrices_of_other_layers_are_named(normalise):
    f = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3), nn.LayerNorm(3), nn.Embedding(3, 3))
    with pytest.warns(LeftAsTheyAre, match=r"left as they are: 1.weight_ih_l0, 1.weight_hh_l0$"):
        normalise(f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        normalise(nn.TransformerEncoderLayer(8, 2, 16))


@both
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (nn.ReLU, "ReLU has no linear weight that can be normalised: there is none"),
        (lambda: nn.Sequential(nn.Embedding(3, 3)), "there is none"),
        (lambda: _only_tied(), r"all of them are tied: head.weight \(tied to embedding.weight\)"),
        (lambda: spectrally_normalise(nn.Linear(2, 2)), "Linear.weight is already parametrized"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "0.weight is uninitialized"),
        (lambda: nn.utils.spectral_norm(nn.Linear(2, 2)), "Linear.weight is computed by a hook"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2).to(torch.float8_e5m2)),
            "stored in torch.float8_e5m2",
        ),
        (lambda: 3, "module must be a torch.nn.Module, got int"),
    ],
)
def test_errors_say_what_to_do(normalise, make, words):
    module = make()
    with unchecked(), pytest.raises(ls.UserError, match=words):
        normalise(module)


@pytest.mark.parametrize("constant", [0, -1.0, math.inf, math.nan, True])
def test_a_norm_that_is_none_is_refused(constant):
    linear = nn.Linear(2, 2)
    with pytest.raises(ls.UserError, match="constant must be a positive number"):
        spectrally_normalise(linear, constant)
    assert not nn.utils.parametrize.is_parametrized(linear)


def _only_tied() -> nn.Module:
    f = Tied()
    f.layer = nn.Identity()
    return f
