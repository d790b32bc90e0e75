"""Results in a notebook cell, without scripts: a study, and the tables of the terminal."""

from __future__ import annotations

from html import escape
from io import StringIO
from statistics import median

from rich.console import Console, RenderableType

from lipscope._display import html_table
from lipscope.report.formats import counted, digits, exponent_range, interval, layer_name, shown
from lipscope.report.words import headline
from lipscope.study.study import Study

HEAD = ("layer", "map", "n", "σ, median", "σ, range", "α [95 %]")


def summary_html(study: Study) -> str:
    """The headline, and per map sigma at the largest length with its growth exponent."""
    name = (
        f"<strong>{escape(shown(study.info.about.model, 80))}</strong>: {escape(headline(study))}"
    )
    rows = [_cells(study, scope, layer) for scope, layer in study.maps]
    table = html_table(HEAD, rows) if rows else ""
    missing = len(study.failed)
    failed = f"<p>Without a value: {counted(missing, 'row')}.</p>" if missing else ""
    return f"<div><p>{name}</p>{table}{failed}</div>"


def _cells(study: Study, scope: str, layer: int | None) -> tuple[str, ...]:
    rows = study.largest(scope, layer)
    law = study.law(scope, layer)
    # Maps may have been measured at different lengths: each line names its own.
    n = max(row.n for row in rows)
    values = [row.value for row in rows if row.n == n]
    growth = "–" if law is None else exponent_range(law.alpha, law.low, law.high)
    spread = interval(min(values), max(values), 4)
    return layer_name(layer), shown(scope, 30), f"{n:,}", digits(median(values), 4), spread, growth


def terminal_html(table: RenderableType) -> str:
    """What a command prints, as it stands on a terminal 110 columns wide."""
    console = Console(file=StringIO(), width=110, highlight=False, color_system=None)
    with console.capture() as printed:
        console.print(table)
    return f"<pre>{escape(printed.get())}</pre>"
