"""A study on the terminal and in a notebook: layers and scopes, growth, the tokens that matter."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from io import StringIO
from statistics import median

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lipscope._display import html_table
from lipscope._files import for_terminal
from lipscope._types import UserError
from lipscope.report.formats import (
    counted,
    digits,
    exponent_range,
    interval,
    layer_name,
    place_name,
    shown,
    text_table,
)
from lipscope.report.words import certificate, headline, replaces_attention
from lipscope.study.growth import MIN_LENGTHS
from lipscope.study.records import BUDGET
from lipscope.study.study import Study

TOP_TOKENS = 3
TOP_LAYERS = 12
HEAD = ("layer", "map", "n", "σ, median", "σ, range", "α [95 %]")


def summary(study: Study) -> RenderableType:
    """The output of `lipscope measure` and `lipscope show`, within 80 columns."""
    about = study.info.about
    dtype = for_terminal(study.info.identity.dtype)
    parts: list[RenderableType] = [
        Text(f"{for_terminal(about.model)} on {for_terminal(about.text)}, {dtype}\n", style="bold")
    ]
    if study.sigma:
        parts += [_Fitting(study), _peak(study)]
        parts += _ranking(study)
    elif any(row.probe.startswith(BUDGET) for row in study.rows):
        # Late: adding up the parts of a budget imports torch.
        from lipscope.probes.budget.jobs import stored_budgets
        from lipscope.report.budgets import budget_table, shares_table

        for one in stored_budgets(study):
            parts += [budget_table(one), Text(), shares_table(one)]
    else:
        parts.append(Text("No value has been measured yet."))
    if study.failed:
        reason = for_terminal(study.failed[0].explained, 200)
        missing = counted(len(study.failed), "row")
        parts.append(Text(f"\nWithout a value: {missing}; the first reason: {reason}", style="red"))
    if study.unfinished:
        parts.append(
            Text(f"\n{study.unfinished}; run the same command again to resume.", style="yellow")
        )
    return Group(*parts)


@dataclass(frozen=True)
class _Fitting:
    """The table of a study and its legend, without the last columns on a narrow terminal."""

    study: Study

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for columns in (6, 5, 4, 3):
            table = _table(self.study, columns)
            if Measurement.get(console, options.update(max_width=1000), table).maximum <= (
                options.max_width
            ):
                break
        yield table
        yield Text(f"\n{_legend(self.study, columns)}\n", style="dim")


def _table(study: Study, columns: int) -> Table:
    """The first of the columns layer, scope, sigma, exponent, its residual, and radius."""
    longest = max(row.n for row in study.sigma)
    heads = ("layer", "scope", f"σ at n = {longest}", "α in σ ~ C nᵅ", "rms", "R(n)")[:columns]
    lines = []
    # A layer is named once; None is a name too, that of the whole model.
    before: object = "none yet"
    for scope, layer in study.maps:
        rows = study.largest(scope, layer)
        name = "" if layer == before else "all" if layer is None else str(layer)
        values = [row.value for row in rows if row.n == longest]
        sigma = f"{digits(median(values))} {interval(min(values), max(values))}" if values else "-"
        law = study.law(scope, layer)
        alpha = "-" if law is None else exponent_range(law.alpha, law.low, law.high)
        rms = "" if law is None else f"{law.rms:.2f}"
        radius = study.radius(scope, layer)
        ends = dict.fromkeys((min(radius), max(radius)))
        radii = " → ".join(digits(radius[n]) for n in ends)
        lines.append((name, for_terminal(scope), sigma, alpha, rms, radii)[:columns])
        before = layer
    return text_table(heads, lines, left=heads[1:], folding=("scope",))


def _legend(study: Study, columns: int) -> str:
    """What the first columns of the table are, and how accurate its numbers."""
    lengths = sorted({row.n for row in study.sigma})
    heads = "; heads: the largest" if any(row.scope == "heads" for row in study.sigma) else ""
    ends = f"n = {lengths[0]} → {lengths[-1]}" if len(lengths) > 1 else f"n = {lengths[0]}"
    residual = "; rms: residual of the fit, in log σ" if columns > 4 else ""
    growth = (
        f"α: log-log fit over all samples [95 %]{residual}."
        if len(lengths) >= MIN_LENGTHS
        else f"α: a fit needs at least {MIN_LENGTHS} lengths."
    )
    lines = [
        f"σ: local Lipschitz constant, median [range] over samples{heads}.",
        *([growth] if columns > 3 else []),
        *([f"R(n): largest norm of a token at the map's input, {ends}."] if columns > 5 else []),
        certificate(study),
    ]
    if replaces_attention(study):
        lines.append(
            "Outputs with lipscope's attention and with the model's own differ by "
            f"{study.info.about.difference_to_eager:.0e}."
        )
    return "\n".join(lines)


def _peak(study: Study) -> Text:
    row = study.peak()
    where = f"{place_name(row.layer)} ({for_terminal(row.scope)})"
    at = f"n = {row.n}, sample {row.sample}"
    text = Text(f"Most sensitive: {where}, σ = {row.value:.4g} at {at}.")
    try:
        found = study.tokens_of(row)
    except UserError:  # the study has no token norms, or they are lost
        return text
    for verb, part in (("It reacts most to", "right"), ("The change shows most at", "left")):
        tokens = sorted(found, key=lambda token: -getattr(token, part))[:TOP_TOKENS]
        named = (
            f"“{for_terminal(token.token, 16)}” ({token.position}: {getattr(token, part):.2f})"
            for token in tokens
        )
        text.append(f"\n{verb} {', '.join(named)}.")
    return text


def _ranking(study: Study) -> list[RenderableType]:
    """The layers in the scope of the largest sigma, most sensitive first."""
    peak = study.peak()
    largest: dict[int, float] = {}
    for row in study.sigma:
        if (row.scope, row.n) == (peak.scope, peak.n) and row.layer is not None:
            largest[row.layer] = max(row.value, largest.get(row.layer, 0.0))
    if len(largest) < 2:
        return []
    ranked = sorted(largest, key=lambda layer: -largest[layer])
    listed = ", ".join(f"{layer} ({digits(largest[layer])})" for layer in ranked[:TOP_LAYERS])
    rest = f" and {len(ranked) - TOP_LAYERS} more" if len(ranked) > TOP_LAYERS else ""
    scope = for_terminal(peak.scope)
    return [Text(f"Layers by largest σ ({scope}, n = {peak.n}): {listed}{rest}.")]


def summary_html(study: Study) -> str:
    """The headline, and per map sigma at the largest length with its growth exponent."""
    name = f"<strong>{escape(shown(study.info.about.model, 80))}</strong>"
    rows = []
    for scope, layer in study.maps:
        largest = study.largest(scope, layer)
        law = study.law(scope, layer)
        # Maps may have been measured at different lengths: each line names its own.
        n = max(row.n for row in largest)
        values = [row.value for row in largest if row.n == n]
        growth = "–" if law is None else exponent_range(law.alpha, law.low, law.high)
        sigma = (digits(median(values), 4), interval(min(values), max(values), 4))
        rows.append((layer_name(layer), shown(scope, 30), f"{n:,}", *sigma, growth))
    table = html_table(HEAD, rows) if rows else ""
    missing = len(study.failed)
    failed = f"<p>Without a value: {counted(missing, 'row')}.</p>" if missing else ""
    return f"<div><p>{name}: {escape(headline(study))}</p>{table}{failed}</div>"


def terminal_html(table: RenderableType) -> str:
    """What a command prints, as it stands on a terminal 110 columns wide."""
    console = Console(file=StringIO(), width=110, highlight=False, color_system=None)
    with console.capture() as printed:
        console.print(table)
    return f"<pre>{escape(printed.get())}</pre>"
