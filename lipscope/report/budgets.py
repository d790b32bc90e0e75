"""Error budgets and comparisons of runs: terminal tables, a chart, and a section of the report."""

from __future__ import annotations

from html import escape
from itertools import compress
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lipscope._files import for_terminal
from lipscope.probes.budget.comparing import RunComparison
from lipscope.probes.budget.result import OF_THE_RUN, ErrorBudget
from lipscope.report import charts
from lipscope.report.charts import Curve, Marks
from lipscope.report.document import chart, section, swatch, table
from lipscope.report.formats import text_table
from lipscope.report.palette import colour, marker, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 3
"""Maximum number of sites named per format."""

HEADS = 8
"""Maximum number of heads shown."""

WORST = (
    "Worst case: the sum over all sites of σ of what follows times the error there, to first "
    "order, at the first sequence."
)


def layer_errors(budget: ErrorBudget, ax: Any = None) -> Any:
    """Error that each layer causes at the output, one line per format; returns the Axes."""
    import matplotlib.pyplot as plt

    if ax is None:
        ax = plt.subplots(layout="constrained")[1]
    charts.style(ax, 10)
    _draw(budget, ax, {})
    ax.set_title("Predicted error by layer; dotted: observed, all layers together", fontsize=11)
    ax.legend(fontsize="small")
    return ax


def budget_section(budget: ErrorBudget, number: int = 0) -> str:
    """A section of the report: the totals in words, by layer in a chart, and as a table."""
    worst = max(budget.formats, key=lambda name: budget.total(name).value)
    total = budget.total(worst)
    answer = (
        f"Predicted from {budget.probes} backward passes at each of {budget.sequences} sequences "
        f"({budget.tokens:,} tokens): {worst} costs {total.value:.3g}, with a 95 % interval from "
        f"{total.low:.3g} to {total.high:.3g} ({_unit(budget)}), the most of "
        f"{len(budget.formats)} formats."
    )
    notes = f"\n{WORST}" if budget.worst else ""
    notes += "".join(f"\n{note[0].upper()}{note[1:]}." for note in budget.warnings())

    def draw(width: int, marks: Marks) -> Figure:
        figure, ax = charts.figure_of(width, 380 if width > 400 else 300, left=70, bottom=48)
        _draw(budget, ax, marks)
        return figure

    head = ["format", "predicted", "95 % interval", "observed", "not linear", "largest site"]
    if budget.worst:
        head.insert(4, "worst case")
    lines = []
    for i, name in enumerate(budget.formats):
        t = budget.total(name)
        cells = [
            swatch(series(i, len(budget.formats)), marker(i)[1], name),
            f"{t.value:.3g}",
            f"{t.low:.3g} to {t.high:.3g}",
            _cell(budget.observed.get(name)),
            f"{budget.second_order[name]:.0%}",
            escape(for_terminal(_largest(budget, name, most=1))),
        ]
        if budget.worst:
            cells.insert(4, _cell(budget.worst.get(name)))
        lines.append(cells)
    about = "Error caused by each layer"
    about += "; dotted: observed, all layers together" if budget.observed else ""
    label = f"Predicted error of each layer in {len(budget.formats)} formats, on a log axis."
    return section(
        f"budget-{number}",
        "What does low precision cost?",
        answer + notes,
        chart(f"budget-{number}", label, draw, wide=600, about=about),
        table(head, lines, "Error budget", raw=True),
    )


def budget_table(budget: ErrorBudget) -> Group:
    """Totals by format, and where each of them comes from."""
    heads = [
        "format",
        "predicted [95 %]",
        "observed",
        "worst case",
        "second order",
        "largest sites",
    ]
    wanted = [True, True, bool(budget.observed), bool(budget.worst), True, True]
    lines = []
    for name in budget.formats:
        t = budget.total(name)
        cells = [
            for_terminal(name),
            f"{t.value:.3g} [{t.low:.3g}, {t.high:.3g}]",
            _cell(budget.observed.get(name)),
            _cell(budget.worst.get(name)),
            f"{budget.second_order[name]:.0%}",
            for_terminal(_largest(budget, name)),
        ]
        lines.append(list(compress(cells, wanted)))
    totals = text_table(
        list(compress(heads, wanted)), lines, left=heads, folding=("format", "largest sites")
    )
    note = (
        f"{_unit(budget)}; {budget.sequences} sequences, {budget.tokens} tokens, "
        f"{budget.probes} probes.\nShares are of the squared error."
    )
    if budget.worst:
        note += f"\n{WORST}"
    warnings = [Text(f"warning: {warning}") for warning in budget.warnings()]
    title = Text(for_terminal(budget.model))
    return Group(title, Text(), totals, Text(), Text(note), *warnings)


def shares_table(budget: ErrorBudget) -> Group:
    """Shares in the squared error of each format: by layer, by kind, of the largest heads."""
    parts: list[Any] = []
    for by in ("layer", "kind", "head"):
        if (found := _shares(budget, by)) is not None:
            parts += [found, Text()]
    for name in budget.formats:
        kept = budget.keep_high(name)
        shares = [r.share for r in budget.rows if r.format == name and r.kind not in OF_THE_RUN]
        rest = f" and {len(kept) - SHOWN} more" if len(kept) > SHOWN else ""
        what = (
            f"{len(kept)} of {len(shares)} sites make {sum(shares) / 2:.0%} of the squared error; "
            f"to remove it, keep {for_terminal(', '.join(kept[:SHOWN]))}{rest} in high precision"
        )
        parts.append(Text(f"{for_terminal(name)}: {what if kept else 'no site makes an error'}"))
    return Group(*parts)


def _shares(budget: ErrorBudget, by: str) -> Table | None:
    """The shares by layer, kind or head; None if there is nothing to tell apart."""
    shares = {name: budget.shares(name, by) for name in budget.formats}
    if by == "head":
        cached = {row.format for row in budget.rows if row.head is not None}
        shares = {name: found for name, found in shares.items() if name in cached}
    keys = {key for found in shares.values() for key in found}
    if by == "head":
        keys = {key for key in keys if key[1] is not None}
    if len(keys) < 2:
        return None
    if by == "layer":
        order = sorted(keys, key=lambda i: -1 if i is None else i)
    else:
        largest = sorted(keys, key=lambda k: -max(f.get(k, 0.0) for f in shares.values()))
        order = largest[:HEADS]
    lines = []
    for key in order:
        name = "outside" if key is None else for_terminal(str(key))
        if by == "head":
            name = f"layer {key[0]}, head {key[1]}"
        cells = [f"{found[key]:.0%}" if key in found else "–" for found in shares.values()]
        lines.append((name, *cells))
    first = by if len(order) == len(keys) else f"{by} (largest {len(order)})"
    heads = (first, *map(for_terminal, shares))
    return text_table(heads, lines, left=(first,), folding=(first,))


def _draw(budget: ErrorBudget, ax: Axes, marks: Marks) -> None:
    """One curve per format over the layers; a dotted line where the format was run."""
    ax.set_yscale("log")
    curves = []
    values = []
    # Squared errors add up, so a share of the square is a factor sqrt(share) of the error; a
    # divergence is a square already.
    power = 1.0 if budget.metric == "kl" else 0.5
    for i, name in enumerate(budget.formats):
        tint = series(i, len(budget.formats))
        total = budget.total(name).value
        shares = {k: v for k, v in budget.shares(name).items() if k is not None and v > 0}
        layers = sorted(shares)
        errors = [total * shares[layer] ** power for layer in layers]
        curves.append(
            Curve(
                name=name,
                x=layers,
                y=errors,
                colour=tint,
                marker=marker(i)[0],
                titles=[
                    f"{name}, layer {layer}: {error:.3g}, {shares[layer]:.0%} of the square"
                    for layer, error in zip(layers, errors, strict=True)
                ],
            )
        )
        values += errors
        if name in budget.observed:
            ax.axhline(budget.observed[name], color=colour(tint), linestyle=":", linewidth=1.4)
            values.append(budget.observed[name])
    charts.curves(ax, curves, marks)
    charts.log_ticks(ax.yaxis, values)
    every = sorted({int(layer) for curve in curves for layer in curve.x})
    step = max(1, -(-len(every) // 16))
    ax.set_xticks(every[::step], [str(layer) for layer in every[::step]])
    ax.set_xlabel("layer")
    ax.set_ylabel(_unit(budget))


def _largest(budget: ErrorBudget, format: str, most: int = SHOWN) -> str:
    """The sites with the largest shares."""
    rows = sorted((r for r in budget.rows if r.format == format), key=lambda r: -r.share)
    return ", ".join(
        f"{r.site}{'' if r.head is None else f' {r.head}'} {r.share:.0%}" for r in rows[:most]
    )


def _unit(budget: ErrorBudget) -> str:
    if budget.metric == "kl":
        return "nats per token, divergence from the exact model"
    what = "the output" if budget.metric == "output" else for_terminal(budget.metric)
    return f"relative error of {what}"


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def comparison_table(found: RunComparison) -> Group:
    """Observed and predicted error at every hidden state, and the verdict."""
    heads = ("hidden state", "observed", "predicted", "ratio", "limit", "")
    lines = []
    for state in found.states:
        errors = (f"{state.observed:.2e}", f"{state.predicted:.2e}")
        ratios = (f"{state.ratio:.2f}", f"{state.limit:.2f}")
        lines.append((state.name, *errors, *ratios, "" if state.inside else "outside"))
    table = text_table(heads, lines, left=("hidden state", ""), folding=("hidden state",))
    sentence = found.sentence()
    note = (
        f"{sentence[0].upper()}{sentence[1:]}.\n"
        f"With independent rounding errors, a correct run fails with probability at most "
        f"{found.false_alarms:g}."
    )
    return Group(table, Text(), Text(note))
