"""Measures: invalid ones are refused; splitting and merging atoms change nothing."""

import pytest
import torch

import lipscope as ls
from lipscope.mean_field.measures import DiscreteMeasure
from tests.mean_field.weighted import line

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


def test_float32_becomes_float64_with_weights_that_sum_to_one():
    w = torch.rand(7, generator=torch.Generator().manual_seed(1))
    mu = DiscreteMeasure(torch.randn(7, 2), w / w.sum(), torch.linspace(0, 1, 7)).double()
    assert mu.points.dtype == mu.weights.dtype == mu.positions.dtype == torch.float64


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
