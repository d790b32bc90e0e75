"""Figures hold the numbers of the study, and tokens are never read as mathematics."""

import warnings

import pytest

from lipscope._types import UserError
from tests.report.made import HARMLESS, HOSTILE, failed, grid, study

matplotlib = pytest.importorskip("matplotlib", reason="figures need matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return study(tmp_path_factory.mktemp("plain") / "s", grid())


def test_heatmap(plain, ax):
    assert plain.plot_heatmap(ax, n=16) is ax
    values = ax.images[0].get_array()
    assert values.shape == (2, 4)
    assert values[1, 3] == pytest.approx(2 * 4 * 1.05) and values[1, 1] == pytest.approx(4 * 1.05)
    with pytest.raises(UserError, match="n = 5"):
        plain.plot_heatmap(ax, n=5)


def test_growth(plain, ax):
    assert plain.plot_growth(ax) is ax
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"n^(1/4)", "n^(1/2)"} < set(labels)
    assert sum("α = 0.50" in label for label in labels) == 2
    with pytest.raises(UserError, match="scope block"):
        plain.plot_growth(ax, scope="block")


def test_tokens(plain, ax):
    assert plain.plot_tokens(ax, layer=0) is ax
    found = plain.tokens(0)
    assert ax.images[0].get_array().tolist() == [[t.right for t in found], [t.left for t in found]]
    assert [label.get_text() for label in ax.get_xticklabels()][:8] == list(HARMLESS)


def test_hostile_tokens_are_drawn_as_text(tmp_path, ax):
    words = (*HOSTILE, "$\\frac{1}{0$", "$x$")
    study(tmp_path / "s", grid(lengths=(10,)), words).plot_tokens(ax)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a font without some character
        ax.figure.savefig(tmp_path / "f.pdf")
    assert (tmp_path / "f.pdf").read_bytes().startswith(b"%PDF")


def test_many_tokens_name_only_the_strongest(tmp_path, ax):
    study(tmp_path / "s", grid(lengths=(100,), layers=1)).plot_tokens(ax)
    assert len(ax.get_xticks()) == 20


def test_nothing_to_draw(tmp_path, ax):
    empty = study(tmp_path / "s", [failed()])
    for draw in (empty.plot_heatmap, empty.plot_growth, empty.plot_tokens):
        with pytest.raises(UserError, match="no values to draw"):
            draw(ax)
