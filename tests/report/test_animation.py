"""The animation: titles that distinguish short times, plain numbers on the axes, whole labels."""

from dataclasses import replace

import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image

import lipscope as ls
from lipscope.report.animation import animate

WIDE = torch.tensor([1e-3, 1e-4], dtype=torch.float64)
"""Wider than high, so that the axes fill the width of the picture."""


@pytest.mark.parametrize("at", [1.0, 1e5])
def test_titles_numbers_and_labels(at, tmp_path, monkeypatch):
    """Tokens around `at`, which an axis would like to write as an offset."""
    simulation = ls.simulate("clusters", n=3, time=1e-3)
    flow = simulation.flow
    few = replace(flow, times=flow.times[[0, -1]], positions=at + flow.positions[[0, -1]] * WIDE)
    plain = replace(simulation.preset, renormalise=False)
    drawn, set_title = [], Axes.set_title
    monkeypatch.setattr(
        Axes,
        "set_title",
        lambda ax, text, **how: drawn.append((ax, text)) or set_title(ax, text, **how),
    )
    animate(replace(simulation, flow=few, preset=plain), tmp_path / "two.gif")
    with Image.open(tmp_path / "two.gif") as image:
        assert image.n_frames == 2
    assert [text for _, text in drawn] == ["clusters, t = 0", "clusters, t = 0.001"]
    ax = drawn[-1][0]
    assert not ax.xaxis.get_offset_text().get_text() and not ax.yaxis.get_offset_text().get_text()
    assert ax.yaxis.label.get_window_extent().x0 >= 0
