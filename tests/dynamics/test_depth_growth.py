"""Growth along depth: against the dense Jacobian of the network, and in the order of its bounds."""

import math
from dataclasses import replace

import pytest
import torch

import lipscope as ls
from lipscope.dynamics.depth_growth import composed
from tests.checks import assert_adjoint, dense_operator
from tests.dynamics.problems import draw, identity, random_head, two_heads, types_unchecked
from tests.naive import naive_layer


def network(f: ls.SelfAttention, time: float, layers: int):
    """The residual network from the definition of its layer."""

    def forward(X: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            X = X + (time / layers) * naive_layer(f, X)
        return X

    return forward


def norm(f, X: torch.Tensor) -> float:
    J = torch.autograd.functional.jacobian(f, X, vectorize=True)
    return torch.linalg.matrix_norm(J.reshape(X.numel(), X.numel()), 2).item()


@pytest.mark.parametrize("f", [random_head(), random_head(causal=True), two_heads(kernel=ls.L2())])
def test_against_the_dense_jacobian_of_the_network(f):
    X = draw(5, 3)
    found = ls.dynamics.growth_along_depth(f, X, 0.8, layers=6, points=6, tol=1e-10)
    for depth in range(1, 7):
        assert found.sigma[depth].item() == pytest.approx(
            norm(network(f, 0.8 * depth / 6, depth), X), rel=1e-8
        )
    states = found.flow.positions
    one = [norm(network(f, 0.8 / 6, 1), x) for x in states[:-1]]
    assert found.product.tolist() == pytest.approx([math.prod(one[:k]) for k in range(7)], rel=1e-8)
    flat = [norm(lambda x: naive_layer(f, x), x) for x in states]
    assert found.local.tolist() == pytest.approx(flat, rel=1e-8)
    assert found.gronwall[-1].item() == pytest.approx(math.exp(0.8 / 6 * sum(flat[:-1])), rel=1e-8)


def test_the_product_of_layers_and_its_adjoint():
    """Layers that do not commute, as one operator."""
    matrices = [draw(4, 4, seed=seed) for seed in range(3)]
    norms = [torch.linalg.matrix_norm(M, 2).item() for M in matrices]
    whole = composed([dense_operator(M) for M in matrices], norms)
    assert torch.allclose(whole.to_dense(), matrices[2] @ matrices[1] @ matrices[0])
    assert_adjoint(whole)


@pytest.mark.wide
def test_the_flow_grows_as_finite_differences_say():
    """The dense derivative of the adaptive flow, by differences: what sigma tends to like 1/L."""
    f, X, h = random_head(2), draw(2, 2), 1e-5

    def end(Z: torch.Tensor) -> torch.Tensor:
        return ls.dynamics.flow(f, Z, 0.5, frames=2, tol=1e-11).positions[-1].flatten()

    sides = [
        (end(X + E), end(X - E)) for E in h * torch.eye(4, dtype=torch.float64).reshape(4, 2, 2)
    ]
    J = torch.stack([(a - b) / (2 * h) for a, b in sides], dim=1)
    exact = torch.linalg.matrix_norm(J, 2).item()
    coarse, fine = (
        ls.dynamics.growth_along_depth(f, X, 0.5, layers=L, points=1).sigma[-1].item()
        for L in (12, 24)
    )
    assert fine - exact == pytest.approx((coarse - exact) / 2, rel=0.15)
    assert 2 * fine - coarse == pytest.approx(exact, rel=2e-3)


def test_a_measure_grows_in_its_own_norm():
    """Copies that move together: the weighted measure is a part of what the copies can do."""
    f, X = random_head(), draw(3, 3)
    mu = ls.mean_field.DiscreteMeasure(X, torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64))
    weighted = ls.dynamics.growth_along_depth(f, mu, 0.5, layers=4).sigma[-1]
    copies = ls.dynamics.growth_along_depth(f, X[[0, 1, 2, 2]], 0.5, layers=4).sigma[-1]
    assert 1 < weighted <= copies * (1 + 1e-9)


def test_a_network_deeper_than_the_call_stack():
    layer = dense_operator(torch.tensor([[1.0, 1e-3], [0.0, 1.0]], dtype=torch.float64))
    whole = composed([layer] * 3000, [1.0005] * 3000).to_dense()
    assert torch.allclose(whole, torch.tensor([[1.0, 3.0], [0.0, 1.0]], dtype=torch.float64))


def test_the_depth_of_an_overflow():
    """Tokens +-1e100: scores +-1e200 make attention hard, J = V; x^2 overflows one layer later."""
    f, X = (
        replace(identity(1), V=1e60 * torch.eye(1, dtype=torch.float64)),
        1e100 * torch.tensor([[1.0], [-1.0]]).double(),
    )
    found = ls.dynamics.growth_along_depth(f, X, 3.0, layers=3)
    assert found.times.tolist() == [0] and found.overflow == 1 and found.sigma.tolist() == [1]


def test_a_start_without_a_derivative_is_told():
    found = ls.dynamics.growth_along_depth(identity(), 1e200 * draw(3, 2), 1.0)
    assert found.times.tolist() == [0] and found.sigma.tolist() == [1] and found.local.isnan().all()
    assert "overflow" in found.summary


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"time": -1.0}, "time"),
        ({"layers": 0}, "layers"),
        ({"layers": 2.5}, "layers"),
        ({"points": 0}, "points"),
        ({"points": -1}, "points"),
        ({"tol": "fine"}, "tolerance"),
    ],
)
def test_refusals(options, told):
    with types_unchecked(), pytest.raises(ls.UserError, match=told):
        ls.dynamics.growth_along_depth(
            identity(), draw(3, 2), **({"time": 1.0, "layers": 3} | options)
        )
