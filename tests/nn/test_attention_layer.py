"""Padded tokens: the layer is that of the real tokens alone, in values and derivatives."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import lipscope as ls
from lipscope.nn import ATTENTIONS
from lipscope.train.monitor import SmoothnessMonitor, SmoothnessWarning
from tests.nn.climb import climbed
from tests.nn.test_l2_attention import NORMS
from tests.nn.test_modules import LAYERS
from tests.train.watched import dense_norm, unchecked

ATTENTION = [name for name in LAYERS if name != "residual"]
DIM, TOKENS = 8, 9


def layer(name, causal=False, dim=DIM):
    torch.manual_seed(0)
    return LAYERS[name](dim, 2, causal)


def padded(garbage=math.nan, dtype=torch.float64):
    """Tokens with padding right, left, inside, nowhere and everywhere, and which are real."""
    X = 3 + torch.randn(5, TOKENS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    real = torch.ones(5, TOKENS, dtype=torch.bool)
    real[0, 4:] = real[1, :3] = real[2, ::2] = real[4] = False
    return X.masked_fill(~real[..., None], garbage), real


def loss_and_gradients(m, outputs, X):
    loss = sum(Y.square().sum() + Y.sum() for Y in outputs)
    return torch.autograd.grad(loss, [X, *m.parameters()])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_a_padded_batch_is_its_sequences_one_at_a_time(name, causal):
    m, (X, real) = layer(name, causal).double(), padded()
    X.requires_grad_(True)
    Y = m(X, real)
    alone = [m(x[r]) for x, r in zip(X[:4], real, strict=False)]
    for y, r, own in zip(Y, real, alone, strict=False):
        torch.testing.assert_close(y[r], own, rtol=1e-12, atol=1e-13)
    assert (Y[~real] == 0).all()
    ours, theirs = loss_and_gradients(m, [Y], X), loss_and_gradients(m, alone, X)
    for ours_too, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_too, truth, rtol=1e-11, atol=1e-11)
    assert (ours[0][~real] == 0).all()


@pytest.mark.parametrize("name", ATTENTION)
def test_nothing_in_the_padding_changes_a_bit(name):
    m = layer(name)
    found = []
    for garbage in (0.0, 1e30, -math.inf, math.nan):
        X, real = padded(garbage, torch.float32)
        Y = m(X, real)
        found.append([Y, *torch.autograd.grad(Y.square().sum(), list(m.parameters()))])
    assert all(
        torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True)
    )
    X, _ = padded(0.0, torch.float32)
    whole = torch.ones(5, TOKENS, dtype=torch.bool)
    torch.testing.assert_close(m(X, whole), m(X), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("far", [None, 0, 1])
def test_padding_does_not_cost_distant_tokens_their_distances(far):
    """Few tokens in much padding, all far from the origin, one far from the others."""
    torch.manual_seed(0)
    m = ls.nn.L2SelfAttention(DIM, 2)
    X, real = torch.zeros(90, DIM), torch.zeros(90, dtype=torch.bool)
    real[:12] = True
    X[real] = 3e3 + torch.randn(12, DIM)
    if far is not None:
        X[far] = 1e7
    near = [i for i in range(12) if i != far]
    exact = copy.deepcopy(m).double().weights(X[:12].double())[:, near]
    alone = (m.weights(X[:12])[:, near] - exact).abs().max()
    assert (m.weights(X, real)[:, near, :12] - exact).abs().max() < 2 * alone < 0.1
    apart = m(X[:12])[near]
    assert (m(X, real)[near] - apart).norm() < 1e-5 * apart.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_the_contractive_layer_keeps_its_word_and_does_not_scale_by_the_padding(norm, causal):
    torch.manual_seed(0)
    m = ls.nn.ContractiveL2Attention(2, 1, 0.9, norm, causal).double()
    with torch.no_grad():
        for W in (m.query.weight, m.value.weight, m.out.weight):
            W.copy_(torch.eye(2))
    far = torch.tensor([1.2, 1.7, 2.5]).double()
    X = torch.zeros(3, 12, 2).double()
    # A token at 0 among tokens at +-t, which is nearly the worst; then more and more padding.
    X[:, 1:, 0] = far[:, None] * (-1.0) ** torch.arange(11)
    X = X.flip(1) if causal else X
    largest = []
    for count in (2, 7, 12):
        real = torch.zeros(12, dtype=torch.bool)
        real[slice(-count, None) if causal else slice(0, count)] = True
        J = [
            torch.autograd.functional.jacobian(lambda x, r=real: m(x, r), x).reshape(24, 24)
            for x in X
        ]
        own = [torch.autograd.functional.jacobian(m, x[real]).reshape(2 * count, -1) for x in X]
        sizes = [torch.linalg.matrix_norm(j, float(norm)) for j in J]
        torch.testing.assert_close(
            sizes, [torch.linalg.matrix_norm(j, float(norm)) for j in own], rtol=1e-9, atol=0
        )
        largest.append(max(sizes).item())
    assert max(largest) <= 0.9 and largest[0] > 0.25


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["l2", "cosine", "dot"])
def test_bounds_grow_with_the_tokens_so_that_padding_keeps_them(name, causal):
    m = layer(name, causal)
    for norm in ("2", "inf"):
        bounds = [m.lipschitz_bound(n, norm) for n in (*range(1, 12), 50, 300)]
        assert bounds == sorted(bounds)


@pytest.mark.parametrize("name", ATTENTION)
def test_vmap_over_samples_and_over_weights(name):
    m, (X, real) = layer(name, causal=True), padded(dtype=torch.float32)
    torch.testing.assert_close(torch.func.vmap(m)(X, real), m(X, real), rtol=1e-5, atol=1e-6)
    members = [LAYERS[name](DIM, 2, True) for _ in range(2)]
    state, _ = torch.func.stack_module_state(members)
    skeleton = copy.deepcopy(m).to("meta")
    together = torch.func.vmap(lambda s: torch.func.functional_call(skeleton, s, (X, real)))(state)
    for member, Y in zip(members, together, strict=True):
        torch.testing.assert_close(Y, member(X, real), rtol=1e-5, atol=1e-6)


def test_weights_of_padded_tokens_are_zero():
    for name in ATTENTION:
        m, (X, real) = layer(name, causal=True).double(), padded()
        X.requires_grad_(True)
        P = m.weights(X, real)
        for p, x, r in zip(P, X[:4], real, strict=False):
            torch.testing.assert_close(p[:, r][:, :, r], m.weights(x[r]), rtol=1e-12, atol=1e-14)
        both = real[:, None, :, None] & real[:, None, None, :]
        assert (P.masked_select(~both.expand_as(P)) == 0).all()
        (gradient,) = torch.autograd.grad(ls.nn.jasmin(P[:4]) + ls.nn.jasmin(P[:4], 2), X)
        assert gradient.isfinite().all() and (gradient[~real] == 0).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            torch.ones(5, TOKENS),
            r"padding must be a boolean tensor \[5, 9\], True for real tokens, got torch.float32",
        ),
        (torch.ones(5, TOKENS + 1).bool(), r"got torch.bool \(5, 10\)"),
        (torch.ones(TOKENS).bool(), r"got torch.bool \(9,\)"),
        (
            [True] * TOKENS,
            r"got list; for a tokenizer's attention_mask pass mask.bool\(\), for torch's key",
        ),
    ],
)
def test_padding_that_is_none_is_refused(wrong, message):
    X, _ = padded(0.0, torch.float32)
    for call in (layer("dot"), layer("dot").weights):
        with unchecked(), pytest.raises(ls.UserError, match=message):
            call(X, wrong)


class Padded(nn.Module):
    def __init__(self, name) -> None:
        super().__init__()
        self.attention = layer(name)

    def forward(self, X, real):
        return self.attention(X, padding=real) + self.attention(X, real)


@pytest.mark.parametrize("name", ["contractive", "cosine"])
def test_the_monitor_measures_the_real_tokens(name):
    """As many samples as tokens, which for other modules is ambiguous."""
    model, (X, real) = Padded(name), padded(dtype=torch.float32)
    X, real = X[:, :5], real[:, :5]
    monitor = SmoothnessMonitor(model, every=1, tol=1e-5)
    model(X, real)
    (reading,) = monitor.step()
    truth = dense_norm(copy.deepcopy(model.attention).double(), X[0, real[0]])
    assert reading.sigma == pytest.approx(truth, rel=2e-6) and reading.tokens == 4
    model(X.flip(0), real.flip(0))
    with pytest.warns(SmoothnessWarning, match="the first sample of the batch is padding only"):
        (nothing,) = monitor.step()
    assert math.isnan(nothing.sigma)
    monitor.close()


def by_the_formula(layer, X: Tensor) -> Tensor:
    """Head by head with a plain softmax."""
    k, heads = layer.head_size, []
    for h in range(layer.heads):
        rows = slice(h * k, (h + 1) * k)
        q, key, v = (X @ part.weight[rows].T for part in (layer.query, layer.key, layer.value))
        if isinstance(layer, ls.nn.CosineSelfAttention):
            q, key, v = (
                y / (y.square().sum(-1, keepdim=True) + layer.eps).sqrt() for y in (q, key, v)
            )
            scores = layer.log_tau[h].exp() * q @ key.T
        else:
            if layer.qk_norm:
                eps = 1e-6
                q = layer.query_norm.weight * q / (q.square().mean(-1, keepdim=True) + eps).sqrt()
                key = (
                    layer.key_norm.weight * key / (key.square().mean(-1, keepdim=True) + eps).sqrt()
                )
            scores = q @ key.T / math.sqrt(k) / layer.temperature
        if layer.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v)
    return torch.cat(heads, 1) @ layer.out.weight.T


MAKERS = {
    "dot": lambda causal: ls.nn.DotSelfAttention(6, 2, causal),
    "cool": lambda causal: ls.nn.DotSelfAttention(6, 2, causal, temperature=4.0),
    "qk_norm": lambda causal: ls.nn.DotSelfAttention(6, 2, causal, qk_norm=True, temperature=0.5),
    "cosine": lambda causal: ls.nn.CosineSelfAttention(6, 2, causal, tau=3.0, eps=0.1),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_the_layer_is_the_formula(name, causal):
    torch.manual_seed(0)
    layer, X = MAKERS[name](causal).double(), 2 * torch.randn(7, 6).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(1 + 0.3 * torch.randn(weight.shape))
    torch.testing.assert_close(layer(X), by_the_formula(layer, X), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["l2", *MAKERS])
def test_weights_are_those_that_forward_uses(name):
    torch.manual_seed(0)
    layer = (ATTENTIONS["l2"](6, 2, True) if name == "l2" else MAKERS[name](True)).double()
    X = torch.randn(2, 7, 6).double()
    P, v = layer.weights(X), layer.project(X)[2]
    torch.testing.assert_close(layer.out((P @ v).transpose(-3, -2).flatten(-2)), layer(X))
    torch.testing.assert_close(P.sum(-1), torch.ones(2, 2, 7).double())


def test_as_map_is_the_layer_where_there_is_one():
    torch.manual_seed(0)
    X = torch.randn(2, 5, 6).double()
    for name in ("dot", "cool"):
        layer = MAKERS[name](True).double()
        torch.testing.assert_close(layer.as_map(5)(X), layer(X))
    for name in ("qk_norm", "cosine"):
        with pytest.raises(ls.UserError, match="measure the module itself"):
            MAKERS[name](True).as_map(5)


@pytest.mark.parametrize("name", ["dot", "cool", "qk_norm"])
def test_dot_product_attention_has_no_constant(name):
    """A query near 0 among values that move away: sigma grows without limit; so does the bound."""
    torch.manual_seed(0)
    layer = MAKERS[name](False).double()
    assert layer.lipschitz_bound(5) == layer.lipschitz_bound(5, math.inf) == math.inf
    u = torch.linalg.svd(layer.value.weight)[2][0]
    found = []
    for R in (10.0, 100.0, 1000.0):
        X = torch.stack([0 * u, R * u, -R * u, R * u, -R * u]).detach()
        X[0] += 1e-3 if name == "qk_norm" else 0
        found.append(ls.local_lipschitz(layer, X, 1e-4).value)
    rate = [b / a for a, b in itertools.pairwise(found)]
    assert all(r > (9 if name == "qk_norm" else 90) for r in rate), found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("eps", [1e-4, 1.0])
def test_cosine_attention_keeps_its_bound(eps, causal):
    torch.manual_seed(1)
    layer = ls.nn.CosineSelfAttention(4, 2, causal, tau=2.0, eps=eps).double()
    for norm in NORMS:
        for size in (0.0, 1.0):
            X = size * math.sqrt(eps) * torch.randn(5, 4).double() + 1e-9
            assert climbed(layer, X, norm, 4) <= layer.lipschitz_bound(5, norm)


def test_the_cosine_bound_is_within_reach():
    """At tokens near 0 values turn at the full rate 1 / sqrt(eps): the bound is nearly tight."""
    torch.manual_seed(0)
    layer = ls.nn.CosineSelfAttention(4, 1, tau=1e-3, eps=1e-4).double()
    measured = ls.local_lipschitz(layer, 1e-9 * torch.randn(3, 4).double()).value
    exact = torch.linalg.matrix_norm(layer.out.weight @ layer.value.weight, 2) / 1e-2
    assert measured == pytest.approx(exact.item(), rel=1e-6)
    assert measured < layer.lipschitz_bound(3) < 2 * measured


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: ls.nn.DotSelfAttention(8, 2, temperature=0),
            "temperature must be a positive number, got 0",
        ),
        (lambda: ls.nn.CosineSelfAttention(8, 2, eps=0), "eps must be a positive number"),
        (lambda: ls.nn.CosineSelfAttention(8, 3), "multiple of heads=3"),
        (
            lambda: ls.nn.DotSelfAttention(8, 2)(torch.randn(2, 3, 4, 8)),
            r"got torch.float32 \(2, 3, 4, 8\)",
        ),
    ],
)
def test_errors_say_what_to_do(call, words):
    with pytest.raises(ls.UserError, match=words):
        call()
