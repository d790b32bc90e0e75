"""Norm layers, residual branches, networks: bounds against dense Jacobians, and attained."""

import math

import pytest
import torch

import lipscope as ls
from lipscope._types import Ball, Everywhere, UserError
from lipscope.theorems.composition import (
    Affine,
    Attention,
    Chain,
    LayerNorm,
    Pointwise,
    Residual,
    RMSNorm,
    network_bound,
)
from tests.cases import problem


def sigma(part, X):
    J = torch.func.jacrev(part)(X).reshape(-1, X.numel())
    return torch.linalg.matrix_norm(J, 2).item()


def randn(g, *shape):
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def network(seed: int, kind: str = "multi-head, projected"):
    """Two pre-norm blocks around attention with as many outputs as inputs."""
    g = torch.Generator().manual_seed(seed)
    while True:
        f, X = problem(kind, seed)
        d = X.shape[1]
        if f.O is None or f.O.shape[0] == d:
            break
        seed += 1
    eps = 0.3
    norm = LayerNorm(randn(g, d), randn(g, d), eps) if seed % 2 else RMSNorm(randn(g, d), eps)
    attention = Residual(Chain((norm, Attention(f))))
    mlp = Chain(
        (
            Affine(randn(g, 7, d), None),
            Pointwise(torch.tanh, 1.0),
            Affine(randn(g, d, 7), randn(g, d)),
        )
    )
    return Chain((attention, Residual(Chain((norm, mlp))), attention)), X


@pytest.mark.parametrize("seed", range(4))
def test_a_network_is_never_steeper_than_its_bound(seed: int):
    net, X = network(seed)
    n, R = len(X), X.norm(dim=1).max().item() * (1 + 1e-12)
    upper, anywhere = network_bound(net, Ball(R, n)), network_bound(net, Everywhere(n))
    assert upper <= anywhere * (1 + 1e-9) and math.isfinite(anywhere)
    g = torch.Generator().manual_seed(seed)
    for Y in (
        X,
        0.01 * X,
        torch.zeros_like(X),
        *(R * torch.nn.functional.normalize(randn(g, *X.shape)) for _ in range(4)),
    ):
        assert sigma(net, Y) <= upper
        assert net(Y).norm(dim=1).max().item() <= net.radius(R)


def test_norm_layers_attain_their_constants():
    g = torch.Generator().manual_seed(0)
    d, eps = 8, 1e-4
    weight, bias = randn(g, d), randn(g, d)
    rms, layer = RMSNorm(weight, eps), LayerNorm(weight, bias, eps)
    zero = torch.zeros(1, d, dtype=torch.float64)
    assert sigma(rms, zero) == pytest.approx(rms.lipschitz(1.0, 1), rel=1e-9)
    assert sigma(layer, zero + 3) == pytest.approx(layer.lipschitz(1.0, 1), rel=1e-9)
    largest = 1e6 * torch.eye(d, dtype=torch.float64)[weight.abs().argmax()][None]
    assert rms(largest).norm().item() == pytest.approx(rms.radius(1e6), rel=1e-9)
    for scale in (1e-3, 1.0, 1e3):
        x = scale * randn(g, 1, d)
        assert sigma(rms, x) <= rms.lipschitz(math.inf, 1) and sigma(layer, x) <= layer.lipschitz(
            math.inf, 1
        )
        assert rms(x).norm().item() <= rms.radius(x.norm().item())
        assert layer(x).norm().item() <= layer.radius(x.norm().item())


def test_without_eps_nothing_is_promised():
    assert network_bound(RMSNorm(torch.ones(3), 0.0), Everywhere(4)) == math.inf


def test_attention_alone_has_no_bound_everywhere_but_behind_a_norm_it_has():
    f, X = problem("gaussian", 0)
    d = X.shape[1]
    assert network_bound(Attention(f), Everywhere(len(X))) == math.inf
    behind = Chain((RMSNorm(torch.ones(d), 1e-2), Attention(f)))
    assert math.isfinite(network_bound(behind, Everywhere(len(X))))


def test_an_activation_that_moves_zero_is_refused():
    with pytest.raises(UserError, match=r"function\(0\) = 0"):
        Pointwise(torch.sigmoid, 0.25)


def test_parts_compose_as_stated():
    W, b = 3 * torch.eye(2, dtype=torch.float64), torch.tensor([0.0, 4.0], dtype=torch.float64)
    step = Affine(W, b)
    assert network_bound(Residual(step), Ball(1.0, 2)) == pytest.approx(4.0, rel=1e-12)
    assert network_bound(
        Chain((step, Pointwise(torch.relu, 1.0), step)), Ball(1.0, 2)
    ) == pytest.approx(9.0, rel=1e-12)
    assert Residual(step).radius(1.0) == pytest.approx(8.0, rel=1e-12)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("bias", [0.0, 3.0])
def test_the_radius_of_attention_is_that_of_a_token_on_which_all_heads_agree(heads: int, bias):
    """A single token attends to itself: its output is V x + b, head by head, then O."""
    k, R, eye = 3, 2.0, torch.eye(3, dtype=torch.float64)
    V = torch.cat([(h + 1) * eye for h in range(heads)])
    x = R * eye[:1]
    b = bias * torch.cat([eye[0]] * heads)
    O = torch.linalg.qr(randn(torch.Generator().manual_seed(heads), heads * k, heads * k))[0]
    for out in (None, 5 * O):
        f = ls.SelfAttention(V, V, V, out, heads=heads, biases=(0 * b, 0 * b, b) if bias else None)
        worst = (x @ V.T + b).norm().item() * (1 if out is None else 5)
        assert Attention(f)(x).norm().item() == pytest.approx(worst, rel=1e-12)
        radius = Attention(f).radius(R)
        assert worst <= radius <= worst * (1 + 1e-9)
