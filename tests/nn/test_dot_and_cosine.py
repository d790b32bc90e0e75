"""Dot-product and cosine attention as modules: against plain softmax and against their bounds."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import lipscope as ls
from lipscope.nn import ATTENTIONS
from tests.nn.climb import climbed
from tests.nn.test_l2_attention import NORMS


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


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_cosine_attention_keeps_its_bound_on_long_climbs(causal):
    """pytest -m slow tests/nn/test_dot_and_cosine.py"""
    for n, eps, tau in itertools.product((2, 9, 30), (1e-6, 1e-2), (0.1, 2.0, 10.0)):
        layer = ls.nn.CosineSelfAttention(4, 2, causal, tau=tau, eps=eps).double()
        for norm in NORMS:
            for size in (0.3, 3.0):
                X = size * math.sqrt(eps) * torch.randn(n, 4).double()
                assert climbed(layer, X, norm, 30) <= layer.lipschitz_bound(n, norm)


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
