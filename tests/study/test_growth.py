"""The power-law fit against scipy, on laws with known exponents."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from lipscope._types import UserError
from lipscope.study.growth import _correlated, fit
from tests.campaigns.exponent_intervals import LENGTHS, PROMISED, measured


def noisy(alpha, C, lengths, samples, noise, seed=0):
    rng = random.Random(seed)
    return [
        (n, C * n**alpha * math.exp(rng.gauss(0, noise))) for n in lengths for _ in range(samples)
    ]


def test_an_exact_law_is_found_exactly():
    law = fit("attention", 2, noisy(0.25, 4.6, (8, 16, 64, 256), 2, 0.0))
    assert law.alpha == pytest.approx(0.25, abs=1e-12)
    assert pytest.approx(4.6, rel=1e-12) == law.C
    assert law.high - law.low < 1e-6 and law.rms < 1e-12
    assert law(100) == pytest.approx(4.6 * 100**0.25)
    assert (law.scope, law.layer, law.lengths, law.points) == ("attention", 2, (8, 16, 64, 256), 8)


def test_interval_agrees_with_scipy():
    points = noisy(0.3, 2.0, (8, 16, 32, 64, 128, 256), 3, 0.2, seed=1)
    law = fit("heads", 0, points, [0, 1, 2] * 6)
    assert law == fit("heads", 0, points)
    truth = stats.linregress([math.log(n) for n, _ in points], [math.log(v) for _, v in points])
    half = stats.t.ppf(0.975, len(points) - 2) * truth.stderr
    assert law.alpha == pytest.approx(truth.slope, rel=1e-12)
    assert pytest.approx(math.exp(truth.intercept), rel=1e-12) == law.C
    assert (law.low, law.high) == pytest.approx((truth.slope - half, truth.slope + half), rel=1e-10)
    left = [math.log(v) - truth.intercept - truth.slope * math.log(n) for n, v in points]
    assert law.rms == pytest.approx(np.sqrt(np.mean(np.square(left))), rel=1e-10)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    laws = [
        fit("attention", 0, noisy(0.5, 1.0, (8, 32, 128), 3, 0.3, seed)) for seed in range(2000)
    ]
    covered = sum(law.low <= 0.5 <= law.high for law in laws) / len(laws)
    assert 0.935 < covered < 0.965  # 0.95 with a standard error of 0.005


def test_too_few_lengths_are_refused():
    with pytest.raises(
        UserError, match=r"at least 3 lengths .* layer 1, scope heads has 2 \[8, 16\]"
    ):
        fit("heads", 1, [(8, 1.0), (16, 2.0), (16, 2.1), (32, 0.0), (64, math.inf)])


def test_correlated_samples_get_an_interval_from_their_own_slopes():
    """With every length in every sample, the variance of their mean, and the plain one as prior."""
    x = np.log(LENGTHS)
    rng = np.random.default_rng(3)
    y = 0.3 * x + 0.2 * rng.normal(size=(4, len(LENGTHS))).cumsum(axis=1)
    slopes = [stats.linregress(x, row).slope for row in y]
    plain = stats.linregress(np.tile(x, 4), y.ravel()).stderr
    spread = math.sqrt((3 * stats.sem(slopes) ** 2 + 2 * 3 * plain**2) / 5)
    low, high = stats.t.interval(0.95, 5, np.mean(slopes), spread)
    points = [(n, math.exp(v)) for row in y for n, v in zip(LENGTHS, row, strict=True)]
    samples = [s for s in range(4) for _ in LENGTHS]
    law = fit("attention", 0, points, samples)
    assert (law.low, law.high) == pytest.approx((low, high), rel=1e-10)
    shuffled = list(zip(points, samples, strict=True))
    random.Random(0).shuffle(shuffled)
    again = fit("attention", 0, [p for p, _ in shuffled], [s for _, s in shuffled])
    assert (again.low, again.high) == pytest.approx((low, high), rel=1e-10)
    # A sample with a single point, and points without samples, are no evidence of correlation.
    alone = fit("attention", 0, points)
    assert alone.high - alone.low < high - low
    assert fit("attention", 0, points, [0] * len(points)).low == alone.low


@pytest.mark.parametrize(("counts", "draws"), [((6,) * 8, 1500), ((6, 6, 5, 3, 2, 1), 3000)])
def test_independent_residuals_count_as_correlated_in_one_draw_of_ten(counts, draws):
    rng = np.random.default_rng(0)
    x = np.log(LENGTHS)
    found = 0
    for _ in range(draws):
        groups = [list(zip(x[:count], rng.normal(size=count), strict=True)) for count in counts]
        found += _correlated(groups)
    assert found / draws == pytest.approx(0.1, abs=0.025)


@pytest.mark.parametrize("name", PROMISED)
def test_intervals_cover_the_exponent_whatever_correlates(name):
    """200 draws here; tests/campaigns/exponent_intervals.py makes thousands."""
    plain, ours, _, middle = measured(PROMISED[name], 3, 200)
    assert ours >= max(plain, 0.91)
    if plain >= 0.93:
        assert middle == pytest.approx(1, rel=1e-9)


def test_random_walks_are_covered_where_the_plain_interval_fails():
    plain, ours, _, _ = measured(PROMISED["random walk"], 3, 500)
    assert plain < 0.90 and ours > 0.935


def test_a_single_token_is_a_length_like_any_other():
    law = fit("attention", 0, [(1, 2.0), (2, 2.0 * 2**0.5), (4, 4.0), (0, 1.0), (8, math.nan)])
    assert law.lengths == (1, 2, 4) and law.points == 3
    assert law.alpha == pytest.approx(0.5) and pytest.approx(2.0) == law.C
