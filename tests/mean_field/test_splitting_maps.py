"""The map of two tokens on the line, and the search for measures that split."""

import math

import pytest
import torch

import lipscope as ls
from lipscope.mean_field.duplication import splitting
from lipscope.mean_field.splitting_maps import MAPS, gains, largest_gain, splitting_map
from tests.mean_field.weighted import line, one_head


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


@pytest.mark.parametrize(
    ("name", "least"), [("A = -I", 1.5), ("masked, A = -I", 1.8), ("A = I", 1.0), ("L2", 1.0)]
)
def test_the_search_finds_measures_in_the_plane_and_reports_their_true_gain(name, least):
    f = MAPS[name]()
    gain, mu = largest_gain(f, 3, 6.0, equal=False, tries=200, seed=0)
    assert mu.points.shape == (3, 2) and mu.radius <= 6.0 * (1 + 1e-12)
    assert gain >= least and gain == pytest.approx(splitting(f, mu).gain, rel=1e-9)
    assert name != "L2" or gain == 1.0


def test_equal_weights_stay_equal():
    gain, mu = largest_gain(MAPS["A = -I"](), 2, 6.0, tries=200, seed=1)
    assert gain > 1.2 and mu.weights.tolist() == [0.5, 0.5]


def test_a_map_without_values_does_not_split():
    mu = line([0.0, 4.0])
    assert gains(one_head(-1.0, 0.0), mu.points[None], mu.weights[None]).tolist() == [0.0]


def test_the_map_under_a_mask_knows_who_comes_first():
    at = torch.tensor([0.0, 4.0])  # float32 positions are taken in the dtype of f
    gain = splitting_map(one_head(-1.0, causal=True), at).gain
    assert gain[1, 0] > 1.1 and gain[0, 1] == 1.0
    for x, y, found in ((4.0, 0.0, gain[1, 0]), (0.0, 4.0, gain[0, 1])):
        truth = splitting(
            one_head(-1.0, causal=True), torch.tensor([[x], [y]], dtype=torch.float64)
        ).gain
        assert found.item() == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "R", "tries"), [(0, 1.0, 10), (2, -1.0, 10), (2, math.nan, 10), (2, 1.0, 0)]
)
def test_a_search_without_room_is_refused(n, R, tries):
    with pytest.raises(ls.UserError, match="the search needs"):
        largest_gain(one_head(-1.0), n, R, tries=tries)


def test_only_the_line_has_a_map():
    with pytest.raises(ls.UserError, match="tokens of size 1"):
        splitting_map(MAPS["A = I"](), torch.zeros(3, dtype=torch.float64))
