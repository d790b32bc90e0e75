"""The power-law fit against scipy, on laws with known exponents."""

import math
import random

import pytest
from scipy import stats

from lipscope._types import UserError
from lipscope.study.growth import fit


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
    points = noisy(0.3, 2.0, (8, 16, 32, 64, 128, 256), 3, 0.2)
    law = fit("heads", 0, points)
    truth = stats.linregress([math.log(n) for n, _ in points], [math.log(v) for _, v in points])
    half = stats.t.ppf(0.975, len(points) - 2) * truth.stderr
    assert law.alpha == pytest.approx(truth.slope, rel=1e-12)
    assert pytest.approx(math.exp(truth.intercept), rel=1e-12) == law.C
    assert (law.low, law.high) == pytest.approx((truth.slope - half, truth.slope + half), rel=1e-10)


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
