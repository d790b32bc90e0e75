"""Mass splitting: the closed form against real copies, and what it does not cover."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator

import lipscope as ls
from lipscope.linalg.local import local_lipschitz
from lipscope.mean_field.duplication import (
    MAPS,
    jump_ratio,
    largest_gain,
    split_estimate,
    splitting,
    splitting_map,
)
from lipscope.mean_field.measures import DiscreteMeasure, derivative, push
from lipscope.mean_field.transport import wasserstein
from tests.mean_field.weighted import (
    dense_derivative,
    line,
    norm,
    one_head,
    randn,
    random_case,
    random_weights,
    velocity,
)


def test_the_example_on_the_line():
    """X = (0, 4), A = -1, V = 1: a copy of 0 sees both tokens alike and is stretched by Var = 4."""
    f, X = one_head(-1.0), torch.tensor([[0.0], [4.0]], dtype=torch.float64)
    found = splitting(f, X, solver=ls.Solver(seed=0))
    assert found.together.value == pytest.approx(3.6717, abs=5e-5) and found.value == pytest.approx(
        4.0, abs=1e-12
    )
    assert found.helps and found.certain and found.token == 0
    assert found.gain == pytest.approx(4 / 3.6717108047716653, rel=1e-12)
    assert found.direction.abs().tolist() == [1.0]
    assert norm(dense_derivative(f, DiscreteMeasure.uniform(X))) == pytest.approx(3.6717, abs=5e-5)
    assert norm(dense_derivative(f, DiscreteMeasure.uniform(X).split(2))) == pytest.approx(
        4.0, abs=1e-12
    )


@pytest.mark.wide
@pytest.mark.parametrize("block", range(4))
def test_two_copies_reach_the_closed_form_and_eight_no_more(block):
    """200 random measures, the split Jacobian written out and differentiated by autograd."""
    for seed in range(50 * block, 50 * block + 50):
        f, mu = random_case(seed)
        found = splitting(f, mu)
        for copies in (2, 8):
            assert norm(dense_derivative(f, mu.split(copies))) == pytest.approx(
                found.value, rel=1e-10
            )
        assert norm(dense_derivative(f, mu)) == pytest.approx(found.together.value, rel=1e-10)


@pytest.mark.parametrize("seed", range(20))
def test_only_the_atoms_that_are_split_count_and_unequal_parts_do_as_well(seed):
    f, mu = random_case(seed, n_max=3)
    g = Generator().manual_seed(seed)
    i = int(torch.randint(0, len(mu), (), generator=g))
    share = 0.05 + 0.9 * torch.rand((), generator=g, dtype=torch.float64)
    weights = torch.cat([mu.weights, mu.weights[i : i + 1] * share])
    weights[i] *= 1 - share
    parts = DiscreteMeasure(torch.cat([mu.points, mu.points[i : i + 1]]), weights)
    found = splitting(f, mu)
    truth = max(found.together.value, found.per_token[i].item())
    assert norm(dense_derivative(f, parts)) == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize("seed", range(15))
def test_masked_measures_split_by_the_same_formula(seed):
    f, mu = random_case(seed, n_max=5)
    f = replace(f, causal=True)
    s = torch.rand(len(mu), generator=Generator().manual_seed(seed), dtype=torch.float64)
    mu = replace(mu, positions=s)
    assert norm(dense_derivative(f, mu.split(2))) == pytest.approx(
        splitting(f, mu).value, rel=1e-10
    )


@pytest.mark.parametrize("points", [[0.0, 4.0], [0.0, 4.0, -4.0], [0.3, 5.0]])
def test_the_perturbation_it_names_is_stretched_as_it_says(points):
    f = one_head(-1.0)
    found = splitting(f, line(points))
    assert found.helps
    halves = found.halves(1e-5)
    ratio = wasserstein(push(f, halves), push(f, found.measure)) / wasserstein(
        halves, found.measure
    )
    assert ratio == pytest.approx(found.value, rel=1e-4)


def test_where_splitting_does_not_help():
    found = splitting(one_head(1.0), line([0.0, 4.0]))
    assert not found.helps and not found.certain and found.gain == 1.0
    assert found.value == found.together.value > found.apart.value
    alone = splitting(one_head(-1.0), line([3.0]))
    assert alone.gain == 1.0 and alone.value == pytest.approx(1.0)
    nothing = splitting(one_head(-1.0, 0.0), line([0.0, 4.0]))
    assert nothing.value == 0.0 and nothing.gain == 1.0 and not nothing.helps


def test_tokens_that_coincide_are_one_atom():
    f, X = one_head(-1.0), torch.tensor([[4.0], [4.0], [0.0], [0.0]], dtype=torch.float64)
    found = splitting(f, X)
    assert len(found.measure) == 2 and found.token == 2
    assert found.together.value == pytest.approx(3.6717, abs=5e-5)
    assert local_lipschitz(f, X).value == pytest.approx(
        4.0
    )  # four tokens: the copies are there already


@pytest.mark.parametrize("seed", range(20))
def test_squared_distances_of_tied_weights_never_split(seed):
    """J_ii = V (2s C_i + P_ii I): the part a copy loses only adds to the diagonal block."""
    g = Generator().manual_seed(seed)
    n, d = int(torch.randint(2, 6, (), generator=g)), int(torch.randint(1, 4, (), generator=g))
    turn = torch.linalg.qr(randn(g, d, d))[0]
    size = 10 ** (2 * torch.rand((), generator=g, dtype=torch.float64) - 1)
    f = ls.SelfAttention(
        size * turn, size * turn, randn(g, d, d), kernel=ls.L2(), causal=bool(seed % 2)
    )
    s = torch.rand(n, generator=g, dtype=torch.float64) if seed % 2 else None
    found = splitting(f, DiscreteMeasure(3 * randn(g, n, d), random_weights(g, n), s))
    assert found.apart.value <= found.together.value and found.gain == 1.0


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_estimate_with_splitting_has_fields_on_two_copies(seed):
    f, mu = random_case(seed) if seed else (one_head(-1.0), line([0.0, 4.0]))
    e = split_estimate(splitting(f, mu, solver=ls.Solver(seed=0)))
    assert e.lower <= e.value <= e.upper
    J = derivative(f, mu.split(2))
    assert e.right.shape == J.in_shape and e.right.norm().item() == pytest.approx(1.0)
    assert torch.allclose(J.mv(e.right), e.value * e.left, atol=1e-6 * e.value)


@pytest.mark.wide
def test_the_bounds_hold_for_the_largest_block_whichever_it_is():
    """Two equal pairs far apart, whose query blocks tie; and random cases."""
    finite = 0
    for seed in range(20):
        f, mu = random_case(seed) if seed else (one_head(-1.0), line([0.0, 4.0, 100.0, 104.0]))
        e = split_estimate(splitting(f, mu, solver=ls.Solver(seed=seed)))
        truth = norm(dense_derivative(f, mu.split(2)))
        assert e.lower <= truth * (1 + 1e-13) and truth <= e.upper
        assert (e.confidence > 0) == math.isfinite(e.upper)
        finite += math.isfinite(e.upper)
    assert finite >= 15


def test_under_a_mask_a_jump_stays_at_its_position():
    """The later of two tokens sees the same as without a mask: mass is stretched equally."""
    f, w = one_head(6.0, causal=True), math.exp(-6.0)
    mu = line([-1.0, 1.0], [1 - w, w], [0.5, 1.0])
    ratio = jump_ratio(f, mu, 1, torch.tensor([0.338], dtype=torch.float64), 1e-7)
    assert ratio == pytest.approx(2.6346, abs=1e-3) and ratio > 2 * splitting(f, mu).value


def test_a_finite_jump_is_not_covered():
    """e^{-6} delta_1 + (1 - e^{-6}) delta_{-1}, A = 6: moves 1 to 0.338 grow 2.63-fold."""
    f, w = one_head(6.0), math.exp(-6.0)
    mu = line([1.0, -1.0], [w, 1 - w])
    found = splitting(f, mu)
    assert (found.together.value, found.apart.value) == pytest.approx((1.0861, 0.0591), abs=1e-4)
    to = torch.tensor([0.338], dtype=torch.float64)
    ratios = [jump_ratio(f, mu, 0, to, mass) for mass in (1e-4, 1e-5, 1e-6, 1e-7)]
    gamma = velocity(f, mu)
    secant = ((gamma(to[None]) - gamma(mu.points[:1])).norm() / (to - mu.points[0]).norm()).item()
    assert ratios[-1] == pytest.approx(secant, rel=1e-4) == pytest.approx(2.6346, abs=1e-3)
    assert min(ratios) > 2.4 * found.value
    for token, point, says in (
        (2, to, "index of an atom of the measure, 0 to 1"),
        (-1, to, "an atom"),
        (0, mu.points[0], "and not the atom itself"),
        (0, torch.zeros(2), "a point of size 1"),
    ):
        with pytest.raises(ls.UserError, match=says):
            jump_ratio(f, mu, token, point, 1e-5)
    for mass in (0.0, w, 1.0):
        with pytest.raises(ls.UserError, match="mass must be between 0"):
            jump_ratio(f, mu, 0, to, mass)


def test_the_map_is_splitting_at_every_pair():
    f, axis = one_head(-1.0), torch.linspace(-4, 4, 3, dtype=torch.float64)
    found = splitting_map(f, axis)
    assert found.gain.shape == (3, 3)
    for i in range(3):
        for j in range(3):
            truth = splitting(f, line([axis[i].item(), axis[j].item()])).gain
            assert found.gain[i, j].item() == pytest.approx(truth, rel=1e-9)
    assert found.gain[1, 2].item() == pytest.approx(4 / 3.6717108, rel=1e-7)  # X = (0, 4)
    assert torch.allclose(found.gain, found.gain.T) and torch.allclose(
        found.gain, found.gain.flip(0, 1)
    )


def test_the_sign_of_the_scores_decides_near_the_origin_only():
    axis = torch.linspace(-4, 4, 41, dtype=torch.float64)
    assert splitting_map(one_head(-1.0), axis).gain.max() > 1.4
    assert splitting_map(one_head(1.0), axis).gain.max() == 1.0
    far = torch.tensor(
        [0.2, 12.2], dtype=torch.float64
    )  # attractive scores split too, far apart and little
    assert splitting_map(one_head(1.0), far).gain[0, 1] > 1.003
    distances = ls.SelfAttention(
        *torch.eye(1, dtype=torch.float64).expand(3, 1, 1), kernel=ls.L2(scale=0.5)
    )
    assert splitting_map(distances, 5 * axis).gain.max() == 1.0


def test_attractive_scores_split_where_the_analysis_puts_it():
    """Tokens x, x + g, P_11 = a, x g = h: J_11 = Q_1 - a ((1 - a) h - 1) < Q_1 if (1 - a) h > 1."""
    a, h, g = 0.15, 3.0, 13.4
    ratio = (1 - a) / a * math.exp(-h)
    mu = line([h / g, h / g + g], [1 / (1 + ratio), ratio / (1 + ratio)])
    found = splitting(one_head(1.0), mu)
    assert found.helps and found.token == 0 and found.gain == pytest.approx(1.0050, abs=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "least", "equal"),
    [
        ("A = -I", 1.2, False),
        ("A = -I", 1.2, True),
        ("masked, A = -I", 1.2, False),
        ("A = I", 1.0, False),
        ("L2", 1.0, False),
    ],
)
def test_the_search_finds_measures_in_the_plane_and_reports_their_true_gain(name, least, equal):
    f = MAPS[name]()
    gain, mu = largest_gain(f, 3, 6.0, equal=equal, tries=100, seed=0)
    assert mu.points.shape == (3, 2) and mu.radius <= 6.0 * (1 + 1e-12)
    assert gain >= least and gain == pytest.approx(splitting(f, mu).gain, rel=1e-9)
    assert name != "L2" or gain == 1.0
    assert not equal or mu.weights.tolist() == [1 / 3] * 3


@pytest.mark.parametrize(
    ("n", "R", "tries"), [(0, 1.0, 10), (2, -1.0, 10), (2, math.nan, 10), (2, 1.0, 0)]
)
def test_a_search_without_room_is_refused(n, R, tries):
    with pytest.raises(ls.UserError, match="the search needs"):
        largest_gain(one_head(-1.0), n, R, tries=tries)
