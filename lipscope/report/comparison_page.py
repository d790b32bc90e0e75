"""Several studies on one page: a table, growth curves in one chart, and ranked differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lipscope.report.charts import Cell, Curve, Grid
from lipscope.report.comparison import (
    Comparison,
    Digest,
    compare,
    differing,
    line,
    map_name,
    mean_law,
    shared,
    telling,
    verdict,
)
from lipscope.report.content import Map
from lipscope.report.document import Page, section, swatch, table
from lipscope.report.formats import digits, exponent_range, layer_name, power, shown
from lipscope.report.palette import distinct, level, marker
from lipscope.report.study_charts import curve_chart, grid_chart

MOST = 12
"""The most curves in a chart, columns of a table and frames of a heat map."""

NAMED = 4
"""Up to this number of studies, columns are headed by their names; beyond, by numbers."""


def comparison_html(digests: Sequence[Digest]) -> str:
    """The page as a string."""
    found = compare(digests)
    chosen = _chosen(found)
    body = _studies(found)
    data: dict[str, object] = {}
    if found.maps:
        body += _growth(found, chosen) + _ranked(found, chosen)
        grids, limit = _frames(found, chosen)
        if grids:
            body += _ratios(found, grids, limit)
            data["ratio"] = {
                "label": "study",
                "names": [_name(found, i) for i in chosen if i != found.first],
                "chosen": 0,
                "frames": [grid.frame() for grid in grids],
            }
    count = f"{len(found.names):,} studies"
    return Page(
        title=" against ".join(found.names) if len(found.names) == 2 else count,
        kind="lipscope comparison",
        subtitle=shared([one.facts for one in found.digests]),
        headline=verdict(found),
        body=body + _facts(found),
        data=data,
    ).html()


def _chosen(found: Comparison) -> list[int]:
    """The studies that charts show: all, or the first one and others from all over the ranking."""
    if len(found.valued) <= MOST:
        return found.valued
    others = [i for i in found.ranked() if found.mean(i) is not None and i != found.first]
    # Evenly over the ranking, with both ends.
    spaced = [others[round(k * (len(others) - 1) / (MOST - 2))] for k in range(MOST - 1)]
    return [found.first, *spaced]


def _name(found: Comparison, i: int) -> str:
    """The name of a study, with a number where there are too many names for a row of headings."""
    return f"{i + 1}. {found.names[i]}" if len(found.names) > NAMED else found.names[i]


def _studies(found: Comparison) -> str:
    what = telling([one.facts for one in found.digests])
    text = f"What differs: {', '.join(what)}." if what else "All settings are the same."
    at = "" if found.n is None else f" at n = {found.n:,}"
    answer = (
        f"{text} σ is the geometric mean, over {len(found.maps)} common maps{at}, of the medians "
        "over samples; ratios are to the first study given."
    )
    head = ["study", "mean σ", "ratio", "largest median σ", "exponent α", "rows", "without value"]
    lines = []
    for i in found.ranked():
        own = found.digests[i]
        first = " (first)" if i == found.first else ""
        note = f" {own.note}" if own.note else ""
        name = f"{_name(found, i)}{first}{note}"
        lines.append([name, *line(found, i), f"{own.rows:,}", f"{own.failed:,}"])
    studies = table(head, lines, "Studies by mean σ")
    return section("comparison", "What is different?", answer, studies)


def _growth(found: Comparison, chosen: Sequence[int]) -> str:
    text = "Each curve is one study: the geometric mean over the layers of a map, or one layer."
    if len(chosen) < len(found.names):
        text += f" {len(chosen)} of {len(found.names):,} studies are drawn, across the ranking."
    views: dict[str, list[Map]] = {}
    for scope in dict.fromkeys(scope for scope, _ in found.maps):
        views[f"{shown(scope, 30)}, mean over layers"] = [on for on in found.maps if on[0] == scope]
    # Each view is a chart in the page: of many maps, those that differ most.
    single = [on for on, _ in found.differences()] if len(found.maps) > MOST else found.maps
    views |= {map_name(on): [on] for on in single[:MOST]}
    first = next((name for name in views if name.startswith("attention")), next(iter(views)))
    drawn = "".join(
        f'<div class="view" data-view="{escape(name)}"{"" if name == first else " hidden"}>'
        f"{_curves(found, chosen, maps, name, k)}</div>"
        for k, (name, maps) in enumerate(views.items())
    )
    part = f'<div class="part" data-part="views" data-label="map" data-series="study">{drawn}</div>'
    return section("growth", "How does σ grow with length?", text, part)


def _curves(
    found: Comparison, chosen: Sequence[int], maps: Sequence[Map], name: str, k: int
) -> str:
    lines = []
    legend = []
    for j, i in enumerate(chosen):
        points = found.curve(i, maps)
        # A single map has the law of its study, which was fitted to all samples, not to medians.
        law = mean_law(points) if len(maps) > 1 else found.digests[i].laws.get(maps[0])
        text = _name(found, i)
        (tint, dashes), (shape, sign) = distinct(j), marker(j)
        end = "" if law is None else f"\nlaw: {power(law.alpha)}"
        lines.append(
            Curve(
                name=text,
                x=list(points),
                y=list(points.values()),
                colour=tint,
                marker=shape,
                line=dashes,
                law=None if law is None else (law.C, law.alpha),
                titles=[
                    f"{text}\n{name}, n = {n:,}: σ = {digits(y, 4)}{end}" for n, y in points.items()
                ],
            )
        )
        alpha = "–" if law is None else exponent_range(law.alpha, law.low, law.high)
        last = digits(points[max(points)]) if points else "–"
        legend.append([swatch(tint, sign, text), last, alpha])
    label = f"σ of {name} against length on log axes, one curve per study."
    drawn = curve_chart(f"curves-{k}", label, lines, heights=(400, 320), wide=760, ylabel="σ")
    if not drawn:
        return "<p>No positive value.</p>"
    head = ["study", "σ at its largest n", "exponent α [95 %]"]
    return drawn + table(head, legend, name, raw=True)


def _ranked(found: Comparison, chosen: Sequence[int]) -> str:
    differences = found.differences()
    on, most = differences[0]
    few = len(found.names) <= NAMED
    answer = (
        f"Median σ over samples at n = {found.n:,}, map by map, the largest ratio between two "
        f"studies first: {digits(most)} in {map_name(on)}. Colours compare with the first study: "
        "blue is smoother, orange more sensitive."
    ) + ("" if few else " Columns are numbered as above.")
    ratios = {
        on: [found.at(i, on) / found.at(found.first, on) for i in chosen] for on in found.maps
    }
    # Never below 10 %: differences of rounding must not look like differences.
    limit = max([0.1, *(abs(math.log(x)) for line in ratios.values() for x in line)])
    lines = []
    for on, most in differences:
        cells = [
            f'<span class="ratio v{_step(ratio, limit)}">{digits(found.at(i, on))}</span>'
            for i, ratio in zip(chosen, ratios[on], strict=True)
        ]
        lines.append([escape(map_name(on)), *cells, digits(most)])
    head = ["map", *(found.names[i] if few else str(i + 1) for i in chosen), "largest / smallest"]
    maps = table(head, lines, "Maps by difference", raw=True)
    return section("ranked", "Where do they differ most?", answer, maps)


def _step(ratio: float, limit: float) -> int:
    """The level of a ratio on the ramp around 1; limit is the logarithm at either end."""
    return level(0.5 + math.log(ratio) / limit / 2)


def _frames(found: Comparison, chosen: Sequence[int]) -> tuple[list[Grid], float]:
    """For each study but the first, its ratio to the first one over layers and heads, if any."""
    assert found.n is not None
    cells = [found.digests[i].cells.get(found.n, {}) for i in chosen]
    common = set.intersection(*(set(own) for own in cells))
    common = {at for at in common if all(0 < own[at] < math.inf for own in cells)}
    heads = sorted({c for _, c in common if c.isdigit()}, key=int)
    scopes = [c for c in dict.fromkeys(c for _, c in cells[0]) if not c.isdigit()]
    scopes = [c for c in scopes if any(at[1] == c for at in common)]
    if not heads:
        return [], 0.0
    layers = sorted({at for at, _ in common}, key=lambda at: (at is None, at or 0))
    columns = [*heads, *([" "] if scopes else []), *scopes]
    limit = max([0.1, *(abs(math.log(own[at] / cells[0][at])) for own in cells for at in common)])

    def cell(
        own: dict[tuple[int | None, str], float], layer: int | None, column: str, name: str
    ) -> Cell | None:
        if (layer, column) not in common:
            return None
        mine = own[layer, column]
        first = cells[0][layer, column]
        where = f"head {column}" if column.isdigit() else column
        title = (
            f"{layer_name(layer)}, {where}, n = {found.n:,}\n"
            f"{name}: {digits(mine / first)} × {found.names[found.first]}\n"
            f"{digits(mine, 4)} against {digits(first, 4)}"
        )
        return Cell(digits(mine / first, 2), _step(mine / first, limit), title)

    grids = [
        Grid(
            rows=[layer_name(layer) for layer in layers],
            columns=columns,
            cells=[[cell(own, layer, c, found.names[i]) for c in columns] for layer in layers],
            ramp="v",
        )
        for i, own in zip(chosen, cells, strict=True)
        if i != found.first
    ]
    return grids, limit


def _ratios(found: Comparison, grids: list[Grid], limit: float) -> str:
    drawn = grid_chart(grids[0], "ratio", "Ratio of σ to the first study over layers and heads.")
    bar = (
        f'<p class="scale"><span>{digits(math.exp(-limit))}</span><span class="bar ratio"></span>'
        f"<span>{digits(math.exp(limit))}</span><span>ratio to the first study</span></p>"
    )
    return section(
        "heads",
        "Which heads differ?",
        f"σ of a study divided by that of {found.names[found.first]}, at n = {found.n:,}.",
        f'<div class="part" data-part="frames" data-frames="ratio">{drawn}</div>',
        bar,
    )


def _facts(found: Comparison) -> str:
    names = differing([one.facts for one in found.digests])
    lines = [
        [
            name if len(found.names) <= NAMED else str(i),
            shown(own.place, 40) or "–",
            *(own.facts[fact] for fact in names),
        ]
        for i, (name, own) in enumerate(zip(found.names, found.digests, strict=True), start=1)
    ]
    facts = table(["study", "directory", *names], lines, "Facts that differ")
    return section("facts", "What was measured?", "Facts that differ between the studies.", facts)
