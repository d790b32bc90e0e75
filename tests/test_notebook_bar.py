"""In a notebook, calls that take minutes show a bar, results a table, and plots a picture."""

import os
import sys
import types

import nbformat
import pytest
from nbclient import NotebookClient

import lipscope as ls
from lipscope import _notebook_bar
from lipscope._notebook_bar import Bar, in_notebook, with_bar
from lipscope.papers.charlm import train_character_model
from tests.test_docs import ROOT


class Page:
    """What a notebook shows."""

    def __init__(self, monkeypatch):
        self.shown: list[str] = []
        display = types.ModuleType("IPython.display")
        display.display = self.display
        shell = types.ModuleType("IPython")
        shell.get_ipython = lambda: types.SimpleNamespace(kernel=None)
        monkeypatch.setitem(sys.modules, "IPython", shell)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        monkeypatch.setattr(_notebook_bar, "OFTEN", 0.0)

    def display(self, shown, raw, display_id):
        assert display_id is True
        self.update(shown, raw)
        return types.SimpleNamespace(update=self.update)

    def update(self, shown, raw):
        assert raw is True
        # Viewers without HTML show the same in words.
        assert bool(shown["text/html"]) == bool(shown["text/plain"])
        self.shown.append(shown["text/html"])


@with_bar("waiting")
def wait(steps, *, progress=None):
    for i in range(steps):
        if progress is not None:
            progress(i, steps)
    return steps


def test_a_bar_is_shown_and_removed(monkeypatch):
    page = Page(monkeypatch)
    assert wait(4) == 4
    assert len(page.shown) == 5 and page.shown[-1] == ""
    assert "value='3' max='4'" in page.shown[3] and "75 %" in page.shown[3]
    assert "left" not in page.shown[0] and "0:00 left" in page.shown[1]


def test_a_bar_is_removed_after_an_error(monkeypatch):
    page = Page(monkeypatch)

    @with_bar("failing")
    def fail(progress=None):
        progress(1, 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert page.shown[-1] == "" and len(page.shown) == 2


def test_nothing_is_shown_elsewhere_or_where_progress_is_given(monkeypatch):
    page, given = Page(monkeypatch), []
    wait(2, progress=lambda done, total: given.append((done, total)))
    assert not page.shown and given == [(0, 2), (1, 2)]
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook() and wait(2) == 2 and not page.shown
    # IPython in a terminal has a shell without a kernel.
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: object()))
    assert not in_notebook()


def test_numbers_that_make_no_bar(monkeypatch):
    page, bar = Page(monkeypatch), Bar("waiting")
    for done, total in ((0, 0), (2, 2), (3, 2), (-1, 2)):
        bar(done, total)
    bar.remove()
    assert not page.shown


def test_updates_are_not_more_frequent_than_a_reader(monkeypatch):
    page = Page(monkeypatch)
    monkeypatch.setattr(_notebook_bar, "OFTEN", 1000.0)
    monkeypatch.setattr(_notebook_bar.time, "monotonic", lambda: 5000.0)
    wait(50)
    assert len(page.shown) == 2


class Reached(BaseException):
    pass


def test_every_long_call_has_a_bar(monkeypatch):
    def reached(doing):
        raise Reached

    Page(monkeypatch)
    monkeypatch.setattr(_notebook_bar, "Bar", reached)
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
from lipscope import _notebook_bar
_notebook_bar.OFTEN, seen, show = 0.0, [], _notebook_bar.Bar._show
_notebook_bar.Bar._show = lambda bar, *shown: (seen.append(shown[0]), show(bar, *shown))
simulation = ls.simulate("clusters", n=6, time=0.5)
print(len(seen) > 2, seen[0][:15], repr(seen[-1]))
simulation.plot();
"""


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
    (printed,) = [output["text"] for output in first if output["output_type"] == "stream"]
    assert printed == "True <div>simulating ''\n"
    pages = [output["data"] for output in first if output["output_type"] == "display_data"]
    # The bar is gone, the figure is there, once.
    assert [data.get("text/html") for data in pages] == ["", None]
    assert "image/png" in pages[1]
    (result,) = second
    assert "<table>" in result["data"]["text/html"]
    assert result["data"]["text/plain"].startswith("Simulation: the particles")
