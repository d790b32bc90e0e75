"""Wasserstein distances against enumeration, against each other, and at close points."""

import itertools
import math

import pytest
import torch
from torch import Generator

import lipscope as ls
from lipscope.mean_field.measures import DiscreteMeasure
from lipscope.mean_field.transport import distances, wasserstein
from tests.mean_field.weighted import line, randn, random_weights

EXPONENTS = [1, 1.5, 2, 4, math.inf]
LARGE = [1, 2, 8, 20, 40, 120, 1000, 1e6, 1e15, 1e300, math.inf]


def by_enumeration(x, y, p):
    """Equal weights: an optimal coupling is a permutation (Birkhoff)."""
    D = distances(x, y)
    best = math.inf
    for order in itertools.permutations(range(len(x))):
        moves = D[torch.arange(len(x)), list(order)]
        longest = moves.max().item()
        best = min(
            best,
            longest
            if math.isinf(p)
            else longest * (moves / longest).pow(p).mean().item() ** (1 / p),
        )
    return best


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("d", [1, 2, 3])
def test_equal_weights_match_enumeration(p, d):
    g = Generator().manual_seed(d)
    for _ in range(5):
        x, y = randn(g, 5, d), randn(g, 5, d)
        assert wasserstein(
            DiscreteMeasure.uniform(x), DiscreteMeasure.uniform(y), p
        ) == pytest.approx(by_enumeration(x, y, p), rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_large_exponents_match_enumeration(seed):
    """From the smallest to the longest move: next to the diameter, powers of the moves vanish."""
    g = Generator().manual_seed(seed)
    x, y = randn(g, 5, 2 + seed % 2), randn(g, 5, 2 + seed % 2)
    found = [wasserstein(DiscreteMeasure.uniform(x), DiscreteMeasure.uniform(y), p) for p in LARGE]
    assert found == pytest.approx([by_enumeration(x, y, p) for p in LARGE], rel=1e-12)
    assert all(low <= high * (1 + 1e-14) for low, high in itertools.pairwise(found))


@pytest.mark.parametrize("p", [*LARGE, *EXPONENTS])
def test_the_line_agrees_with_the_linear_program(p):
    """The same measures laid on a line in the plane, where the program runs."""
    g = Generator().manual_seed(0)
    for _ in range(10):
        mu, nu = (DiscreteMeasure(randn(g, n, 1), random_weights(g, n)) for n in (6, 9))
        lifted = [
            DiscreteMeasure(torch.cat([m.points, 0 * m.points], dim=1), m.weights) for m in (mu, nu)
        ]
        assert wasserstein(mu, nu, p) == pytest.approx(wasserstein(*lifted, p), rel=1e-9)


def test_known_distances():
    assert wasserstein(line([0.0]), line([3.0]), 2) == 3.0
    assert wasserstein(line([0.0, 1.0]), line([0.0, 1.0], [0.25, 0.75]), 1) == pytest.approx(0.25)
    assert wasserstein(line([0.0, 1.0]), line([0.0, 1.0], [0.25, 0.75]), 2) == pytest.approx(0.5)
    assert wasserstein(line([0.0, 1.0]), line([0.0, 1.0], [0.25, 0.75]), math.inf) == 1.0


@pytest.mark.parametrize("d", [1, 2])
def test_the_same_measure_written_twice_is_at_distance_zero(d):
    g = Generator().manual_seed(3)
    mu = DiscreteMeasure(randn(g, 6, d), random_weights(g, 6))
    order = torch.randperm(6, generator=g)
    for other in (mu.split(3), DiscreteMeasure(mu.points[order], mu.weights[order])):
        found = [wasserstein(mu, other, p) for p in EXPONENTS]
        # On a line the quantiles are compared and agree exactly; a plan in the plane may not.
        assert found == [0.0] * 5 if d == 1 else max(found) <= 1e-7


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("t", [1e-3, 1e-6])
def test_close_measures_keep_their_distance(d, t):
    """Every atom moved by t, far from the origin: expanding the square would lose it."""
    g = Generator().manual_seed(4)
    mu = DiscreteMeasure(100 + randn(g, 8, d), random_weights(g, 8))
    step = torch.zeros(1, d, dtype=torch.float64)
    step[0, 0] = t
    for p in EXPONENTS:
        assert wasserstein(mu, mu.moved(step), p) == pytest.approx(t, rel=1e-7)


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("lightest", [1e-3, 1e-8, 1e-14, 1e-100])
def test_the_lightest_atom_is_not_forgotten(d, lightest):
    """It alone moves, by 5: W_p = 5 w^{1/p}. In the plane, rounding rules out large p."""
    x = torch.zeros(3, d, dtype=torch.float64)
    x[1, 0], x[2, 0] = 1.0, 2.0
    y = x.clone()
    y[0, 0] = -5.0
    w = torch.tensor([lightest, 0.5 - lightest, 0.5], dtype=torch.float64)
    mu, nu = DiscreteMeasure(x, w), DiscreteMeasure(y, w)
    for p in (1, 1.5, 2, 4, 8):
        assert wasserstein(mu, nu, p) == pytest.approx(5 * lightest ** (1 / p), rel=1e-9)
    for p in (8.5, 40, 1000, math.inf):
        if d == 2 and lightest < 1e-10:
            with pytest.raises(ls.UserError, match="the lightest has mass 1e-1"):
                wasserstein(mu, nu, p)
        else:
            assert wasserstein(mu, nu, p) == pytest.approx(5 * lightest ** (1 / p), rel=1e-9)


@pytest.mark.parametrize("seed", range(24))
def test_weights_of_every_order(seed):
    """Atoms moved by less than their gaps, then shuffled: the distance is that of the field."""
    g = Generator().manual_seed(seed)
    n, d = 3 + seed % 5, 1 + seed % 3
    x = 3 * randn(g, n, d)
    w = (
        -[1.0, 15.0, 300.0][seed % 4 % 3] * torch.rand(n, generator=g, dtype=torch.float64)
    ).softmax(0)
    gap = (distances(x, x) + 1e9 * torch.eye(n)).min()
    field = randn(g, n, d)
    field = 0.2 * gap * field / field.norm(dim=1).max()
    order = torch.randperm(n, generator=g)
    mu, nu = DiscreteMeasure(x, w), DiscreteMeasure((x + field)[order], w[order])
    length = field.norm(dim=1)
    for p in EXPONENTS:
        if math.isinf(p) and d > 1 and w.min() < 1e-10:
            continue
        truth = length.max() if math.isinf(p) else (w * length**p).sum() ** (1 / p)
        assert wasserstein(mu, nu, p) == pytest.approx(truth.item(), rel=1e-9)


@pytest.mark.parametrize("p", [1, 2, 4, 40, 1000])
@pytest.mark.parametrize("seed", range(10))
def test_close_pairs_in_a_wide_measure_match_enumeration(p, seed):
    """Pairs 1e-7 apart, moved by as little, in a measure of diameter ten: squares would vanish."""
    g = Generator().manual_seed(seed)
    x = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]], dtype=torch.float64).repeat(2, 1)
    x = x + 1e-7 * randn(g, 6, 2)
    y = x + 1e-7 * randn(g, 6, 2)
    truth = by_enumeration(x, y, p)
    assert wasserstein(DiscreteMeasure.uniform(x), DiscreteMeasure.uniform(y), p) == pytest.approx(
        truth, rel=1e-7
    )


@pytest.mark.parametrize("d", [1, 2])
def test_scale_does_not_matter(d):
    g = Generator().manual_seed(5)
    mu, nu = (DiscreteMeasure(randn(g, 4, d), random_weights(g, 4)) for _ in range(2))
    for s in (1e-300, 1e-170, 1e-100, 1e100, 1e160, 1e306):
        for p in (1, 2, 40, math.inf):
            far = wasserstein(
                DiscreteMeasure(s * mu.points, mu.weights),
                DiscreteMeasure(s * nu.points, nu.weights),
                p,
            )
            assert far == pytest.approx(s * wasserstein(mu, nu, p), rel=1e-9, abs=0)


def test_a_distance_beyond_float64_is_refused():
    here, there = line([1.5e308]), line([-1.5e308])
    with pytest.raises(ls.UserError, match="beyond the largest float64"):
        wasserstein(here, there)


def test_what_has_no_distance_is_refused():
    with pytest.raises(ls.UserError, match="at least 1"):
        wasserstein(line([0.0]), line([1.0]), 0.5)
    with pytest.raises(ls.UserError, match="different sizes, 1 and 2"):
        wasserstein(line([0.0]), DiscreteMeasure.uniform(torch.zeros(1, 2)))
    with pytest.raises(ls.UserError, match="conditional_distance"):
        wasserstein(line([0.0], positions=[0.5]), line([1.0], positions=[0.5]))
