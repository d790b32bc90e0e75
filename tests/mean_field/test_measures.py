"""Measures, and attention on them against tokens, plain sums, and finite differences in W2."""

from dataclasses import replace

import pytest
import torch
from torch import Generator

import lipscope as ls
from lipscope.linalg.spectral import spectral_norm
from lipscope.mean_field import duplication, transport, upper_bounds
from lipscope.mean_field.measures import (
    DiscreteMeasure,
    derivative,
    push,
    query_derivative,
    stacked,
)
from lipscope.mean_field.transport import wasserstein
from tests.cases import problem
from tests.checks import assert_matches_dense
from tests.dynamics.problems import types_unchecked
from tests.mean_field.weighted import (
    dense_derivative,
    dense_query_norms,
    line,
    naive_push,
    one_head,
    plain_tokens,
    randn,
    random_case,
    random_weights,
    velocity,
)

X = torch.zeros(2, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("points", "weights", "says"),
    [
        (X, [1.5, -0.5], "positive, but weight 1 is -0.5"),
        (X, [1.0, 0.0], "leave out atoms without mass"),
        (X, [0.5, 0.4], r"sum to 0.9; pass weights / weights.sum\(\)"),
        (X, [0.5, float("nan")], "weights holds nan at index"),
        (X, [1.0], r"one per point, got \(1,\)"),
        (X[:0], [], "empty"),
        (X[:, :0], [0.5, 0.5], "empty"),
        (X[:, 0], [0.5, 0.5], "one row per atom"),
        (X + torch.inf, [0.5, 0.5], "points holds inf"),
        (X.float(), [0.5, 0.5], "one dtype"),
        (X.long(), [0.5, 0.5], "floating-point"),
    ],
)
def test_invalid_measures_are_refused(points, weights, says):
    with pytest.raises(ls.UserError, match=says):
        DiscreteMeasure(points, torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        ([0.0, 1.5], r"lie in \[0, 1\]"),
        ([-0.1, 1.0], "from -0.1"),
        ([0.5], "one per point"),
        ([0, float("nan")], "nan"),
    ],
)
def test_positions_outside_the_unit_interval_are_refused(positions, says):
    with pytest.raises(ls.UserError, match=says):
        line([0.0, 1.0], positions=positions)


def test_a_field_that_does_not_fit_is_refused():
    mu = line([0.0, 4.0])
    assert mu.moved(torch.ones(1, 1, dtype=torch.float64)).points[:, 0].tolist() == [1.0, 5.0]
    for shape in ((3, 1), (2, 2), (2,), (1, 2)):
        with pytest.raises(ls.UserError, match=r"shape \(2, 1\) of the points"):
            mu.moved(torch.zeros(shape, dtype=torch.float64))


def test_weights_of_any_size_are_accepted_down_to_rounding():
    w = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    DiscreteMeasure(torch.zeros(1000, 1, dtype=torch.float64), w / w.sum())
    DiscreteMeasure(X, torch.tensor([1e-300, 1.0], dtype=torch.float64))
    with pytest.raises(ls.UserError, match="sum"):
        DiscreteMeasure(X, torch.tensor([0.5, 0.5 + 1e-9], dtype=torch.float64))


def test_merging_undoes_splitting_in_order_of_first_appearance():
    mu = line([3.0, -1.0, 0.0], [0.2, 0.3, 0.5])
    back = mu.split(4).merged()
    assert torch.equal(back.points, mu.points) and torch.allclose(
        back.weights, mu.weights, atol=1e-16
    )
    assert mu.merged() is mu and len(mu.split(4)) == 12
    assert mu.split(4).index_of(torch.tensor([-1.0])) == 4
    with pytest.raises(ls.UserError, match="at least 1"):
        mu.split(0)


def test_atoms_at_different_positions_are_not_merged():
    mu = line([1.0, 1.0, 1.0, -0.0, 0.0], [0.2] * 5, [0.5, 1.0, 0.5, 0.5, 0.5])
    merged = mu.merged()
    assert merged.points[:, 0].tolist() == [1.0, 1.0, 0.0] and merged.positions.tolist() == [
        0.5,
        1.0,
        0.5,
    ]
    assert merged.weights.tolist() == pytest.approx([0.4, 0.2, 0.4])
    assert mu.index_of(torch.tensor([1.0]), torch.tensor(1.0)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_causal_positions_of_coarse_tokens_do_not_tie(dtype):
    X = torch.randn(600, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    mu = DiscreteMeasure.uniform(X, causal=True)
    assert (mu.positions.diff() > 0).all() and len(mu.split(2).merged()) == 600
    f = ls.SelfAttention(*torch.eye(2, dtype=dtype).expand(3, 2, 2), causal=True)
    assert torch.equal(ls.mean_field.push(f, mu).points, f(X))


def test_uniform_gives_equal_weights_and_causal_positions():
    mu = DiscreteMeasure.uniform(torch.zeros(4, 1), causal=True)
    assert mu.weights.tolist() == [0.25] * 4 and mu.positions.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert DiscreteMeasure.uniform(torch.tensor([[3.0, 4.0]])).radius == 5.0


LIFTABLE = ["gaussian", "multi-head, projected", "grouped keys", "biases", "softcap", "L2"]
CAUSAL = ["causal", "one key head", "L2, causal"]


@pytest.mark.parametrize("kind", LIFTABLE)
@pytest.mark.parametrize("seed", range(3))
def test_equal_weights_recover_self_attention(kind, seed):
    f, X = problem(kind, seed)
    truth = plain_tokens(f, X)
    mu = DiscreteMeasure.uniform(X)
    size = truth.abs().max()
    assert (push(f, mu).points - truth).abs().max() <= 1e-12 * size
    assert torch.equal(push(f, mu).points, f(X))
    # Token 0 in two unequal parts: the same measure, with weights that matter.
    parts = torch.cat([mu.weights[:1] * 0.3, mu.weights[:1] * 0.7, mu.weights[1:]])
    uneven = push(f, DiscreteMeasure(torch.cat([X[:1], X]), parts))
    assert (uneven.points[1:] - truth).abs().max() <= 1e-12 * size
    assert (uneven.points[0] - truth[0]).abs().max() <= 1e-12 * size


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("seed", range(3))
def test_positions_recover_causal_attention(kind, seed):
    f, X = problem(kind, seed)
    truth = plain_tokens(f, X)
    mu = DiscreteMeasure.uniform(X, causal=True)
    size = truth.abs().max()
    assert (push(f, mu).points - truth).abs().max() <= 1e-12 * size
    # Atoms listed in any order: positions alone say who sees whom.
    order = torch.randperm(len(X), generator=Generator().manual_seed(seed))
    shuffled = push(f, DiscreteMeasure(X[order], mu.weights[order], mu.positions[order]))
    assert (shuffled.points - truth[order]).abs().max() <= 1e-12 * size
    together = push(
        f, DiscreteMeasure(X, mu.weights, torch.full_like(mu.weights, 0.5))
    )  # one position: no mask
    assert (together.points - plain_tokens(replace(f, causal=False), X)).abs().max() <= 1e-12 * size


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_push_and_derivatives_match_plain_sums(seed, masked):
    f, mu = random_case(seed, n_max=6)
    if masked:
        s = torch.randint(0, 3, (len(mu),), generator=Generator().manual_seed(seed)).double() / 2
        f, mu = replace(f, causal=True), replace(mu, positions=s)
    assert torch.allclose(push(f, mu).points, naive_push(f, mu), atol=1e-12)
    assert_matches_dense(derivative(f, mu), dense_derivative(f, mu), tol=1e-12)
    J, truth = query_derivative(f, mu), dense_query_norms(f, mu)
    # In saturated attention C_i nearly cancels: rounding is relative to the spread of all atoms.
    size = (
        torch.linalg.matrix_norm(f.V, 2)
        * torch.linalg.matrix_norm(f.K.T @ f.Q, 2)
        * (1 + mu.radius) ** 2
    )
    assert (torch.linalg.matrix_norm(J.to_dense(), 2) - truth).abs().max() <= 1e-13 * size
    assert (J.to_dense() - J.T.to_dense().mT).abs().max() <= 1e-13 * size


@pytest.mark.parametrize("kind", LIFTABLE)
def test_the_query_derivative_is_that_of_the_velocity(kind):
    f, X = problem(kind, 1)
    mu = DiscreteMeasure(X, random_weights(Generator().manual_seed(0), len(X)))
    gamma = velocity(f, mu)
    assert torch.allclose(gamma(X), push(f, mu).points, rtol=1e-12, atol=1e-12)
    J = query_derivative(f, mu).to_dense()
    for i, x in enumerate(X):
        truth = torch.autograd.functional.jacobian(lambda z: gamma(z[None])[0], x)
        assert (J[i] - truth).abs().max() <= 1e-12 * max(1.0, J.abs().max())


def test_a_stack_of_measures_is_each_of_them():
    g = Generator().manual_seed(2)
    f = one_head(randn(g, 2, 2), randn(g, 2, 2))
    X, w = randn(g, 5, 3, 2), torch.stack([random_weights(g, 3) for _ in range(5)])
    whole, blocks = (J.to_dense() for J in stacked(f, X, w))
    for b in range(5):
        mu = DiscreteMeasure(X[b], w[b])
        assert torch.allclose(whole[b], derivative(f, mu).to_dense(), atol=1e-12)
        assert torch.allclose(
            blocks[3 * b : 3 * b + 3], query_derivative(f, mu).to_dense(), atol=1e-12
        )
    few = stacked(f, X, w)[0].take(torch.tensor([1, 3])).to_dense()
    assert torch.allclose(few, whole[[1, 3]], atol=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_the_local_constant_is_what_w2_finite_differences_show(seed):
    f, mu = random_case(seed, n_max=6)
    e = spectral_norm(derivative(f, mu), 1e-9)
    t = 1e-6 / (1 + e.value)
    moved = mu.moved(t * e.right / mu.roots)
    ratio = wasserstein(push(f, moved), push(f, mu)) / wasserstein(moved, mu)
    assert ratio == pytest.approx(e.value, rel=1e-4)


def test_tiny_weights_keep_their_accuracy():
    """Two atoms on the line with weights p and 1 - p, against a closed form in 60 digits."""
    import mpmath as mp

    f, p = one_head(-1.0), 1e-30
    with mp.workdps(60):
        x, w = [mp.mpf(3), mp.mpf(-3)], [mp.mpf(p), 1 - mp.mpf(p)]
        J = mp.matrix(2)
        for i in range(2):
            E = [w[j] * mp.exp(-x[i] * x[j]) for j in range(2)]
            P = [e / sum(E) for e in E]
            m = P[0] * x[0] + P[1] * x[1]
            for j in range(2):
                J[i, j] = P[j] * (1 + (x[j] - m) * (-x[i])) * mp.sqrt(w[i] / w[j])
            J[i, i] += -sum(P[j] * (x[j] - m) ** 2 for j in range(2))
        truth = float(mp.svd_r(J, compute_uv=False)[0])
    e = spectral_norm(derivative(f, line([3.0, -3.0], [p, 1 - p])), 1e-9)
    assert e.value == pytest.approx(truth, rel=1e-12) and e.lower <= truth <= e.upper


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, "f has mask"),
        ({"padding": torch.ones(2, dtype=torch.bool)}, "f has padding"),
        ({"window": 2}, "f has window"),
        ({"kernel": ls.Dot(sinks=torch.zeros(1))}, "f has sinks"),
        ({"kernel": ls.Dot(rope=ls.Rope.standard(2, 2))}, "f has rotary positions"),
        ({"causal": True}, "f is causal and the measure has no positions"),
    ],
)
def test_maps_that_know_tokens_by_number_are_refused(options, says):
    f = replace(
        one_head(torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)), **options
    )
    mu = DiscreteMeasure.uniform(torch.eye(2, dtype=torch.float64))
    with pytest.raises(ls.UserError, match=says):
        push(f, mu)


def test_a_mismatch_is_explained():
    f, mu = one_head(1.0), line([0.0, 1.0], positions=[0.0, 1.0])
    with pytest.raises(ls.UserError, match="make f causal"):
        push(f, mu)
    with pytest.raises(ls.UserError, match="points have size 3"):
        push(f, DiscreteMeasure.uniform(torch.zeros(2, 3, dtype=torch.float64)))


ONE = torch.ones(1, 1)
LAYER = ls.SelfAttention(ONE, ONE, ONE)
UNIFORM = DiscreteMeasure.uniform(ONE)
NO_MEASURE = "expected a DiscreteMeasure, got Tensor; DiscreteMeasure.uniform"
NO_LAYER = "must be a SelfAttention.* got Linear"
NO_EXPONENT = "p must be a number, at least 1"
WRONG = [
    (lambda: push(LAYER, ONE), NO_MEASURE),
    (lambda: derivative(LAYER, ONE), NO_MEASURE),
    (lambda: wasserstein(UNIFORM, ONE), NO_MEASURE),
    (lambda: transport.conditional_distance(ONE, UNIFORM), NO_MEASURE),
    (lambda: duplication.jump_ratio(LAYER, ONE, 0, 2 * ONE, 0.5), NO_MEASURE),
    (lambda: push(torch.nn.Linear(1, 1), UNIFORM), NO_LAYER),
    (lambda: ls.local_lipschitz(torch.nn.Linear(1, 1), UNIFORM), NO_LAYER),
    (lambda: upper_bounds.w2_bound(torch.nn.Linear(1, 1), 1.0), NO_LAYER),
    (lambda: duplication.largest_gain(torch.nn.Linear(1, 1), 2, 1.0), NO_LAYER),
    (lambda: wasserstein(UNIFORM, UNIFORM, "2"), NO_EXPONENT),
    (lambda: wasserstein(UNIFORM, UNIFORM, True), NO_EXPONENT),
    (lambda: upper_bounds.w_p_bound(LAYER, 1.0, "2"), NO_EXPONENT),
    (lambda: upper_bounds.averaging(3, "2"), NO_EXPONENT),
    (lambda: upper_bounds.averaging(1.5), "whole number"),
    (lambda: DiscreteMeasure([[0.0]], ONE[0]), "points must be a tensor"),
    (lambda: DiscreteMeasure(ONE, [1.0]), "weights must be a tensor"),
    (lambda: UNIFORM.split(1.5), "whole number"),
    (lambda: duplication.jump_ratio(LAYER, UNIFORM, 0, [0.0], 0.5), "to must be a point"),
    (lambda: duplication.jump_ratio(LAYER, UNIFORM, 0.0, 2 * ONE, 0.5), "token must be"),
    (lambda: duplication.jump_ratio(LAYER, UNIFORM, 0, 2 * ONE, "0.5"), "mass must be"),
]


@pytest.mark.parametrize(("call", "says"), WRONG)
def test_a_wrong_type_is_explained(call, says):
    with types_unchecked(), pytest.raises(ls.UserError, match=says):
        call()
