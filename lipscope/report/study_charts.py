"""The charts and tables of one study, as HTML: heat map, ranking of layers, growth, tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from lipscope.report import charts
from lipscope.report.charts import Curve, Grid, Marks
from lipscope.report.content import NORM_UNIT, Heat, LengthCurve, Strip
from lipscope.report.document import chart, swatch, table
from lipscope.report.formats import digits, exponent, interval, layer_name, power, shown
from lipscope.report.palette import colour, level, marker, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY_ROWS = 40
"""Heat maps with more layers than this have low rows without digits."""

MANY_CURVES = 150
"""A chart of growth has at most this many layers: a thousand curves take seconds to draw."""

SIDES = {
    "right": "Input: tokens whose change matters most",
    "left": "Output: tokens that change most",
}


def heat_chart(found: Heat) -> str:
    """The heat map at the greatest length; the script shows the others."""
    ends = f"{digits(found.scale.low)} to {digits(found.scale.high)}"
    label = f"Heat map of the median σ over layers and heads, from {ends}."
    kind = ", logarithmic" if found.scale.log else ""
    return grid_chart(found.grids[-1], "heat", label) + (
        f'<p class="scale"><span>{digits(found.scale.low)}</span><span class="bar"></span>'
        f"<span>{digits(found.scale.high)}</span><span>median σ{kind}</span></p>"
    )


def grid_chart(grid: Grid, name: str, label: str) -> str:
    """A heat map of layers by heads; columns that are not heads have names."""
    # 7.5 pixels are a wide letter of the font that the page falls back to.
    margin = max(len(text) for text in grid.rows) * 7.5 + 12
    heads = sum(text.isdigit() for text in grid.columns)

    def draw(width: int, marks: Marks) -> Figure:
        narrow = width < 600
        size, left = (12.0, min(margin, 70.0)) if narrow else (charts.FONT, margin)
        high = 12 if len(grid.rows) > MANY_ROWS else 26 if narrow else 30
        # On a telephone, names of scopes are written upwards: they are wider than their column.
        upwards = narrow and heads < len(grid.columns) and len(grid.columns) > 3
        bottom = 84 if upwards else 46
        figure, ax = charts.figure_of(
            width, high * len(grid.rows) + bottom + 2, left=left, bottom=bottom, right=2, top=2
        )
        # Four characters, as in 18.0, need 34 pixels.
        wide_cells = (width - left) / len(grid.columns) >= 34
        charts.heat_map(ax, grid, marks, texts=high > 12 and wide_cells, size=size)
        ax.tick_params(labelsize=size)
        if upwards:
            for text, tick in zip(grid.columns, ax.xaxis.get_major_ticks(), strict=False):
                tick.label1.set_rotation(0 if text.isdigit() else 90)
        if heads:
            spot = (heads / 2, len(grid.rows))
            style: dict[str, Any] = {"ha": "center", "va": "top", "color": colour("ink")}
            ax.annotate("head", spot, (0, -22), textcoords="offset points", size=size, **style)
        return figure

    wide = int(min(900, max(420, margin + 58 * len(grid.columns))))
    return chart(name, label, draw, wide=wide)


def ranking(
    curves: Sequence[LengthCurve], n: int, reference: dict[int | None, float], other: str
) -> str:
    """The layers of one scope, the largest median at length n first.

    `reference` has the medians of another study at that length, by layer, and `other` its name.
    """
    here = [curve for curve in curves if n in curve.spreads]
    ranked = sorted(here, key=lambda curve: -curve.spreads[n].middle)
    head = ["layer", "median σ", "over samples", "known to lie in", "growth"]
    if reference:
        head += [f"median σ, {other}", "ratio"]
    lines = []
    for curve in ranked:
        spread = curve.spreads[n]
        law = curve.law
        line = [
            layer_name(curve.layer),
            digits(spread.middle),
            "one" if spread.count == 1 else interval(spread.least, spread.most),
            interval(spread.low, spread.high),
            "–" if law is None else power(law.alpha),
        ]
        if reference:
            there = reference.get(curve.layer)
            line += [digits(there), digits(spread.middle / there) if there else "–"]
        lines.append(line)
    return table(head, lines, "Layers by sensitivity")


def growth_part(curves: Sequence[LengthCurve], reference: Sequence[LengthCurve], name: str) -> str:
    """sigma(n) and R(n) of every layer, one view per scope; the table is their legend."""
    scopes = list(dict.fromkeys(curve.scope for curve in curves))
    first = main_scope(scopes)
    views = []
    for i, scope in enumerate(scopes):
        here = [curve for curve in curves if curve.scope == scope]
        there = [curve for curve in reference if curve.scope == scope]
        hidden = "" if scope == first else " hidden"
        note = ""
        if len(here) > MANY_CURVES:
            note = f"<p>The {MANY_CURVES} of {len(here):,} layers with the largest median σ.</p>"
            here = sorted(here, key=lambda curve: -curve.last.middle)[:MANY_CURVES]
        # One length is a number, not a curve.
        several = len({n for curve in here for n in curve.spreads}) > 1
        drawn = _charts(here, there, name, i) if several else ""
        views.append(
            f'<div class="view" data-view="{escape(shown(scope, 30))}"{hidden}>'
            f'{note}<div class="charts">{drawn}</div>{_laws(here)}</div>'
        )
    return f'<div class="part" data-part="views" data-label="map">{"".join(views)}</div>'


def main_scope(scopes: Sequence[str]) -> str:
    """The scope that a page shows first."""
    return "attention" if "attention" in scopes else scopes[0]


def curve_chart(
    name: str,
    label: str,
    lines: Sequence[Curve],
    *,
    heights: tuple[int, int],
    wide: int,
    ylabel: str,
    about: str = "",
    others: Sequence[Curve] = (),
    guides: bool = True,
) -> str:
    """Draw curves over length on log axes; empty if no value is positive.

    `heights` are those on a window and on a telephone; `others` are curves without marks, which are
    not among those to choose; `guides` are powers of n below the curves.
    """
    others = [curve for curve in others if curve.x]
    drawn = [*others, *(curve for curve in lines if curve.x)]
    lengths = sorted({int(n) for curve in drawn for n in curve.x})
    values = [y for curve in drawn for part in (curve.spread or (curve.y,)) for y in part]

    def draw(width: int, marks: Marks) -> Figure:
        figure, ax = charts.figure_of(
            width, heights[width <= 400], left=58, bottom=48, right=46 if guides else 12
        )
        ax.set_yscale("log")
        charts.length_ticks(ax, lengths)
        charts.curves(ax, lines, marks)
        for curve in others:
            charts.curves(ax, [curve], {})
        if guides:
            charts.finish_growth(ax, lengths, values, 12)
        else:
            charts.log_ticks(ax.yaxis, values, margin=1.05)
            ax.set_xlabel("n, tokens")
        ax.set_ylabel(ylabel)
        return figure

    return chart(name, label, draw, wide=wide, about=about) if values else ""


def curve_of(curve: LengthCurve, k: int, name: str, tint: str) -> Curve:
    """One map as curve k of a chart: medians, ranges over samples, and its law."""
    # A zero has no place on a log axis.
    kept = {n: s for n, s in curve.spreads.items() if s.least > 0 and s.most < math.inf}
    law = curve.law
    end = "no law: too few lengths"
    if law is not None:
        end = f"law: {power(law.alpha)}, exponent in [{exponent(law.low)}, {exponent(law.high)}]"
    return Curve(
        name=name,
        x=list(kept),
        y=[spread.middle for spread in kept.values()],
        spread=([s.least for s in kept.values()], [s.most for s in kept.values()]),
        colour=tint,
        marker=marker(k)[0],
        law=None if law is None else (law.C, law.alpha),
        titles=[f"{s.title(layer_name(curve.layer), n)}\n{end}" for n, s in kept.items()],
    )


def _charts(
    curves: Sequence[LengthCurve], reference: Sequence[LengthCurve], name: str, i: int
) -> str:
    """sigma(n) and R(n) of the layers of one scope."""
    tints = [series(k, len(curves)) for k in range(len(curves))]
    lines = [
        curve_of(curve, k, layer_name(curve.layer), tints[k]) for k, curve in enumerate(curves)
    ]
    others = []
    for curve in reference:
        kept = {n: s.middle for n, s in curve.spreads.items() if 0 < s.middle < math.inf}
        others.append(Curve(name, list(kept), list(kept.values()), "muted", line="--"))
    scope = shown(curves[0].scope, 30)
    sigma = curve_chart(
        f"growth-{i}",
        f"Median σ of {scope} against length on log axes, one curve per layer with its law.",
        lines,
        heights=(380, 320),
        wide=600,
        ylabel="median σ",
        about=f"σ(n): medians, ranges and fitted laws{f'; dashed: {name}' if others else ''}",
        others=others,
    )
    radii = []
    for k, curve in enumerate(curves):
        kept = {n: r for n, r in curve.radius.items() if 0 < r < math.inf}
        layer = layer_name(curve.layer)
        radii.append(
            Curve(
                name=layer,
                x=list(kept),
                y=list(kept.values()),
                colour=tints[k],
                marker=marker(k)[0],
                titles=[f"{layer}, n = {n:,}\nR = {digits(r, 4)}" for n, r in kept.items()],
            )
        )
    return sigma + curve_chart(
        f"radius-{i}",
        "R(n), the largest norm of a token at the map's input, against length.",
        radii,
        heights=(380, 280),
        wide=480,
        ylabel="R",
        about="R(n): largest norm of a token",
        guides=False,
    )


def _laws(curves: Sequence[LengthCurve]) -> str:
    head = ["layer", "median σ at the largest n"]
    head += ["exponent α", "95 % interval", "rms in log σ", "R(n)"]
    lines = []
    for k, curve in enumerate(curves):
        law = curve.law
        ends = (min(curve.radius), max(curve.radius))
        fitted = ["–", "–", "–"]
        if law is not None:
            within = f"[{exponent(law.low)}, {exponent(law.high)}]"
            fitted = [exponent(law.alpha), within, f"{law.rms:.2f}"]
        radii = " → ".join(digits(curve.radius[n]) for n in dict.fromkeys(ends))
        name = swatch(series(k, len(curves)), marker(k)[1], layer_name(curve.layer))
        lines.append([name, digits(curve.last.middle), *fitted, radii])
    return table(head, lines, "Growth of every layer", raw=True)


def token_part(strip: Strip) -> str:
    """The tokens of one map, by their norms in the right and the left singular vector."""
    found = ""
    for side, title in SIDES.items():
        norms = getattr(strip, side)
        most = max(norms) or 1
        # The square root of the norm: beside a token that carries nearly all, others stay visible.
        tokens = "".join(
            f'<span class="token c{level(math.sqrt(norm / most))}">{escape(word)}</span>'
            for word, norm in zip(strip.words, norms, strict=True)
        )
        found += (
            f'<h3>{title}</h3><div class="strip" data-side="{side}" role="group" tabindex="0" '
            f'aria-label="{title}. Arrow keys move over the tokens.">{tokens}</div>'
        )
    return (
        f'<div class="part" data-part="tokens"><p class="note about">{escape(about(strip))}</p>'
        f"{found}</div>"
    )


def about(strip: Strip) -> str:
    """Which tokens a strip shows."""
    row = strip.row
    cut = "" if strip.whole else f", its first {len(strip.words):,} tokens"
    return (
        f"{layer_name(row.layer)}, {_map_name(strip)}: σ = {digits(row.value, 4)} at "
        f"n = {row.n:,}, sample {row.sample}{cut}."
    )


def _map_name(strip: Strip) -> str:
    head = strip.row.head
    return shown(strip.row.scope, 30) + ("" if head is None else f", head {head}")


def token_data(strips: Sequence[Strip], first: Strip) -> dict[str, object]:
    """The strips for the script; the words of a sample, which maps share, are stored once."""
    return {
        "words": {_sample(strip): strip.words for strip in strips},
        "first": strips.index(first),
        "unit": NORM_UNIT,
        "strips": [
            {
                "layer": layer_name(strip.row.layer),
                "map": _map_name(strip),
                "about": about(strip),
                "words": _sample(strip),
                "right": strip.right,
                "left": strip.left,
            }
            for strip in strips
        ],
    }


def _sample(strip: Strip) -> str:
    # Long samples are cut, and not always at the same token.
    return f"{strip.row.n}-{strip.row.sample}-{len(strip.words)}"
