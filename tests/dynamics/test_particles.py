"""Particles: against scipy on a dense right-hand side, their symmetries, and where they stop."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import lipscope as ls
from lipscope.dynamics import particles
from lipscope.dynamics.integration import Ending
from tests.dynamics.problems import draw, identity, random_head, truth, two_heads, types_unchecked

TIMES = np.linspace(0, 1, 9)
MAPS = {
    "identity": identity(3),
    "one head": random_head(),
    "causal": random_head(causal=True),
    "two heads": two_heads(),
    "two heads, L2, causal": two_heads(kernel=ls.L2(), causal=True),
}


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_the_flow_against_scipy(name, renormalise):
    f, X = MAPS[name], draw(7, 3, seed=5)
    found = ls.dynamics.flow(f, X, 1.0, frames=9, tol=1e-10, renormalise=renormalise)
    exact = truth(f, X, TIMES)
    assert found.ok and np.abs(found.positions.numpy() - exact).max() < 1e-7 * np.abs(exact).max()
    assert np.abs(found.positions[-1].numpy() - exact[-1]).max() < 1e-8 * np.abs(exact).max()


def test_weighted_particles_against_scipy():
    f, X, w = (
        random_head(),
        draw(6, 3, seed=5),
        torch.rand(6, generator=torch.Generator().manual_seed(1)).double(),
    )
    w = w / w.sum()
    found = ls.dynamics.flow(f, ls.mean_field.DiscreteMeasure(X, w), 1.0, frames=9, tol=1e-10)
    exact = truth(f, X, TIMES, w.numpy())
    assert np.abs(found.positions.numpy() - exact).max() < 1e-7 * np.abs(exact).max()
    assert torch.equal(found.weights, w)


@pytest.mark.parametrize("renormalise", [False, True])
def test_under_a_mask_the_first_token_moves_alone(renormalise):
    f, X = random_head(causal=True), draw(6, 3)
    found = ls.dynamics.flow(f, X, 1.5, tol=1e-10, renormalise=renormalise)
    alone = torch.linalg.matrix_exp(found.times[:, None, None] * f.V) @ X[0]
    assert torch.allclose(found.positions[:, 0], alone, rtol=1e-8, atol=1e-8)
    assert torch.allclose(found.renormalised[:, 0], X[0].expand(65, 3), atol=1e-8)


def test_tokens_that_agree_follow_the_value_matrix():
    f = replace(two_heads(), biases=None)
    X = draw(1, 3).expand(5, 3)
    found = ls.dynamics.flow(f, X, 1.0, tol=1e-10).positions[-1]
    assert torch.allclose(
        found, X @ torch.linalg.matrix_exp(particles.value_matrix(f)).T, rtol=1e-8
    )


@pytest.mark.parametrize(
    "name",
    [*MAPS, "window", "window without order", "padding", "additive mask", "softcap", "sinks"],
)
def test_rows_at_a_time_are_the_layer_itself(name, monkeypatch):
    monkeypatch.setattr(particles, "SCORES", 40)
    n = 13
    more = {
        "window": {"causal": True, "window": 4},
        "window without order": {"window": 4},
        "padding": {"padding": torch.arange(n) < 10},
        "additive mask": {"mask": draw(n, n, seed=3)},
        "softcap": {"kernel": ls.Dot(softcap=0.5)},
        "sinks": {"kernel": ls.Dot(sinks=draw(1, seed=4)), "causal": True},
    }
    f = MAPS[name] if name in MAPS else random_head(**more[name])
    X = draw(n, 3)
    rows, points, _ = particles.velocity_of(f, X)
    assert torch.allclose(rows(points), f(X), rtol=1e-12, atol=1e-12)


def test_the_layered_network_converges_at_rate_one_over_L():
    f, X = two_heads(), draw(8, 3) / 2
    limit = ls.dynamics.flow(f, X, 1.0, tol=1e-11).positions[-1]
    layers = [32, 64, 128, 256]
    errors = [
        (ls.dynamics.layered(f, X, 1.0, L).positions[-1] - limit).norm().item() for L in layers
    ]
    slope = np.polyfit(np.log(layers), np.log(errors), 1)[0]
    assert slope == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize("renormalise", [False, True])
def test_overflow_stops_the_flow_with_its_time(renormalise):
    """A token grows like e^t, its score like e^{2t}, up to t = log(3.4e38) / 2 - log x."""
    X = torch.tensor([[3.0]])
    found = ls.dynamics.flow(
        identity(1).to(torch.float32), X, 1000.0, tol=1e-5, renormalise=renormalise
    )
    expected = math.log(torch.finfo(torch.float32).max) / 2 - math.log(3)
    assert found.ending is Ending.OVERFLOW and not found.ok and "overflow" in found.summary
    reached = found.times[-1].item()
    assert reached <= expected and found.positions.isfinite().all()
    if not renormalise:  # its steps stay short; those of a renormalised token at rest grow
        assert reached == pytest.approx(expected, rel=0.02)


@pytest.mark.wide
def test_unresolved_scores_are_told():
    found = ls.dynamics.flow(
        identity(1), torch.tensor([[1.0], [2.0]], dtype=torch.float64), 25.0, tol=1e-4
    )
    assert found.ok and "rounding decides" in found.summary
    # eps e^{2t} 4 = 1e-3
    assert found.unresolved == pytest.approx(math.log(1e-3 / 4 / 2.2e-16) / 2, abs=1.0)
    assert ls.dynamics.flow(identity(1), torch.ones(2, 1).double(), 1.0).unresolved is None


def test_unresolved_layers_are_told():
    found = ls.dynamics.layered(
        identity(1), torch.tensor([[1.0], [2.0]], dtype=torch.float64), 25.0, 400
    )
    assert found.ok and "rounding decides" in found.summary
    # eps (1 + h)^{2k} 4 = 1e-3, h = 1/16
    crossed = math.ceil(math.log(1e-3 / 4 / 2.22e-16) / 2 / math.log(17 / 16)) / 16
    assert found.unresolved == pytest.approx(crossed, abs=0.13)
    assert ls.dynamics.layered(identity(1), torch.ones(2, 1).double(), 1.0, 4).unresolved is None


def test_an_overflow_of_the_renormalised_is_told_with_its_time():
    f = replace(identity(), V=torch.diag(torch.tensor([-1.0, 0.0], dtype=torch.float64)))
    found = ls.dynamics.flow(f, X, 800.0, frames=81)
    assert found.ok
    with pytest.raises(
        ls.UserError, match="overflows float64 at t = 710"
    ):  # log of the largest is 709.8
        found.renormalised  # noqa: B018
    assert ls.dynamics.find_clusters(found, renormalised=False).width > 0


def test_one_token_that_sees_nothing_rests():
    """A mask [1, 1] is not a row of weights that all queries share."""
    f = replace(identity(), mask=torch.full((1, 1), -math.inf, dtype=torch.float64))
    found = ls.dynamics.flow(f, X[:1], 1.0)
    assert found.ok and torch.equal(found.positions[-1], X[:1])


@pytest.mark.parametrize("equal", [True, False])
def test_positions_in_any_order_are_positions_in_order(equal, monkeypatch):
    """No mask is built for them, and tokens come back in the order they came in."""
    f, points, s = (
        random_head(causal=True),
        draw(6, 3),
        torch.tensor([0.5, 0.1, 0.9, 0.3, 0.7, 0.2]).double(),
    )
    w = (
        torch.full((6,), 1 / 6, dtype=torch.float64)
        if equal
        else torch.arange(1, 7, dtype=torch.float64) / 21
    )
    masks, rows = [], particles._by_rows
    monkeypatch.setattr(
        particles,
        "_by_rows",
        lambda f, x, mask, *shared: masks.append(mask) or rows(f, x, mask, *shared),
    )
    found = ls.dynamics.flow(
        f, ls.mean_field.DiscreteMeasure(points, w, s), 0.5, frames=2, tol=1e-9
    )
    order = s.argsort()
    exact = truth(f, points[order], np.array([0, 0.5]), w[order].numpy())[-1]
    assert np.abs(found.positions[-1, order].numpy() - exact).max() < 1e-7
    assert all(mask is None if equal else mask.shape == (1, 6) for mask in masks)


def test_learned_weights_and_tokens_may_require_gradients():
    f, learned = random_head(2), replace(random_head(2), V=random_head(2).V.requires_grad_())
    found = ls.dynamics.flow(learned, X.clone().requires_grad_(), 1.0, renormalise=True)
    assert not found.positions.requires_grad
    assert torch.equal(found.positions, ls.dynamics.flow(f, X, 1.0, renormalise=True).positions)
    assert not ls.dynamics.layered(
        learned, X.clone().requires_grad_(), 1.0, 3
    ).positions.requires_grad


def test_layered_overflow_is_told():
    f = replace(identity(1), V=1e200 * torch.eye(1, dtype=torch.float64))
    found = ls.dynamics.layered(f, torch.ones(2, 1).double(), 4.0, 4)
    assert (
        found.ending is Ending.OVERFLOW
        and len(found.times) == 2
        and found.positions.isfinite().all()
    )


X = draw(4, 2)
NAN = torch.tensor([[0.0, math.nan]], dtype=torch.float64)
MEASURE = ls.mean_field.DiscreteMeasure.uniform(X)
WRONG = {
    "negative time": ({"time": -1.0}, "time"),
    "no time": ({"time": 0.0}, "time"),
    "endless time": ({"time": math.inf}, "time"),
    "no time to divide": ({"time": 5e-324}, "65 distinct times"),
    "one frame": ({"frames": 1}, "frames"),
    "half a frame": ({"frames": 2.5}, "frames"),
    "half a step": ({"max_steps": 1.5}, "max_steps"),
    "tolerance": ({"tol": 0.0}, "tolerance"),
    "a word": ({"tol": "fine"}, "tolerance"),
    "NaN positions": ({"X": NAN}, "nan at index"),
    "no tokens": ({"X": X[:0]}, "empty"),
    "a batch": ({"X": X[None]}, r"tokens X \[n, d\]"),
    "another size": ({"f": identity(3)}, "takes tokens of size 3"),
    "another dtype": ({"X": X.float()}, "convert"),
    "V not square": ({"f": replace(identity(), V=draw(3, 2))}, "square V"),
    "mask": ({"f": replace(identity(), mask=draw(3, 3))}, r"shape \(4, 4\)"),
    "positions": ({"f": identity(causal=True), "X": MEASURE}, "positions"),
    "half a layer": ({"layers": 2.5}, "layers"),
    "no layers": ({"layers": 0}, "layer"),
    "layers to nowhere": ({"layers": 4, "time": -1.0}, "time"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    options, told = WRONG[name]
    options = {"f": identity(), "X": X, "time": 1.0} | options
    run = ls.dynamics.layered if "layers" in options else ls.dynamics.flow
    with types_unchecked(), pytest.raises(ls.UserError, match=told):
        run(**options)
