"""Metrics: the covariance of probes, and distances against their definitions."""

import math

import pytest
import torch
from scipy import stats

from lipscope._types import UserError
from lipscope.probes.budget.metrics import (
    _variance_of_mean,
    degrees_of_freedom,
    largest_ratio,
    of_squares,
    of_sums,
    read_metric,
)


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


DRAWS = 4000


def test_one_sequence_has_the_exact_interval_of_chi_square():
    t = torch.randn(8, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got, mean = of_squares(t), t.square().mean().item()
    assert math.isclose(got.value, mean)
    assert math.isclose(got.low, mean * 8 / stats.chi2(8).ppf(0.975), rel_tol=1e-9)
    assert math.isclose(got.high, mean * 8 / stats.chi2(8).ppf(0.025), rel_tol=1e-9)


@pytest.mark.parametrize("probes", [16, 32])
@pytest.mark.parametrize("weights", [[1.0], [1.0] * 4, [1.0, 0.5, 0.3, 0.2], [1.0, 0.01]])
def test_intervals_contain_the_truth_in_95_percent_of_draws(probes, weights):
    g = torch.Generator().manual_seed(probes + len(weights))
    w = torch.tensor(weights, dtype=torch.float64)
    hits = 0
    for _ in range(DRAWS):
        t = torch.randn(probes, len(w), generator=g, dtype=torch.float64) * w.sqrt()
        got = of_squares(t)
        hits += got.low <= w.sum() <= got.high
    assert 0.93 <= hits / DRAWS <= 0.97


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_sums_of_many_squares_are_covered_too(decay):
    g = torch.Generator().manual_seed(1)
    spectrum = torch.arange(1, 31, dtype=torch.float64) ** -decay
    hits = 0
    for _ in range(DRAWS):
        q = (torch.randn(16, 3, 30, generator=g, dtype=torch.float64).square() * spectrum).sum(-1)
        got = of_sums(torch.zeros(16, 3, dtype=torch.float64), q)
        hits += got.low <= 3 * spectrum.sum() <= got.high
    assert 0.93 <= hits / DRAWS <= 0.97


@pytest.mark.parametrize("probes", [2, 3, 4, 8])
@pytest.mark.parametrize("weights", [[1.0] + 8 * [0.05], [1.0] + 3 * [0.1], [1.0] * 4, [1.0, 0.01]])
def test_few_probes_cover_as_often_even_if_one_sequence_dominates(probes, weights):
    g = torch.Generator().manual_seed(probes + len(weights))
    w = torch.tensor(weights, dtype=torch.float64)
    none = torch.zeros(probes, len(w), dtype=torch.float64)
    hits, hits_of_sums = 0, 0
    for _ in range(DRAWS):
        t = torch.randn(probes, len(w), 6, generator=g, dtype=torch.float64) * w.sqrt()[:, None]
        got, sums = of_squares(t[..., 0]), of_sums(none, t.square().mean(dim=-1))
        hits += got.low <= w.sum() <= got.high
        hits_of_sums += sums.low <= w.sum() <= sums.high
    assert hits / DRAWS >= 0.94
    assert hits_of_sums / DRAWS >= 0.94


def test_degrees_of_freedom_and_the_largest_ratio_are_those_of_chi_square():
    g = torch.Generator().manual_seed(2)
    q = torch.randn(20000, 1, 5, generator=g, dtype=torch.float64).square().sum(-1)
    assert math.isclose(degrees_of_freedom(q), 5, rel_tol=0.1)
    error = torch.randn(20000, 5, generator=g, dtype=torch.float64).square().mean(-1)
    estimate = torch.randn(20000, 4, 5, generator=g, dtype=torch.float64).square().mean((1, 2))
    limit = largest_ratio(5, 4, 0.99)
    assert 0.007 <= (error / estimate > limit).double().mean() <= 0.013


@pytest.mark.parametrize(("probes", "sequences"), [(2, 1), (4, 3), (16, 5)])
def test_estimated_variances_are_enlarged_by_the_quantiles_of_student_and_chi_square(
    probes, sequences
):
    """By scipy's distributions; an exponent or a tail that is wrong changes the width."""
    g = torch.Generator().manual_seed(probes)
    q = torch.rand(probes, sequences, generator=g, dtype=torch.float64)
    freedom = sequences * (probes - 1)
    factor = stats.t(freedom).ppf(0.975) / stats.norm.ppf(0.975)
    of_mean = q.numpy().var(axis=0, ddof=1).sum() / probes
    assert _variance_of_mean(q) == pytest.approx(factor**2 * of_mean, rel=1e-6)
    deviation = q.numpy().std(axis=0, ddof=1).sum()
    largest = deviation**2 * freedom / stats.chi2(freedom).ppf(0.1)
    mean = q.numpy().mean(axis=0).sum()
    assert degrees_of_freedom(q) == pytest.approx(2 * mean**2 / largest, rel=1e-9)
