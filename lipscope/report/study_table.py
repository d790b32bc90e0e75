"""A study on the terminal: layers and scopes, growth, and the tokens behind the largest sigma."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context
from statistics import median

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lipscope._files import for_terminal
from lipscope._types import UserError
from lipscope.models.scopes import WITHOUT_ROUTE
from lipscope.report.formats import counted, digits, exponent_range, interval
from lipscope.study.growth import MIN_LENGTHS, Growth
from lipscope.study.records import BUDGET, Fingerprint, Row
from lipscope.study.study import Study, Token

TOP_TOKENS = 3
TOP_LAYERS = 12
IMPRECISE = "imprecise"


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
        parts += _budgets(study)
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


def _budgets(study: Study) -> list[RenderableType]:
    """The tables of `lipscope budget`."""
    # Late: adding up the parts of a budget imports torch.
    from lipscope.probes.budget.jobs import stored_budgets
    from lipscope.report.budgets import budget_table, shares_table

    found = stored_budgets(study)
    return [part for one in found for part in (budget_table(one), Text(), shares_table(one))]


class _Fitting:
    """The table of a study and its legend, without the last columns on a narrow terminal."""

    def __init__(self, study: Study) -> None:
        self._study = study

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for columns in (6, 5, 4, 3):
            table = _table(self._study, columns)
            if Measurement.get(console, options.update(max_width=1000), table).maximum <= (
                options.max_width
            ):
                break
        yield table
        yield Text(f"\n{_legend(self._study, columns)}\n", style="dim")


def _table(study: Study, columns: int) -> Table:
    """The first of the columns layer, scope, sigma, exponent, its residual, and radius."""
    longest = max(row.n for row in study.sigma)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    heads = ("layer", "scope", f"σ at n = {longest}", "α in σ ~ C nᵅ", "rms", "R(n)")
    for head in heads[:columns]:
        table.add_column(head, justify="right" if head == "layer" else "left")
    # A layer is named once; None is a name too, that of the whole model.
    before: object = "none yet"
    for scope, layer in study.maps:
        rows = study.largest(scope, layer)
        name = "" if layer == before else "all" if layer is None else str(layer)
        sigma = _spread([row.value for row in rows if row.n == longest])
        growth = _exponent(study.law(scope, layer))
        ends = _ends(study.radius(scope, layer))
        table.add_row(*(name, for_terminal(scope), sigma, *growth, ends)[:columns])
        before = layer
    return table


def _spread(values: list[float]) -> str:
    return f"{digits(median(values))} {interval(min(values), max(values))}" if values else "-"


def _exponent(law: Growth | None) -> tuple[str, str]:
    if law is None:
        return "-", ""
    return exponent_range(law.alpha, law.low, law.high), f"{law.rms:.2f}"


def _ends(radius: dict[int, float]) -> str:
    """R at the smallest and at the largest length."""
    ends = dict.fromkeys((min(radius), max(radius)))
    return " → ".join(digits(radius[n]) for n in ends)


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
        f"{certificate(study)}{_comparison(study)}",
    ]
    return "\n".join(lines)


def replaces_attention(study: Study) -> bool:
    """Whether the model ran on lipscope's attention, as it does at every scope if it can."""
    # A model that cannot is measured on its own attention: its difference is exactly 0, and it has
    # no scopes but these.
    return study.info.about.difference_to_eager > 0 or any(
        row.scope not in WITHOUT_ROUTE for row in study.sigma
    )


def _comparison(study: Study) -> str:
    """How much lipscope's attention changes the output; empty if it was not used."""
    if not replaces_attention(study):
        return ""
    return (
        "\nOutputs with lipscope's attention and with the model's own differ by "
        f"{study.info.about.difference_to_eager:.0e}."
    )


def certificate(study: Study) -> str:
    """How tight the bounds of a study are, and what to try where there are none."""
    bounded = [ratio for row in study.sigma if (ratio := width(row)) < math.inf]
    unbounded = sum(row.upper == math.inf for row in study.sigma)
    drowned = len(study.sigma) - len(bounded) - unbounded
    who = (
        "Every σ" if len(bounded) == len(study.sigma) else f"{len(bounded)} of {len(study.sigma)} σ"
    )
    text = "Every σ has a lower bound but no upper bound"
    if bounded:
        verb = "lies between its" if who.startswith("Every") else "lie between their"
        text = f"{who} {verb} lower and upper bound, at most {apart(max(bounded))} apart"
        text += f"; {_have(unbounded)} no upper bound" if unbounded else ""
    text += _remedy(study.info.identity) if unbounded else ""
    if drowned:
        text += f"; {_have(drowned)} no lower bound above 0, because rounding may exceed them"
    return f"{text}.{joint(study)}{_imprecise(study)}{_missed(study)}"


def _have(count: int) -> str:
    return f"{count:,} has" if count == 1 else f"{count:,} have"


def joint(study: Study) -> str:
    """The probability with which all upper bounds hold together; empty if there are none."""
    if not study.certified:
        return ""
    count = len(study.certified)
    odds = _rounded_up(study.joint_failure)
    who = f"All {count} upper bounds hold together" if count > 1 else "The upper bound holds"
    return f"\n{who} with probability at least 1 - {odds}."


def _rounded_up(x: float) -> str:
    """A probability or a distance rounded up to two digits."""
    # Rounded to nearest, a stated bound could be smaller than the true one.
    return f"{float(Context(prec=2, rounding=ROUND_CEILING).create_decimal(repr(x))):g}"


def width(row: Row) -> float:
    """upper / lower; 1 where both are 0."""
    return row.upper / row.lower if row.lower > 0 else 1.0 if row.upper == 0 else math.inf


def apart(ratio: float) -> str:
    """How far apart upper and lower are: in per cent, or as a factor beyond 50 %."""
    # The last digits of the ratio are rounding: 1.1 is 10 %, not 10.1 %.
    percent = 100 * (ratio - 1) * (1 - 1e-9)
    return f"{_rounded_up(percent)} %" if ratio < 1.5 else f"a factor {ratio:.4g}"


def _remedy(identity: Fingerprint) -> str:
    """What to try for an upper bound; empty if --gap was given, as the rows say why it failed."""
    if identity.dtype != "float64":
        return "; an upper bound needs --dtype float64"
    return "; --gap iterates until there is one" if identity.gap is None else ""


def _imprecise(study: Study) -> str:
    """How many rows are accurate to less than two digits, because of rounding."""
    count = sum(row.status == IMPRECISE for row in study.sigma)
    return (
        f"\n{count} of {len(study.sigma)} rows are imprecise: rounding may exceed 1 % of σ."
        if count
        else ""
    )


def _missed(study: Study) -> str:
    """How many rows exceed the requested gap, and why."""
    rows = [row for row in study.sigma if row.missed]
    if not rows:
        return ""
    # The first reason stands for all: most often it is the same.
    asked = study.info.identity.gap
    reason = for_terminal(rows[0].explained, 200)
    gap = "the requested gap" if asked is None else f"the gap of {asked:g}"
    return f"\n{len(rows)} of {len(study.sigma)} rows miss {gap}; the first reason: {reason}."


def _peak(study: Study) -> Text:
    row = study.peak()
    where = "the whole model" if row.layer is None else f"layer {row.layer}"
    text = Text(
        f"Most sensitive: {where} ({for_terminal(row.scope)}), σ = {row.value:.4g} at n = {row.n}, "
        f"sample {row.sample}."
    )
    try:
        found = study.tokens_of(row)
    except UserError:  # the study has no token norms, or they are lost
        return text
    for verb, part in (("It reacts most to", "right"), ("The change shows most at", "left")):
        tokens = sorted(found, key=lambda token: -getattr(token, part))[:TOP_TOKENS]
        text.append(
            f"\n{verb} " + ", ".join(_named(token, getattr(token, part)) for token in tokens) + "."
        )
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


def _named(token: Token, norm: float) -> str:
    return f"“{for_terminal(token.token, 16)}” ({token.position}: {norm:.2f})"
