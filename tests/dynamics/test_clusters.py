"""Clusters: planted ones, those of flows with V = I, and the polytope whose vertices they are."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial import ConvexHull

import lipscope as ls
from lipscope.dynamics.clusters import components, hull_margins
from lipscope.dynamics.integration import Ending
from lipscope.dynamics.particles import Flow
from tests.dynamics.problems import draw, identity

SQUARE = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)


def planted(at: torch.Tensor, weights: torch.Tensor | None = None) -> Flow:
    """Twelve tokens that walk straight to their places `at` [12, 2], and reach them at t = 1."""
    start = 2 * draw(len(at), 2)
    times = torch.linspace(0, 2, 21, dtype=torch.float64)
    way = times.clamp_max(1)[:, None, None]
    f = replace(identity(), V=torch.zeros(2, 2, dtype=torch.float64))
    return Flow(f, times, (1 - way) * start + way * at, weights, Ending.FINISHED, 20, 20)


def test_planted_clusters_are_found_with_their_time():
    where = torch.tensor([0, 1, 2, 3, 0, 0, 1, 1, 1, 2, 0, 0])
    found = ls.dynamics.find_clusters(planted(SQUARE[where]), tol=1e-3)
    assert len(found) == 4 and found.clear and found.extreme.all()
    assert torch.allclose(found.centres[found.labels], SQUARE[where])
    assert torch.allclose(
        found.masses * 12, torch.tensor([5.0, 4.0, 2.0, 1.0], dtype=torch.float64)
    )
    assert (
        0.95 <= found.time <= 1.0 and found.formed[-1] == 0
    )  # one token is a cluster from the start
    assert found.counts[0] == 12 and found.counts[-1] == 4


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_clusters_do_not_depend_on_the_unit_of_length(size):
    flow = planted(SQUARE[torch.arange(12) % 4])
    one, other = (
        ls.dynamics.find_clusters(flow),
        ls.dynamics.find_clusters(replace(flow, positions=size * flow.positions)),
    )
    assert (
        torch.equal(one.labels, other.labels)
        and torch.equal(one.counts, other.counts)
        and other.clear
    )
    assert torch.allclose(
        other.centres / size, one.centres
    ) and other.width / size == pytest.approx(one.width)


def test_a_flow_that_did_not_move_shows_no_clusters():
    found = ls.dynamics.find_clusters(ls.dynamics.flow(identity(), 1e200 * draw(6, 2), 3.0))
    assert not found.clear and len(found) == 6 and math.isfinite(found.width)
    assert "has not moved" in found.summary and "ended early, at t = 0" in found.summary


def test_groups_are_counted_in_words_that_are_true():
    apart = ls.dynamics.find_clusters(planted(2 * SQUARE[:2]))
    assert apart.summary == "no clear clusters: each of 2 tokens is a group of its own"
    assert apart.title == "no clear clusters: 2 groups"
    one = ls.dynamics.find_clusters(planted(SQUARE[:1]))
    assert (
        one.summary == "1 cluster of 1 token, formed by t = 0"
        and one.title == "1 cluster at the end"
    )


def test_learned_weights_may_require_gradients():
    flow = planted(SQUARE[torch.arange(12) % 4])
    learned = replace(flow, f=replace(flow.f, V=flow.f.V.clone().requires_grad_()))
    assert torch.equal(
        ls.dynamics.find_clusters(learned).centres, ls.dynamics.find_clusters(flow).centres
    )


def test_weights_are_masses():
    weights = torch.arange(1, 13, dtype=torch.float64) / 78
    found = ls.dynamics.find_clusters(planted(SQUARE[torch.arange(12) % 4], weights))
    assert torch.allclose(
        found.masses * 78, torch.tensor([24.0, 21.0, 18.0, 15.0], dtype=torch.float64)
    )


def test_width_is_relative_to_the_distance_from_the_mean_of_the_masses():
    """Three tokens at 0, 1 and 5 with masses 0.7, 0.2 and 0.1: the mean is 0.7, not 2."""
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 0.0]], dtype=torch.float64)
    weights = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    path = replace(planted(x, weights), positions=torch.stack([x] * 21))
    found = ls.dynamics.find_clusters(path, tol=0.25, renormalised=False)
    assert found.width == pytest.approx(0.25 * 4.3, rel=1e-12)
    # Links of 1.075 join the first two, whose centre is that of their masses.
    assert found.masses.tolist() == pytest.approx([0.9, 0.1])
    assert found.centres[:, 0].tolist() == pytest.approx([2 / 9, 5.0])
    assert found.radii.tolist() == pytest.approx([7 / 9, 0.0])


def test_an_interior_limit_point_is_no_vertex():
    where = torch.arange(12) % 4
    at = SQUARE[where]
    at[5] = torch.tensor([0.3, -0.2])
    found = ls.dynamics.find_clusters(planted(at))
    assert len(found) == 5 and found.extreme.sum() == 4
    assert not found.extreme[found.labels[5]] and "4 of 5 are vertices" in found.summary


def test_a_late_departure_is_not_formed():
    flow = planted(SQUARE[torch.arange(12) % 4])
    positions = flow.positions.clone()
    positions[15, 0] += 1.0  # a member leaves at t = 1.5 and comes back
    found = ls.dynamics.find_clusters(replace(flow, positions=positions))
    assert found.formed[found.labels[0]] == flow.times[16] and found.formed.min() < 1.01


@pytest.mark.parametrize("seed", range(5))
def test_components_are_single_linkage(seed):
    points = draw(150, 2, seed=seed)
    width = 0.2
    exact = fcluster(linkage(points.numpy(), "single"), width, "distance")
    ours = components(points, width).numpy()
    # Points of one cell count as one: the partition lies between those of nearby widths.
    coarse = fcluster(linkage(points.numpy(), "single"), 1.5 * width, "distance")
    fine = fcluster(linkage(points.numpy(), "single"), 0.5 * width, "distance")
    for finer, coarser in ((fine, ours), (ours, coarse)):
        assert len({(a, b) for a, b in zip(finer, coarser, strict=True)}) == len(set(finer))
    assert abs(len(set(ours)) - len(set(exact))) <= 0.2 * len(set(exact))


@pytest.mark.parametrize("d", [2, 3, 4])
def test_vertices_are_those_of_the_convex_hull(d):
    points = draw(40, d, seed=d)
    expected = np.zeros(40, dtype=bool)
    expected[ConvexHull(points.numpy()).vertices] = True
    assert np.array_equal((hull_margins(points) > 1e-9).numpy(), expected)


def test_a_margin_is_a_distance():
    margins = hull_margins(
        torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [5.0, 5.0]], dtype=torch.float64)
    )
    assert margins[3].item() == pytest.approx(9) and margins[0].item() == pytest.approx(1)
    assert hull_margins(torch.zeros(1, 2, dtype=torch.float64)).item() == math.inf
    assert hull_margins(
        torch.tensor([[-1.0], [0.0], [3.0]], dtype=torch.float64)
    ).tolist() == pytest.approx([1, 0, 3])


@pytest.mark.parametrize("seed", range(4))
def test_identity_values_gather_at_vertices(seed):
    """V = A = I: vertices of their hull, at rest under hard attention, |c|^2 = max_j <c, c_j>."""
    X = 2 * draw(40, 2, seed=seed)
    found = ls.dynamics.find_clusters(
        ls.dynamics.flow(identity(), X, 9.0, tol=1e-5, renormalise=True)
    )
    assert 2 <= len(found) <= 12 and found.clear and found.extreme.all()
    inner = found.centres @ found.centres.T
    assert (inner.amax(1) - inner.diagonal()).max() < 1e-6 * inner.max()
    hull = ConvexHull(X.numpy())
    assert (hull.equations[:, :2] @ found.centres.numpy().T + hull.equations[:, 2:]).max() < 1e-6


@pytest.mark.parametrize("tol", [0.0, 1.0, math.nan])
def test_refusals(tol):
    with pytest.raises(ls.UserError, match="tol"):
        ls.dynamics.find_clusters(planted(SQUARE[torch.arange(12) % 4]), tol)
