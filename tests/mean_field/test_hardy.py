"""Averaging over the past: constants against dense norms, and measures that attain them."""

import itertools
import math

import numpy as np
import pytest
import torch

import lipscope as ls
from lipscope.mean_field.attention_on_measures import push
from lipscope.mean_field.hardy import averaging
from lipscope.mean_field.masked import conditional_distance
from lipscope.mean_field.measures import DiscreteMeasure
from lipscope.mean_field.upper_bounds import d_p_bound
from tests.mean_field.weighted import one_head


def table(n):
    return np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]


@pytest.mark.parametrize("n", [1, 2, 30, 300])
def test_known_norms(n):
    for p in (1, 2, math.inf):
        assert averaging(n, p).constant == pytest.approx(np.linalg.norm(table(n), p), rel=1e-13)


@pytest.mark.parametrize("p", [1.001, 1.1, 1.5, 3, 8, 300])
def test_no_field_does_better(p):
    """Among many random fields, and among small changes of the one that should be best."""
    n, g = 9, np.random.default_rng(0)
    best = averaging(n, p)
    x = best.field[:, 0].numpy()

    def ratio(y):
        return np.linalg.norm(table(n) @ y, p) / np.linalg.norm(y, p)

    assert ratio(x) == pytest.approx(best.constant, rel=1e-13)
    for _ in range(2000):
        assert ratio(g.normal(size=n)) < best.constant
        assert ratio(x * np.exp(0.01 * g.normal(size=n))) <= best.constant * (1 + 1e-14)


@pytest.mark.parametrize("n", [1, 10, 100])
def test_the_constants_run_from_the_harmonic_sum_to_one(n):
    """Near p = 1 the best field is the first token, and 1/(p-1) powers of the others vanish."""
    values = [
        averaging(n, p) for p in (1, 1 + 1e-12, 1.001, 1.002, 1.1, 2, 40, 1e4, 1e15, math.inf)
    ]
    assert all(v.field.isfinite().all() for v in values)
    constants = [v.constant for v in values]
    assert (
        constants[1]
        == pytest.approx(constants[0], rel=1e-10)
        == pytest.approx(sum(1 / i for i in range(1, n + 1)))
    )
    assert all(low <= high * (1 + 1e-14) for high, low in itertools.pairwise(constants))
    alone = (torch.arange(1, n + 1, dtype=torch.float64) ** -1.001).sum() ** (1 / 1.001)
    assert alone.item() * (1 - 1e-14) <= constants[2] <= alone.item() * (1 + 1e-9)


@pytest.mark.parametrize("p", [1.25, 2, 4])
def test_the_constants_grow_to_hardys(p):
    values = [averaging(n, p).constant for n in (1, 2, 10, 100, 1000, 10000)]
    assert values == sorted(values) and values[0] == pytest.approx(1.0)
    assert values[1] > 1.04 and 0.7 * p / (p - 1) < values[-1] < p / (p - 1)


@pytest.mark.parametrize("p", [1, 1.25, 2, 4])
def test_attention_stretches_the_pair_it_names(p):
    """With A = 0, and with any A near the origin, where scores vanish: above the bound 1."""
    n = 50
    best = averaging(n, p)
    mu = DiscreteMeasure.uniform(torch.zeros(n, 1, dtype=torch.float64), causal=True)
    for A, size, rel in ((0.0, 1.0, 1e-12), (-0.7, 1e-5, 1e-9)):
        f, nu = one_head(A, causal=True), mu.moved(size * best.field / best.field.abs().max())
        ratio = conditional_distance(push(f, mu), push(f, nu), p) / conditional_distance(mu, nu, p)
        assert ratio == pytest.approx(best.constant, rel=rel) and ratio > 1.2
        assert p == 1 or ratio <= d_p_bound(f, 1.0, p)


def test_invalid_arguments_are_refused():
    for n, p, says in (
        (0, 2, "at least 1"),
        (3, 0.5, "p must be"),
        (3, math.nan, "p must"),
    ):
        with pytest.raises(ls.UserError, match=says):
            averaging(n, p)
