"""Presets: each shows what it says, from a seed, on the requested device."""

import pytest
import torch

import lipscope as ls
from lipscope.dynamics.simulation import PRESETS, gaussian_law, tokens_of
from tests.dynamics.problems import types_unchecked


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_is_complete(name):
    assert PRESETS[name].law in ("disc", "gaussian") and PRESETS[name].about
    assert PRESETS[name].look in ("clusters", "moments", "growth")


@pytest.mark.parametrize("seed", range(2))
def test_clusters_are_vertices(seed):
    found = ls.simulate("clusters", seed=seed)
    assert found.flow.ok and found.found.clear and found.found.extreme.all()
    assert 3 <= len(found.found) <= 20 and found.found.time < found.time
    assert "vertices" in found.summary and found.seed == seed


def test_masked_tokens_cluster_and_the_first_rests():
    found = ls.simulate("masked")
    assert found.flow.ok and found.found.clear
    z = found.shown[:, 0]
    assert torch.allclose(z, z[0].expand_as(z), atol=1e-4) and not found.found.extreme.all()


@pytest.mark.wide
def test_the_gaussian_blows_up_where_it_must():
    """A = a I and V a rotation by 30 degrees; test_gaussian integrates the path with scipy too."""
    found = ls.simulate("gaussian", n=50)
    assert found.found.closed.ok and found.found.blow_up == pytest.approx(2 / 3**0.5, rel=1e-7)
    beyond = ls.simulate("gaussian", n=50, time=2.0)
    assert beyond.found.closed.blow_up == pytest.approx(found.found.blow_up, rel=1e-7)
    assert "infinite at t = 1.1547" in beyond.summary and beyond.flow.ok


def test_a_blow_up_is_looked_for_as_far_as_it_is_told():
    short = ls.simulate("gaussian", n=2, time=1e-3).found
    assert short.blow_up is None and short.searched == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "dim"), [(name, 1) for name in PRESETS] + [("clusters", 3), ("gaussian", 3)]
)
def test_other_dimensions(name, dim):
    found = ls.simulate(name, n=4, dim=dim, time=0.25)
    assert found.flow.positions.shape[1:] == (4, dim) and found.flow.ok


def test_a_seed_decides():
    same, again, other = (
        ls.simulate("clusters", n=6, time=0.5, seed=s).flow.positions for s in (3, 3, 4)
    )
    assert torch.equal(same, again) and not torch.equal(same[0], other[0])


def test_tokens_have_the_law_they_say():
    X = tokens_of(PRESETS["gaussian"], 20_000, 3, 0)
    mean, covariance = gaussian_law(3, 1.0)
    assert torch.allclose(X.mean(0), mean, atol=0.03) and torch.allclose(
        X.T.cov(), covariance, atol=0.04
    )
    radius = tokens_of(PRESETS["clusters"], 20_000, 2, 0).norm(dim=1)
    assert radius.max() <= 2 and (radius < 1).double().mean().item() == pytest.approx(
        0.25, abs=0.01
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"preset": "nonsense"},
            "there is no preset 'nonsense'; the presets are clusters, gaussian",
        ),
        ({"n": 0}, "n, the number of tokens, must be an integer of at least 1"),
        ({"n": 3.5}, "n, the number of tokens, must be an integer"),
        ({"dim": 0}, "dim, the size of a token"),
        ({"time": -1.0}, "time"),
        ({"time": float("nan")}, "time"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
    ],
)
def test_refusals(options, told):
    with types_unchecked(), pytest.raises(ls.UserError, match=told):
        ls.simulate(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRESETS)
def test_a_gpu_finds_what_the_cpu_finds(name):
    here, there = (ls.simulate(name, n=30, time=0.5, device=device) for device in ("cpu", "cuda"))
    assert there.flow.positions.is_cuda and there.device.startswith("cuda")
    assert torch.allclose(here.flow.positions, there.flow.positions.cpu(), rtol=1e-6, atol=1e-6)
    assert here.summary.split(".")[0] == there.summary.split(".")[0]
