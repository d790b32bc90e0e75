"""Figures hold the numbers of the study, and tokens are never read as mathematics."""

import math
import warnings

import pytest

from lipscope._types import UserError
from tests.report.made import HARMLESS, HOSTILE, failed, grid, study

matplotlib = pytest.importorskip("matplotlib", reason="figures need matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture
def ax():
    figure, axes = plt.subplots(figsize=(10, 5))
    yield axes
    plt.close(figure)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return study(tmp_path_factory.mktemp("plain") / "s", grid())


def test_heatmap(plain, ax):
    assert plain.plot_heatmap(ax, n=16) is ax
    assert len(ax.patches) == 6
    # n = 16: layer 1 is 8 times 1.05, its head 1 half of that.
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["4.20", "2.10", "4.20", "8.40", "4.20", "8.40"]
    with pytest.raises(UserError, match="n = 5"):
        plain.plot_heatmap(ax, n=5)


def test_growth(plain, ax):
    assert plain.plot_growth(ax) is ax
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["layer 0, α = 0.50 [0.38, 0.62]", "layer 1, α = 0.50 [0.38, 0.62]"]
    points = [line for line in ax.lines if line.get_gid() == "points-0"]
    assert [list(line.get_xdata()) for line in points] == [[8, 16, 32]] * 2
    assert points[1].get_ydata()[2] == pytest.approx(2 * math.sqrt(32) * 1.05)
    with pytest.raises(UserError, match="scope block"):
        plain.plot_growth(ax, scope="block")


def test_several_studies_on_one_axis_have_names_and_colours(tmp_path, plain, ax):
    other = study(tmp_path / "s", grid(layers=1), random_init=3)
    plain.plot_growth(ax)
    other.plot_growth(ax)
    labels = [text.get_text().split(", α")[0] for text in ax.get_legend().get_texts()]
    assert labels == [
        "pretrained: layer 0",
        "pretrained: layer 1",
        "random weights (seed 3): layer 0",
    ]
    points = [line for line in ax.lines if line.get_gid() == "points-0"]
    assert len({line.get_color() for line in points}) == 2
    assert len({(line.get_color(), line.get_marker()) for line in points}) == 3
    guides = [line for line in ax.lines if str(line.get_gid()).startswith("guide")]
    assert len(guides) == 2, "guides are drawn once"


def test_tokens(plain, ax):
    assert plain.plot_tokens(ax, layer=0) is ax
    found = plain.tokens(0)
    heights = [bar.get_height() for bar in ax.patches]
    assert heights[: len(found)] == pytest.approx([math.sqrt(t.right) for t in found])
    assert heights[len(found) :] == pytest.approx([-math.sqrt(t.left) for t in found])
    assert {text.get_text() for text in ax.texts} <= set(HARMLESS)


@pytest.mark.parametrize("n", [8, 256])
def test_names_of_tokens_do_not_overlap(tmp_path, ax, n):
    words = ("antidisestablish", "…ment", "a", "the", "exception")
    study(tmp_path / "s", grid(lengths=(n,), layers=1), words).plot_tokens(ax)
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    frame = ax.figure.bbox
    assert len(boxes) >= 10
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(box.y0 >= 0 and box.y1 <= frame.height for box in boxes)


def test_hostile_tokens_are_drawn_as_text(tmp_path, ax):
    words = (*HOSTILE, "$\\frac{1}{0$", "$x$")
    made = study(tmp_path / "s", grid(lengths=(10,)), words, model="$\\bad{")
    made.plot_tokens(ax)
    made.plot_heatmap(plt.figure().subplots())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a font without some character
        for i in plt.get_fignums():
            plt.figure(i).savefig(tmp_path / f"{i}.pdf")
    assert (tmp_path / f"{ax.figure.number}.pdf").read_bytes().startswith(b"%PDF")


def test_nothing_to_draw(tmp_path, ax):
    empty = study(tmp_path / "s", [failed()])
    for draw in (empty.plot_heatmap, empty.plot_growth, empty.plot_tokens):
        with pytest.raises(UserError, match="no values to draw"):
            draw(ax)
