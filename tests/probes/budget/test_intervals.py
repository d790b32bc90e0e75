"""Intervals: how often they contain the truth, over many draws of probes."""

import math

import pytest
import torch
from scipy import stats

from lipscope.probes.budget.metrics import (
    _variance_of_mean,
    degrees_of_freedom,
    largest_ratio,
    of_squares,
    of_sums,
)

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
