"""What a simulation leaves behind: pictures that can be opened, numbers that can be read."""

import csv
import json

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image

import lipscope as ls
from lipscope.dynamics.simulation import PRESETS
from lipscope.report.simulations import (
    check_simulation_folder,
    draw,
    numbers_of,
    summary,
    write_simulation,
)


@pytest.mark.wide
@pytest.mark.parametrize("name", PRESETS)
def test_everything_is_written_and_can_be_read(name, tmp_path):
    found = ls.simulate(name, n=5, time=0.25)
    figure, numbers, series = write_simulation(found, tmp_path / "new" / "out")
    with Image.open(figure) as image:
        assert image.size[0] > 800
    read = json.loads(numbers.read_text())
    settings = {"preset": name, "seed": 0, "n": 5, "dim": 2, "time": 0.25}
    assert read | settings == read
    assert read["versions"]["lipscope"] == ls.__version__ and read["status"] == found.summary
    lines = list(csv.reader(series.open()))
    assert lines[0][0] == "t" and {len(line) for line in lines} == {len(lines[0])}
    assert len(lines) > 10
    assert all(name and text for name, text in summary(found))


@pytest.mark.parametrize(
    ("name", "dim"), [("clusters", 1), ("gaussian", 1), ("masked", 3), ("gaussian", 3)]
)
def test_figures_of_other_dimensions(name, dim):
    figure = draw(ls.simulate(name, n=4, dim=dim, time=0.25))
    for ax in figure.axes:
        assert ax.get_xlabel() and ax.get_ylabel()


def test_what_has_not_gathered_is_not_called_a_limit():
    figure = draw(ls.simulate("clusters", n=6, time=0.25))
    said = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "centres of groups" in "".join(said) and "limit" not in "".join(said)
    assert figure.axes[1].get_title() == "no clear clusters: 6 groups"


def test_a_search_that_found_no_blow_up_says_how_far_it_went():
    assert (
        dict(summary(ls.simulate("gaussian", n=2, time=1e-3)))["blow-up"] == "none before t = 0.1"
    )


def test_a_run_cut_short_leaves_no_broken_or_older_picture(tmp_path, monkeypatch):
    def cut(figure, path, dpi):
        path.write_bytes(b"PNG")
        raise KeyboardInterrupt

    (tmp_path / "simulation.json").touch()
    (tmp_path / "figure.png").write_bytes(b"older")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", cut)
    with pytest.raises(KeyboardInterrupt):
        write_simulation(ls.simulate("clusters", n=2, time=0.25), tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["series.csv", "simulation.json"]
    check_simulation_folder(tmp_path)


@pytest.mark.wide
def test_a_blow_up_is_drawn_and_told():
    found = ls.simulate("gaussian", n=20, time=2.0)
    numbers = json.loads(json.dumps(numbers_of(found), allow_nan=False))["gaussian"]
    assert numbers["blow_up"] == pytest.approx(2 / 3**0.5) and numbers["reached"] < 1.2
    assert "infinite at" in dict(summary(found))["moments"]
    legend = draw(found).axes[1].get_legend().get_texts()
    assert any("blow-up at t = 1.155" in text.get_text() for text in legend)


def test_a_folder_may_be_used_again_but_not_one_of_something_else(tmp_path):
    for folder, file in (("mine", "simulation.json"), ("thesis", "a.tex")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
    check_simulation_folder(tmp_path / "mine")
    check_simulation_folder(tmp_path / "new" / "below")
    with pytest.raises(ls.UserError, match=r"nor empty \(it contains a.tex\)"):
        check_simulation_folder(tmp_path / "thesis")
    with pytest.raises(ls.UserError, match="is a file"):
        check_simulation_folder(tmp_path / "thesis" / "a.tex")
    with pytest.raises(ls.UserError, match="cannot write"):
        check_simulation_folder(tmp_path / "thesis" / "a.tex" / "below")


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


def drawn(ax):
    return [[float(y) for y in line.get_ydata()] for line in ax.lines]


@pytest.mark.wide
@pytest.mark.parametrize("preset", ["clusters", "gaussian", "growth", "masked"])
def test_a_simulation_draws_what_the_command_draws(preset):
    simulation = ls.simulate(preset, n=6, time=0.5)
    left, right = simulation.plot()
    assert left.figure is right.figure is plt.gcf()
    assert right.get_xlabel() == "depth t"
    if preset == "growth":
        assert simulation.found.sigma.tolist() in drawn(right)


def test_a_flow_draws_the_path_of_every_token():
    I = torch.eye(2, dtype=torch.float64)
    X = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]], dtype=torch.float64)
    flow = ls.dynamics.flow(ls.SelfAttention(I, I, I, causal=True), X, 1.0)
    ax = plt.subplots()[1]
    assert flow.plot(ax) is ax
    assert drawn(ax) == flow.positions[:, :, 1].T.tolist()
    # In a causal flow the position decides the fate of a token, and colours show it.
    assert len({tuple(line.get_color()) for line in ax.lines}) == 3
    other = flow.plot(renormalised=True)
    assert drawn(other) == flow.renormalised[:, :, 1].T.tolist()
    assert other.get_xlabel().startswith("z")


@pytest.mark.wide
def test_growth_along_depth_draws_itself():
    I = torch.eye(2, dtype=torch.float64)
    found = ls.dynamics.growth_along_depth(
        ls.SelfAttention(I, I, I), torch.ones(3, 2).double(), 0.5
    )
    ax = found.plot()
    assert drawn(ax) == [found.gronwall.tolist(), found.product.tolist(), found.sigma.tolist()]
    assert ax.get_yscale() == "log"
