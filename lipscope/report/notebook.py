"""A study in a notebook cell: headline and a row per map, without scripts."""

from __future__ import annotations

from html import escape
from statistics import median

from lipscope.report.content import layer_name, shown
from lipscope.report.words import headline
from lipscope.study.study import Study

HEAD = ("layer", "map", "n", "σ, median", "σ, range", "α [95 %]")


def summary_html(study: Study) -> str:
    """The headline, and per map sigma at the largest length with its growth exponent."""
    name = (
        f"<strong>{escape(shown(study.info.about.model, 80))}</strong>: {escape(headline(study))}"
    )
    lines = "".join(_line(_cells(study, scope, layer)) for scope, layer in study.maps)
    head = "".join(f"<th>{escape(text)}</th>" for text in HEAD)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>" if lines else ""
    failed = f"<p>{len(study.failed)} rows have no value.</p>" if study.failed else ""
    return f"<div><p>{name}</p>{table}{failed}</div>"


def _cells(study: Study, scope: str, layer: int | None) -> tuple[str, ...]:
    rows, law = study.largest(scope, layer), study.law(scope, layer)
    n = max(row.n for row in rows)
    values = [row.value for row in rows if row.n == n]
    growth = "–" if law is None else f"{law.alpha:.2f} [{law.low:.2f}, {law.high:.2f}]"
    spread = f"[{min(values):.4g}, {max(values):.4g}]"
    return layer_name(layer), shown(scope, 30), str(n), f"{median(values):.4g}", spread, growth


def _line(cells: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in cells)}</tr>"
