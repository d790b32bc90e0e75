"""Fitted exponents against the fit of studies and against known laws."""

import math

import numpy as np
import pytest

from lipscope.papers.claims import power_law
from lipscope.study.growth import fit


def noisy(alpha, beta=0.0, count=60, seed=0):
    random = np.random.default_rng(seed)
    x, z = random.uniform(1, 50, (2, count))
    y = 3 * x**alpha * z**beta * np.exp(0.1 * random.standard_normal(count))
    return list(zip(x.tolist(), y.tolist(), strict=True)), z.tolist()


def test_one_power_agrees_with_the_fit_of_studies():
    points, _ = noisy(0.25)
    points = [(round(x) + 1, y) for x, y in points]
    ours, theirs = power_law(points), fit("attention", 0, points)
    assert (ours.alpha, *ours.interval) == pytest.approx((theirs.alpha, theirs.low, theirs.high))
    assert ours.rms == pytest.approx(theirs.rms)
    assert ours.contains(0.25) and not ours.contains(0.5)


def test_a_held_quantity_takes_its_own_share():
    points, held = noisy(0.5, beta=2.0)
    assert not power_law(points).contains(0.5) or power_law(points).high > 1
    alone = power_law(points, held)
    assert alone.contains(0.5) and alone.high - alone.low < 0.2


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    hits = sum(power_law(noisy(0.3, seed=i)[0]).contains(0.3) for i in range(200))
    assert 180 <= hits <= 198


def test_one_radius_alone_has_no_exponent():
    found = power_law([(2.0, 1.0), (2.0 * (1 + 1e-7), 3.0), (2.0, 2.0), (2.0, 2.5)])
    assert found.interval == (-math.inf, math.inf)
