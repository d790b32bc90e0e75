"""Flows, simulations and growth along depth draw themselves."""

import matplotlib.pyplot as plt
import pytest
import torch

import lipscope as ls


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


def drawn(ax):
    return [[float(y) for y in line.get_ydata()] for line in ax.lines]


@pytest.mark.parametrize("preset", ["clusters", "gaussian", "growth", "masked"])
def test_a_simulation_draws_what_the_command_draws(preset):
    simulation = ls.simulate(preset, n=6, time=0.5)
    left, right = simulation.plot()
    assert left.figure is right.figure is plt.gcf()
    assert right.get_xlabel() == "depth t"
    if preset == "growth":
        assert simulation.found.sigma.tolist() in drawn(right)


def test_a_flow_draws_the_path_of_every_token():
    I = torch.eye(2, dtype=torch.float64)
    X = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]], dtype=torch.float64)
    flow = ls.dynamics.flow(ls.SelfAttention(I, I, I, causal=True), X, 1.0)
    ax = plt.subplots()[1]
    assert flow.plot(ax) is ax
    assert drawn(ax) == flow.positions[:, :, 1].T.tolist()
    # In a causal flow the position decides the fate of a token, and colours show it.
    assert len({tuple(line.get_color()) for line in ax.lines}) == 3
    other = flow.plot(renormalised=True)
    assert drawn(other) == flow.renormalised[:, :, 1].T.tolist()
    assert other.get_xlabel().startswith("z")


def test_growth_along_depth_draws_itself():
    I = torch.eye(2, dtype=torch.float64)
    found = ls.dynamics.growth_along_depth(
        ls.SelfAttention(I, I, I), torch.ones(3, 2).double(), 0.5
    )
    ax = found.plot()
    assert drawn(ax) == [found.gronwall.tolist(), found.product.tolist(), found.sigma.tolist()]
    assert ax.get_yscale() == "log"
