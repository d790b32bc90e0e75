"""Budgets in the terminal, in a chart and in the report."""

import io

import pytest
from rich.console import Console

import lipscope as ls
from lipscope.report.budgets import budget_table, layer_errors, shares_table
from lipscope.report.page import html
from lipscope.report.study_table import summary
from tests.probes.budget.tiny import some_ids, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("budget")


@pytest.fixture(scope="module")
def budget(folder):
    return ls.error_budget(
        tiny("llama"), some_ids(2, 12), formats="bf16,int8,kv4", probes=3, observe=True,
        worst=True, out=folder,
    )  # fmt: skip


def text_of(thing):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(thing)
    return console.export_text()


@pytest.mark.wide
def test_the_terminal_shows_totals_worst_case_and_shares(budget):
    text = text_of(budget_table(budget))
    for name in budget.formats:
        total = budget.total(name)
        assert (
            f"{name}" in text and f"{total.value:.3g} [{total.low:.3g}, {total.high:.3g}]" in text
        )
        assert f"{budget.observed[name]:.3g}" in text
    assert f"{budget.worst['int8']:.3g}" in text and "Worst case" in text
    shares = text_of(shares_table(budget))
    assert "layer 0, head 0" in shares and "weight" in shares
    top = budget.keep_high("int8")[0]
    assert f"keep {top}" in shares


def test_a_study_of_budgets_is_shown_with_its_worst_case(budget, folder):
    study = ls.Study.open(folder)
    text, page = text_of(summary(study)), html(study)
    for name, worst in budget.worst.items():
        assert f"{worst:.3g}" in text and f"<td>{worst:.3g}</td>" in page, name
    assert "Worst case" in text and ">worst case</th>" in page and "No value" not in text


def test_the_worst_case_is_above_every_error(budget):
    assert set(budget.worst) == {"int8", "kv4"}
    for name, worst in budget.worst.items():
        assert worst > budget.observed[name]


def test_the_chart_has_a_curve_per_format_and_observed_lines(budget):
    ax = layer_errors(budget)
    dotted = [line for line in ax.lines if line.get_linestyle() == ":"]
    assert sorted(line.get_ydata()[0] for line in dotted) == sorted(budget.observed.values())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == budget.formats
    int8 = ax.lines[[line.get_gid() for line in ax.lines].index("line-1")]
    total = budget.total("int8").value
    assert sum(y * y for y in int8.get_ydata()) == pytest.approx(total**2)


def test_the_report_has_a_section_with_its_chart(budget, folder, tmp_path):
    page = ls.write_report(ls.Study.open(folder), tmp_path / "report.html").read_text()
    assert 'id="budget-0"' in page and "What does low precision cost?" in page
    assert "How smooth is this model?" not in page
    assert f"{budget.total('kv4').value:.3g}" in page and 'id="chart-budget-0"' in page
    assert "Predicted numerical error in bf16, int8, kv4." in page
