"""A study on the terminal and in a notebook, and where lipscope's attention is named."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from lipscope.linalg.local import local_lipschitz
from lipscope.models.attention import listening
from lipscope.models.loading import load
from lipscope.report.study_table import summary
from lipscope.report.words import describe_certainty
from lipscope.study.store import Store
from lipscope.study.study import Study
from tests.models.zoo import make, sample
from tests.report.made import HOSTILE, failed, grid
from tests.report.made import study as made
from tests.study.fakes import info, row
from tests.study.printed import shown


def study_of(scope, difference):
    facts = info()
    facts = replace(facts, about=replace(facts.about, difference_to_eager=difference))
    store = Store.create(None, facts)
    store.write([row(scope=scope, layer=None if scope == "model" else 0)], [])
    return Study(store)


@pytest.mark.parametrize(
    ("scope", "difference", "used"),
    [
        ("attention", 2e-15, True),
        ("attention", 0.0, True),
        ("block", 2e-15, True),
        ("suffix", 2e-15, True),
        ("model", 2e-15, True),
        ("block", 0.0, False),
        ("suffix", 0.0, False),
        ("model", 0.0, False),
    ],
)
def test_the_difference_is_shown_where_attention_was_replaced(scope, difference, used):
    study = study_of(scope, difference)
    assert ("lipscope's attention" in shown(study)) == used
    assert ("lipscope's attention" in describe_certainty(study)) == used


@pytest.mark.parametrize(("name", "replaced"), [("llama", True), ("gpt_neo", False)])
@pytest.mark.parametrize("scope", ["block", "suffix", "model"])
def test_a_model_that_can_runs_on_lipscopes_attention_at_these_scopes_too(name, replaced, scope):
    model, calls = load(make(name)), []
    (site,) = model.sites(**sample(name), scopes=[scope], layers=[0])

    def count(call):
        calls.append(call)
        return call.output()

    with listening(count):
        site.value()
    assert bool(calls) == replaced
    assert (model.preflight.difference > 0) == replaced


@pytest.mark.parametrize(
    ("width", "last"), [(200, "R(n)"), (76, "R(n)"), (60, "rms"), (55, "ᵅ"), (40, "n = 32")]
)
def test_a_narrow_terminal_has_fewer_columns_and_no_folded_cells(width, last):
    store = Store.create(None, info())
    store.write([row(layer=layer, n=n) for layer in (0, 1) for n in (8, 16, 32)])
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(summary(Study(store)))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    head = next(i for i, line in enumerate(lines) if line.startswith("layer"))
    assert lines[head].endswith(last) and max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["0", "1"]
    # The legend explains the columns that are there, and no others.
    said = " ".join(lines[head + 3 :])
    for column, words in (("ᵅ", "α: log-log fit"), ("rms", "rms: residual"), ("R(n)", "R(n): ")):
        assert (column in lines[head]) == (words in said)


def test_a_study_shows_its_headline_and_its_maps(tmp_path):
    text = made(tmp_path / "s", grid())._repr_html_()
    assert text.count("<tr>") == 1 + 4 and "0.50 [0.38, 0.62]" in text and "fake/model" in text


def test_a_study_of_strangers_is_text(tmp_path):
    text = made(tmp_path / "s", [failed()], model=HOSTILE[0])._repr_html_()
    assert "<script" not in text and "Without a value: 1 row." in text


def test_an_estimate_shows_a_line_per_member():
    X = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = local_lipschitz(lambda x: 2 * x, X)
    assert batch._repr_html_().count("<tr>") == 1 + 3
    one = local_lipschitz(lambda x: 2 * x, X[0])
    assert "<td>2</td>" in one._repr_html_()
    assert (
        one._repr_html_().count("<tr>") == 1 + 1
        and f"<td>{one.status.name.lower()}</td>" in one._repr_html_()
    )
