"""Figures of measures show the numbers that `mean_field` computes."""

import math

import pytest
import torch

import lipscope as ls
from examples import mean_field
from lipscope.linalg.spectral import spectral_norm
from lipscope.mean_field.duplication import splitting_map
from lipscope.mean_field.measures import DiscreteMeasure, derivative
from lipscope.mean_field.upper_bounds import averaging, d_p_bound, w2_bound, w2_bound_geshkovski2023
from lipscope.report import figures
from tests.mean_field.weighted import one_head

matplotlib = pytest.importorskip("matplotlib", reason="figures need matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture
def ax(tmp_path):
    figure, axes = plt.subplots()
    yield axes
    assert axes.get_xlabel() and axes.get_ylabel()
    figure.savefig(tmp_path / "figure.png")  # what cannot be drawn fails here
    plt.close(figure)


def lines(ax):
    """The curves by the beginning of their names."""
    return {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}


def curve(ax, name):
    (line,) = (line for label, line in lines(ax).items() if label.startswith(name))
    return [float(y) for y in line.get_ydata()]


def test_transitions(ax):
    f = one_head(-1.0)
    found = {R: ls.mean_field.transition(f, R, 1e30, per_decade=1) for R in (1.0, 3.0, 12.0)}
    assert figures.draw_transitions(list(found.values()), ax) is ax
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert curve(ax, "R = 3") == found[3.0].sigma.tolist()
    marks = [line for line in ax.lines if len(line.get_xdata()) == 1]
    # At R = 12 the plateau lies beyond 10^30 tokens: nothing to mark.
    assert [(m.get_xdata()[0], m.get_ydata()[0]) for m in marks] == [
        (pytest.approx(math.exp(2 * R * R)), found[R].plateau) for R in (1.0, 3.0)
    ]


def test_results_draw_themselves(ax):
    found = ls.mean_field.transition(one_head(-1.0), 1.5, 1e6, per_decade=1)
    assert found.plot(ax) is ax and curve(ax, "R = 1.5") == found.sigma.tolist()
    f = one_head(-1.0, causal=True)
    found = splitting_map(f, torch.tensor([-4.0, 0.0, 4.0], dtype=torch.float64))
    drawn = found.plot()
    (image,) = drawn.collections
    shown = image.get_array().reshape(3, 3)  # rows of the picture are token 2
    assert shown[1, 2] == found.gain[2, 1].item() > 1.1 and shown[2, 1] == 1.0
    assert len(drawn.figure.axes) == 2 and "gain" in drawn.figure.axes[1].get_ylabel()


def test_two_diracs(ax):
    f, radii = one_head(-1.0), [0.5, 2.0, 4.0]
    assert mean_field.draw_two_diracs(f, radii, ax) is ax
    below, sigma = curve(ax, "proved from below"), curve(ax, "‖D_μF‖")
    assert sigma == [
        pytest.approx(
            spectral_norm(derivative(f, ls.mean_field.two_diracs(f, R).measure), 1e-9).value
        )
        for R in radii
    ]
    assert curve(ax, "sharper") == [w2_bound(f, R) for R in radii]
    assert curve(ax, "published") == [w2_bound_geshkovski2023(f, R) for R in radii]
    assert all(low <= s for low, s in zip(below, sigma, strict=True))


def test_averaging(ax):
    assert mean_field.draw_averaging((1, 2, math.inf), (1, 10, 100), ax) is ax
    assert curve(ax, "p = 2, limit 2") == [averaging(n, 2).constant for n in (1, 10, 100)]
    assert curve(ax, "p = 1, limit ∞")[1] == pytest.approx(sum(1 / k for k in range(1, 11)))
    assert curve(ax, "p = ∞, limit 1") == [1.0] * 3 and curve(ax, "bound without mask") == [
        1.0,
        1.0,
    ]


def test_masked_bounds(ax):
    f, X, radii = (
        one_head(-1.0, causal=True),
        torch.tensor([[1.0], [-1.0]] * 20, dtype=torch.float64),
        [0.1, 0.9],
    )
    assert mean_field.draw_masked_bounds(f, radii, X, ax) is ax
    truth = [
        spectral_norm(derivative(f, DiscreteMeasure.uniform(R * X, causal=True))).value
        for R in radii
    ]
    assert curve(ax, "‖D_μF‖ of 40") == pytest.approx(truth, rel=1e-5)
    assert curve(ax, "corrected, exponent") == [d_p_bound(f, R, 2) for R in radii]
    assert curve(ax, "corrected: ") == [
        pytest.approx(a + 2 * (1 + 2 * a) * math.exp(2 * a)) for a in (0.01, 0.81)
    ]
    assert curve(ax, "bound without") == [
        pytest.approx((1 + 3 * a) * math.exp(2 * a)) for a in (0.01, 0.81)
    ]
    assert truth[0] > curve(ax, "bound without")[0]
