"""Wasserstein distances against enumeration, against each other, and at close points."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Generator

import lipscope as ls
from lipscope.mean_field.measures import DiscreteMeasure, push
from lipscope.mean_field.transport import conditional_distance, distances, wasserstein
from lipscope.mean_field.upper_bounds import d_p_bound
from tests.mean_field.weighted import line, norm, one_head, randn, random_weights

EXPONENTS = [1, 1.5, 2, 4, math.inf]
CONDITIONAL = [1, 1.1, 2, 4, math.inf]
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


def lengths_norm(w, lengths, p):
    return lengths.max().item() if math.isinf(p) else ((w * lengths**p).sum() ** (1 / p)).item()


@pytest.mark.parametrize("p", CONDITIONAL)
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


@pytest.mark.parametrize("p", CONDITIONAL)
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
