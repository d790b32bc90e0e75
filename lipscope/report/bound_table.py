"""Bounds on the terminal: for each head sigma, the worst input found, and bound / sigma."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from string import ascii_uppercase

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lipscope._files import for_terminal
from lipscope._types import Point
from lipscope.probes.bounds import BOUND, LEFT_OUT, REGIME, WORST, Audit
from lipscope.study.records import SIGMA, Row
from lipscope.theorems.registry import REGISTRY

Head = tuple[int | None, int | None, int, int]


def bound_summary(audit: Audit) -> RenderableType:
    """What `lipscope bounds` prints."""
    heads: dict[Head, dict[str, Row]] = defaultdict(dict)
    for row in audit.study.rows:
        if row.scope == "heads" and not row.failing:
            heads[row.layer or 0, row.head, row.n, row.sample][row.probe] = row
    heads = {key: rows for key, rows in sorted(heads.items()) if WORST in rows and SIGMA in rows}
    names = sorted(
        {p for rows in heads.values() for p in rows if p.startswith(BOUND)}, key=_typical(heads)
    )
    about = audit.study.info.about
    title = Text(
        f"{for_terminal(about.model)} on {for_terminal(about.text)}: bounds, head by head\n",
        style="bold",
    )
    # Names of theorems are too long for columns; there are fewer of them than letters.
    letters = dict(zip(names, ascii_uppercase, strict=False))
    needs: dict[str, list[str]] = defaultdict(list)
    for name, why in sorted(audit.not_offered.items()):
        needs[why].append(name)
    refused = [
        f"not applicable: {'; '.join(theorems)} (required: {why})"
        for why, theorems in needs.items()
    ]
    return Group(
        title,
        _heads(heads, letters),
        Text(),
        _summary(heads, letters),
        Text("\n".join(["", LEGEND, *refused]), style="dim"),
    )


LEGEND = (
    "head 2.5: layer 2, head 5. σ: local Lipschitz constant at the text; worst: the largest found "
    "in the ball of radius R around 0, by constructions and ascent. Ratios are bound / σ; a lower "
    "bound on the ball is compared with the worst found; k: thousands. √n: the regime where one "
    "token can dominate all others, n <= 1 + e^(2 γ R²); mf: mean-field, n beyond that."
)


def _heads(heads: dict[Head, dict[str, Row]], letters: dict[str, str]) -> Table:
    shown = {name: letter for name, letter in letters.items() if not name.endswith(LEFT_OUT)}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("head", "n", "R", "σ", "worst", "regime", *shown.values()):
        table.add_column(name, justify="left" if name == "regime" else "right", no_wrap=True)
    for (layer, head, n, _), rows in heads.items():
        sigma = rows[SIGMA]
        worst = rows[WORST]
        ratios = [_short(_ratio(rows, name)) if name in rows else "-" for name in shown]
        place = (f"{layer}.{head}", str(n), f"{worst.radius:.3g}")
        table.add_row(*place, f"{sigma.value:.3g}", f"{worst.value:.3g}", _regime(rows, n), *ratios)
    return table


def _short(x: float) -> str:
    return (
        f"{x / 1000:.2g}k"
        if 1000 <= x < math.inf
        else f"{x:.0f}"
        if 100 <= x < 1000
        else f"{x:.2g}"
    )


def _summary(heads: dict[Head, dict[str, Row]], letters: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "bound", "kind", "tightness: median [range]", "bound / worst"):
        table.add_column(name)
    for name, letter in letters.items():
        rows = [found for found in heads.values() if name in found]
        ratios = [_ratio(found, name) for found in rows]
        worst = (
            "-"
            if at_point(name)
            else f"{median(found[name].value / found[WORST].value for found in rows):.3g}"
        )
        spread = f"{median(ratios):.4g} [{min(ratios):.3g}, {max(ratios):.3g}]"
        table.add_row(letter, name.removeprefix(BOUND), rows[0][name].kind, spread, worst)
    return table


def at_point(name: str) -> bool:
    """Whether a bound is about the text alone, not a ball."""
    return any(bound.domain is Point and name.startswith(BOUND + bound.name) for bound in REGISTRY)


def _ratio(rows: dict[str, Row], name: str) -> float:
    # A lower bound on a ball is reached by its worst input, not by the text.
    against = rows[WORST if rows[name].kind == "lower" and not at_point(name) else SIGMA].value
    return rows[name].value / against if against > 0 else math.inf


def _typical(heads: dict[Head, dict[str, Row]]) -> Callable[[str], tuple[bool, float]]:
    """Sort key of bounds: upper bounds first, then by tightness."""

    def key(name: str) -> tuple[bool, float]:
        rows = [found for found in heads.values() if name in found]
        return rows[0][name].kind == "lower", median(_ratio(found, name) for found in rows)

    return key


def _regime(rows: dict[str, Row], n: int) -> str:
    if REGIME not in rows:
        return "-"
    return "√n" if math.log(max(n - 1, 1)) <= rows[REGIME].value else "mf"
