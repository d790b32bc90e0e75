"""Error budgets and comparisons of runs as terminal tables."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lipscope._files import for_terminal
from lipscope.budget.comparing import RunComparison
from lipscope.budget.result import ErrorBudget
from lipscope.budget.scores import ScoreTable

SHOWN = 3
"""Maximum number of sites named per format."""


def budget_table(budget: ErrorBudget) -> Group:
    """Totals by format, and where each of them comes from."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("format", "predicted [95 %]", "observed", "second order", "largest sites"):
        table.add_column(head, justify="left")
    for name in budget.formats:
        t = budget.total(name)
        rows = sorted((r for r in budget.rows if r.format == name), key=lambda r: -r.share)
        sites = ", ".join(
            f"{for_terminal(r.site)}{'' if r.head is None else f' {r.head}'} {r.share:.0%}"
            for r in rows[:SHOWN]
        )
        seen = budget.observed.get(name)
        table.add_row(
            for_terminal(name),
            f"{t.value:.3g} [{t.low:.3g}, {t.high:.3g}]",
            "–" if seen is None else f"{seen:.3g}",
            f"{budget.second_order[name]:.0%}",
            sites,
        )
    unit = (
        "nats per token, divergence from the exact model"
        if budget.metric == "kl"
        else f"relative error ({for_terminal(budget.metric)})"
    )
    note = (
        f"{unit}; {budget.sequences} sequences, {budget.tokens} tokens, {budget.probes} probes.\n"
        "Shares are of the squared error."
    )
    warnings = [Text(f"warning: {warning}") for warning in budget.warnings()]
    title = Text(for_terminal(budget.model))
    return Group(title, Text(), table, Text(), Text(note), *warnings)


def shares_table(budget: ErrorBudget) -> Table:
    """The share of every layer in the squared error of each format."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layer")
    shares = {name: budget.shares(name) for name in budget.formats}
    for name in shares:
        table.add_column(for_terminal(name), justify="right")
    layers = {layer for found in shares.values() for layer in found}
    for layer in sorted(layers, key=lambda i: -1 if i is None else i):
        cells = [f"{found[layer]:.0%}" if layer in found else "–" for found in shares.values()]
        table.add_row("outside" if layer is None else str(layer), *cells)
    return table


def score_table(scores: ScoreTable) -> Table:
    """How well every score ranks the sites, by format."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("format", "score", "rank correlation", "predicted / observed", "all together"):
        table.add_column(head, justify="left" if head in ("format", "score") else "right")
    for row in scores.rows:
        table.add_row(
            for_terminal(row.format),
            row.score,
            f"{row.rank:.3f}",
            "–" if row.scale is None else f"{row.scale:.3g}",
            "–" if row.total is None else f"{row.total:.3g}",
        )
    return table


def comparison_table(found: RunComparison) -> Group:
    """Observed and predicted error at every hidden state, and the verdict."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("hidden state", "observed", "predicted", "ratio", "limit", ""):
        table.add_column(head, justify="left" if head in ("hidden state", "") else "right")
    for state in found.states:
        table.add_row(
            state.name,
            f"{state.observed:.2e}",
            f"{state.predicted:.2e}",
            f"{state.ratio:.2f}",
            f"{state.limit:.2f}",
            "" if state.inside else "outside",
        )
    sentence = found.sentence()
    note = (
        f"{sentence[0].upper()}{sentence[1:]}.\n"
        f"With independent rounding errors, a correct run fails with probability at most "
        f"{found.false_alarms:g}."
    )
    return Group(table, Text(), Text(note))
