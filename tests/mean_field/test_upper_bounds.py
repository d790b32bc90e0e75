"""Bounds for measures in a ball: formulas, hypotheses, and measures that try to exceed them."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Generator

import lipscope as ls
from lipscope.linalg.spectral import spectral_norm
from lipscope.mean_field.measures import DiscreteMeasure, derivative, push
from lipscope.mean_field.transport import conditional_distance, wasserstein
from lipscope.mean_field.upper_bounds import (
    averaging,
    d_p_bound,
    w2_bound,
    w2_bound_geshkovski2023,
    w_inf_bound,
    w_p_bound,
)
from tests.cases import problem
from tests.mean_field.weighted import norm, one_head, randn, random_weights


def in_ball(X):
    return X / X.norm(dim=1, keepdim=True).clamp_min(1.0)


def test_the_formulas():
    f, a = one_head(-3.0, 2.0), 3.0 * 0.25
    assert w2_bound(f, 0.5) == pytest.approx(2 * (a + (1 + a) * math.exp(a)))
    assert w2_bound_geshkovski2023(f, 0.5) == pytest.approx(2 * (1 + 3 * a) * math.exp(2 * a))
    assert w_inf_bound(f, 0.5) == pytest.approx(2 * (1 + 2 * a))
    masked = replace(f, causal=True)
    assert w_p_bound(f, 0.5, 1) == pytest.approx(2 * (a + (1 + 2 * a) * math.exp(2 * a)))
    assert w_p_bound(f, 0.5, 6) == pytest.approx(2 * (a + (1 + a) * math.exp(a / 3)))
    assert w_p_bound(f, 0.5, 2) == pytest.approx(w2_bound(f, 0.5))
    assert (
        w_p_bound(f, 0.5, math.inf) == w_inf_bound(f, 0.5) == pytest.approx(w_p_bound(f, 0.5, 1e9))
    )
    assert d_p_bound(masked, 0.5, 1e9) == pytest.approx(w_inf_bound(masked, 0.5), rel=1e-6)
    assert d_p_bound(masked, 0.5, math.inf) == w_inf_bound(masked, 0.5) == w_inf_bound(f, 0.5)


@pytest.mark.parametrize("p", [1.05, 1.5, 2, 3, 10])
@pytest.mark.parametrize("a", [1e-6, 0.05, 0.5, 2.0, 20.0])
def test_the_masked_bound_takes_the_best_exponent(p, a):
    """The minimum over q by another optimiser; q = p is the plain corrected bound."""
    from scipy.optimize import minimize_scalar

    def log_term(t):
        q = 1 + (p - 1) * math.exp(-t)
        return math.log(1 + max(1, 2 ** (2 * q / p - 1)) * a) + q / p * (
            2 * a + math.log(q / (q - 1))
        )

    best = min(
        minimize_scalar(log_term, bounds=(k, k + 2), method="bounded").fun for k in range(0, 9, 2)
    )
    bound = d_p_bound(one_head(-a, causal=True), 1.0, p)
    truth = min(a + math.exp(best), a + p / (p - 1) * (1 + 2 * a) * math.exp(2 * a))
    assert truth * (1 - 1e-5) <= bound <= truth * (1 + 1e-3)
    assert bound <= (a + p / (p - 1) * (1 + 2 * a) * math.exp(2 * a)) * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["causal", "one key head"])
def test_in_d_2_the_masked_bound_is_that_of_the_registry(kind):
    f, X = problem(kind, 0)
    (row,) = ls.bounds(f, ls.Ball(1.3, len(X)), norm="W2")
    assert d_p_bound(f, 1.3, 2) == pytest.approx(row.value, rel=1e-12)


def test_heads_side_by_side_add_as_powers_below_two():
    I = torch.eye(1, dtype=torch.float64)
    f = ls.SelfAttention(I.repeat(4, 1), I.repeat(4, 1), I.repeat(4, 1), heads=4, causal=True)
    assert d_p_bound(f, 1.0, 1.25) == pytest.approx(
        4 ** (1 / 1.25) * d_p_bound(f.head(0), 1.0, 1.25)
    )
    assert d_p_bound(f, 1.0, 3) == pytest.approx(2 * d_p_bound(f.head(0), 1.0, 3))


def test_the_sharper_bound_is_never_above_the_published_one():
    for a in (0.0, 1e-3, 0.1, 1.0, 10.0, 300.0, 1e6):
        assert w2_bound(one_head(a), 1.0) <= w2_bound_geshkovski2023(one_head(a), 1.0)
    assert w2_bound(one_head(1e6), 1.0) == math.inf


@pytest.mark.parametrize(
    "kind", ["gaussian", "multi-head", "multi-head, projected", "grouped keys", "biases"]
)
@pytest.mark.parametrize("seed", range(4))
def test_no_local_constant_is_above_the_bounds(kind, seed):
    f, X = problem(kind, seed)
    g = Generator().manual_seed(seed)
    mu = DiscreteMeasure(X, random_weights(g, len(X)))
    sigma = spectral_norm(derivative(f, mu)).value
    assert sigma <= w2_bound(f, mu.radius)
    # W_inf: a field with |xi_j| = 1 for every atom, pushed through J = W^{-1/2} D W^{1/2}.
    xi = randn(g, len(X), X.shape[1])
    xi = xi / xi.norm(dim=1, keepdim=True)
    pushed = derivative(f, mu).mv(mu.roots * xi) / mu.roots
    assert pushed.norm(dim=1).max() <= w_inf_bound(f, mu.radius) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_random_pairs_stay_below_the_bounds(seed):
    g = Generator().manual_seed(seed)
    n, d = (int(torch.randint(low, high, (), generator=g)) for low, high in ((1, 6), (1, 4)))
    A = randn(g, d, d)
    A = A / norm(A) * 10 ** (2 * torch.rand((), generator=g, dtype=torch.float64) - 1)
    f = one_head(A, randn(g, d, d))
    mu = DiscreteMeasure(in_ball(randn(g, n, d)), random_weights(g, n))
    if seed % 2:
        nu = DiscreteMeasure(in_ball(randn(g, n + 1, d)), random_weights(g, n + 1))
    else:
        nu = DiscreteMeasure(in_ball(mu.points + 0.01 * randn(g, n, d)), mu.weights)
    ratio = wasserstein(push(f, mu), push(f, nu)) / wasserstein(mu, nu)
    assert ratio <= w2_bound(f, 1.0) <= w2_bound_geshkovski2023(f, 1.0)
    for p in (1, 1.5, 4):
        assert wasserstein(push(f, mu), push(f, nu), p) / wasserstein(mu, nu, p) <= w_p_bound(
            f, 1.0, p
        )
    longest = wasserstein(push(f, mu), push(f, nu), math.inf) / wasserstein(mu, nu, math.inf)
    assert longest <= w_inf_bound(f, 1.0)


def test_hypotheses_are_checked():
    f = one_head(1.0)
    for bad, says in (
        (lambda: w2_bound(replace(f, causal=True), 1.0), "use d_p_bound"),
        (lambda: d_p_bound(f, 1.0), "use w2_bound"),
        (lambda: d_p_bound(replace(f, causal=True), 1.0, 1), "no constant in d_1"),
        (lambda: w_p_bound(f, 1.0, 0.5), "at least 1"),
        (lambda: w_p_bound(replace(f, causal=True), 1.0), "use d_p_bound"),
        (lambda: w2_bound(f, -1.0), "radius"),
        (lambda: w2_bound(replace(f, kernel=ls.L2()), 1.0), "dot-product"),
        (lambda: w2_bound(replace(f, kernel=ls.Dot(softcap=1.0)), 1.0), "softcap"),
        (
            lambda: w2_bound_geshkovski2023(
                replace(f, biases=(torch.ones(1).double(), None, None)), 1.0
            ),
            "query bias",
        ),
    ):
        with pytest.raises(ls.UserError, match=says):
            bad()


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
