"""Masked measures: conditional distance, why the unmasked bound fails, and bounds that hold."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Generator

import lipscope as ls
from lipscope.linalg.spectral import spectral_norm
from lipscope.mean_field.attention_on_measures import derivative, push
from lipscope.mean_field.masked import conditional_distance
from lipscope.mean_field.measures import DiscreteMeasure
from lipscope.mean_field.transport import wasserstein
from lipscope.mean_field.upper_bounds import d_p_bound, w_inf_bound
from tests.mean_field.weighted import line, norm, one_head, randn, random_weights

EXPONENTS = [1, 1.1, 2, 4, math.inf]


def lengths_norm(w, lengths, p):
    return lengths.max().item() if math.isinf(p) else ((w * lengths**p).sum() ** (1 / p)).item()


@pytest.mark.parametrize("p", EXPONENTS)
def test_without_ties_the_distance_is_token_by_token(p):
    g = Generator().manual_seed(0)
    X, Y, w = randn(g, 7, 2), randn(g, 7, 2), random_weights(g, 7)
    s = torch.rand(7, generator=g, dtype=torch.float64)
    order = torch.randperm(7, generator=g)
    there = DiscreteMeasure(Y[order], w[order], s[order])
    truth = lengths_norm(w, (X - Y).norm(dim=1), p)
    assert conditional_distance(DiscreteMeasure(X, w, s), there, p) == pytest.approx(
        truth, rel=1e-12
    )


@pytest.mark.parametrize("p", EXPONENTS)
def test_at_one_position_the_distance_is_wasserstein(p):
    g = Generator().manual_seed(1)
    mu, nu = (DiscreteMeasure(randn(g, n, 2), random_weights(g, n)) for n in (4, 6))
    here, there = (replace(m, positions=torch.full_like(m.weights, 0.3)) for m in (mu, nu))
    assert conditional_distance(here, there, p) == pytest.approx(wasserstein(mu, nu, p), rel=1e-9)


def test_mass_stays_at_its_position():
    here, there = (line([0.0, 1.0], positions=s) for s in ([0.0, 1.0], [1.0, 0.0]))
    assert conditional_distance(here, there, 2) == 1.0  # while the laws of the tokens are the same


def test_different_laws_of_positions_are_refused():
    mu = line([0.0, 1.0], positions=[0.0, 1.0])
    with pytest.raises(ls.UserError, match=r"only the second has mass at position 0\.5"):
        conditional_distance(mu, line([0.0, 1.0, 2.0], positions=[0.0, 0.5, 1.0]))
    with pytest.raises(ls.UserError, match=r"position 0 has mass 0\.5 in the first and 0\.25"):
        conditional_distance(mu, line([0.0, 1.0], [0.25, 0.75], [0.0, 1.0]))
    close = line([0.0, 1.0], positions=[0.0, 1.0 - 2**-53])
    with pytest.raises(
        ls.UserError, match=r"only the first has mass at position 0\.9999999999999999"
    ):
        conditional_distance(close, mu)
    with pytest.raises(ls.UserError, match="use wasserstein"):
        conditional_distance(line([0.0]), mu)


def test_positions_that_differ_by_their_dtype_are_refused_by_its_name():
    X = torch.zeros(3, 1)
    fine = DiscreteMeasure.uniform(X, causal=True)
    coarse = replace(fine, positions=torch.arange(1, 4) / 3)
    with pytest.raises(ls.UserError, match=r"in torch\.float64 and the second in torch\.float32"):
        conditional_distance(fine, coarse)
    halves, same = (DiscreteMeasure.uniform(X[:2], causal=True) for _ in range(2))
    assert conditional_distance(halves, replace(same, positions=torch.tensor([0.5, 1.0]))) == 0.0


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("n", [2, 50])
def test_the_unmasked_bound_fails_in_d_p(n, p):
    """A = 0, V = 1: averaging over the past stretches d_p by more than 1 (Hardy), d_inf never."""
    f = one_head(0.0, causal=True)
    average = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    worst = np.linalg.svd(average)[2][0] if p == 2 else np.eye(n)[0]
    mu = DiscreteMeasure.uniform(torch.zeros(n, 1, dtype=torch.float64), causal=True)
    nu = mu.moved(torch.tensor(worst)[:, None])
    ratio = conditional_distance(push(f, mu), push(f, nu), p) / conditional_distance(mu, nu, p)
    assert ratio == pytest.approx(np.linalg.norm(average, p), rel=1e-12)
    unmasked = 1.0  # ||V|| (1 + 3a) e^{2a} at a = 0
    assert ratio > 1.14 * unmasked
    if p == 2:
        assert ratio < d_p_bound(f, 1.0, 2) == pytest.approx(2.0)
    longest = conditional_distance(push(f, mu), push(f, nu), math.inf) / conditional_distance(
        mu, nu, math.inf
    )
    assert longest <= w_inf_bound(f, 1.0) == pytest.approx(1.0)


def test_the_unmasked_bound_fails_with_scores_too():
    """a = 0.05, 60 tokens of alternating sign: above (1 + 3a) e^{2a}, below the corrected bound."""
    a, n = 0.05, 60
    f = one_head(-a, causal=True)
    X = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).repeat(n // 2, 1)
    sigma = spectral_norm(derivative(f, DiscreteMeasure.uniform(X, causal=True))).value
    assert sigma > 1.2 * (1 + 3 * a) * math.exp(2 * a)
    assert sigma < d_p_bound(f, 1.0, 2) == pytest.approx(a + 2 * (1 + 2 * a) * math.exp(2 * a))


def test_the_constant_of_averaging_grows_to_two():
    f = one_head(0.0, causal=True)
    found = []
    for n in (10, 100, 1000):
        X = torch.zeros(n, 1, dtype=torch.float64)
        found.append(spectral_norm(derivative(f, DiscreteMeasure.uniform(X, causal=True))).value)
    assert found == pytest.approx([1.4101, 1.6300, 1.7481], abs=1e-4)


@pytest.mark.parametrize("seed", range(30))
def test_random_pairs_stay_below_the_bounds(seed):
    g = Generator().manual_seed(seed)
    n, d = int(torch.randint(2, 9, (), generator=g)), int(torch.randint(1, 4, (), generator=g))
    A = randn(g, d, d)
    A = A / norm(A) * 10 ** (2 * torch.rand((), generator=g, dtype=torch.float64) - 1.5)
    f = one_head(A, randn(g, d, d), causal=True)
    s = torch.randint(1, 5, (n,), generator=g).double() / 4
    X = randn(g, n, d)
    X = X / X.norm(dim=1, keepdim=True)
    mu = DiscreteMeasure(X, random_weights(g, n), s)
    Y = X + 10 ** (-3 * torch.rand((), generator=g, dtype=torch.float64)) * randn(g, n, d)
    nu = replace(mu, points=Y / Y.norm(dim=1, keepdim=True).clamp_min(1.0))
    for p in (1.1, 2, 4, math.inf):
        ratio = conditional_distance(push(f, mu), push(f, nu), p) / conditional_distance(mu, nu, p)
        assert ratio <= d_p_bound(f, 1.0, p)


@pytest.mark.parametrize("seed", range(20))
def test_hardys_inequality_holds_for_any_law_of_positions(seed):
    """Averaging over the past in L^2, weights of many orders of magnitude: at most 2."""
    g = Generator().manual_seed(seed)
    w = torch.rand(60, generator=g, dtype=torch.float64) ** [0.2, 1, 6, 20][seed % 4] + 1e-12
    mu = DiscreteMeasure(
        torch.zeros(60, 1, dtype=torch.float64),
        w / w.sum(),
        torch.linspace(0, 1, 60, dtype=torch.float64),
    )
    assert 1 < spectral_norm(derivative(one_head(0.0, causal=True), mu)).value <= 2
