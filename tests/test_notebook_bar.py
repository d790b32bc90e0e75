"""In a notebook, calls that take minutes show a bar, results a table, and plots a picture."""

import os
import sys
import types
from typing import ClassVar

import nbformat
import pytest
import tqdm.auto
from nbclient import NotebookClient

import lipscope as ls
from lipscope._display import with_bar
from lipscope.papers.charlm import train_character_model
from tests.test_docs import ROOT


class Bar:
    """A stand-in for tqdm's bar."""

    made: ClassVar[list["Bar"]] = []

    def __init__(self, desc, total, **options):
        self.desc, self.total, self.options, self.n, self.closed = desc, total, options, 0.0, False
        Bar.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True

    def update(self, more):
        self.n += more


@pytest.fixture
def bars(monkeypatch):
    shell = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=None))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [])
    return Bar.made


@with_bar("waiting")
def wait(steps, *, progress=None):
    for i in range(steps):
        if progress is not None:
            progress(i, steps)
    return steps


def test_a_bar_is_shown_and_removed(bars):
    assert wait(4) == 4
    (bar,) = bars
    assert (bar.desc, bar.n, bar.closed, bar.options["leave"]) == ("waiting", 0.75, True, False)


def test_a_bar_is_removed_after_an_error_and_work_of_nothing_has_none(bars):
    @with_bar("failing")
    def fail(progress=None):
        progress(0, 0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert bars[0].closed and bars[0].n == 0


def test_nothing_is_shown_elsewhere_or_where_progress_is_given(bars, monkeypatch):
    given = []
    wait(2, progress=lambda done, total: given.append((done, total)))
    assert not bars and given == [(0, 2), (1, 2)]
    # IPython in a terminal has a shell without a kernel.
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: object()))
    assert wait(2) == 2
    monkeypatch.delitem(sys.modules, "IPython")
    assert wait(2) == 2 and not bars


class Reached(BaseException):
    pass


def test_every_long_call_has_a_bar(bars, monkeypatch):
    def reached(*args, **kwargs):
        raise Reached

    monkeypatch.setattr(tqdm.auto, "tqdm", reached)
    for call in (
        ls.measure,
        ls.simulate,
        ls.audit_model,
        ls.error_budget,
        ls.reproduce_papers,
        lambda: ls.check_run(None, None),
        lambda: ls.convert_model(None, "l2", None),
        lambda: train_character_model("text", out="model"),
        lambda: ls.attack_model(None, None, ls.AttackPlan("ascent")),
    ):
        with pytest.raises(Reached):
            call()


CODE = """
%matplotlib inline
import torch
import lipscope as ls
simulation = ls.simulate("clusters", n=6, time=0.5)
simulation.plot();
"""


@pytest.mark.wide
def test_in_a_real_kernel(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in (CODE, "simulation")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        startup_timeout=240,
        timeout=240,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute(env=os.environ | {"PYTHONPATH": str(ROOT)})
    first, second = (cell["outputs"] for cell in notebook["cells"])
    # The bar, which is text without ipywidgets, and the figure, once.
    assert any("simulating" in output.get("text", "") for output in first)
    assert sum("image/png" in output.get("data", ()) for output in first) == 1
    (result,) = second
    assert "<table>" in result["data"]["text/html"]
    assert result["data"]["text/plain"].startswith("Simulation: the particles")
