"""Metrics: the covariance of probes, and distances against their definitions."""

import math

import pytest
import torch

from lipscope._types import UserError
from lipscope.probes.budget.metrics import read_metric


def test_probes_of_kl_have_the_fisher_covariance():
    z = torch.tensor([[0.3, -1.0, 2.0, 0.5]], dtype=torch.float64)
    metric, g = read_metric("kl"), torch.Generator().manual_seed(0)
    v = torch.cat([metric.probe(z, g) for _ in range(40000)])
    p = z[0].softmax(-1)
    expected = p.diag() - p[:, None] * p
    assert (v.T @ v / len(v) - expected).abs().max() < 6e-3
    assert v.sum(-1).abs().max() < 1e-12  # adding a constant to the logits changes nothing


def test_kl_is_the_divergence_in_nats_per_token():
    z, dz = torch.randn(2, 1, 3, 7, dtype=torch.float64)
    metric = read_metric("kl")
    p, q = (torch.distributions.Categorical(logits=x) for x in (z, z + dz))
    expected = torch.distributions.kl_divergence(p, q).mean().item()
    got = metric.value(metric.squared(z, z + dz), metric.size(z))
    assert math.isclose(got, expected, rel_tol=1e-12)


def test_squared_is_what_products_predict_to_first_order():
    g = torch.Generator().manual_seed(3)
    z, dz = torch.randn(2, 1, 4, 9, generator=g, dtype=torch.float64)
    dz = dz * 1e-3
    for name in ("output", "kl"):
        metric = read_metric(name)
        t = torch.stack([(metric.probe(z, g) * dz).sum() for _ in range(20000)])
        assert math.isclose(t.square().mean(), metric.squared(z, z + dz), rel_tol=0.04)


def test_a_function_of_the_output_is_a_metric():
    metric = read_metric(lambda output: output[:, -1])
    y = torch.arange(12.0).reshape(1, 3, 4)
    assert torch.equal(metric.read(y), y[:, -1]) and metric.head
    with pytest.raises(UserError, match="must return a floating-point tensor"):
        read_metric(lambda output: 3).read(y)
    with pytest.raises(UserError, match="metric must be 'output', 'kl' or a function"):
        read_metric("loss")


@pytest.mark.parametrize("words", [1, 2, 7, 50_000])
def test_no_divergence_of_a_small_change_exceeds_that_of_a_guess(words):
    """log of the number of words, that of a certain prediction from one that knows nothing."""
    y = torch.zeros(1, 1, words, dtype=torch.float64)
    assert read_metric("kl").limit(y) == pytest.approx(math.log(max(words, 2)))
    assert read_metric("output").limit(y) == 1.0
