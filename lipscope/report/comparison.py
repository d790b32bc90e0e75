"""Several studies compared, on a terminal and on a page: what differs, and where they part most.

A study may hold a hundred thousand rows, and a thousand studies may be compared: each is reduced
to its medians first (`digest`), and everything else works with those.
"""

from __future__ import annotations

import math
import os.path
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lipscope._types import UserError
from lipscope.report.charts import Cell, Curve, Grid
from lipscope.report.content import Map, require_drawable
from lipscope.report.document import Page, section, swatch, table
from lipscope.report.formats import (
    counted,
    digits,
    exponent,
    exponent_range,
    layer_name,
    power,
    shown,
    text_table,
)
from lipscope.report.palette import distinct, level, marker
from lipscope.report.study_charts import curve_chart, grid_chart
from lipscope.report.words import warning
from lipscope.study.growth import Growth, fit
from lipscope.study.study import Study

PRETRAINED = "pretrained"

MOST = 12
"""The most curves in a chart, columns of a table and frames of a heat map."""

NAMED = 4
"""Up to this number of studies, columns are headed by their names; beyond, by numbers."""

Facts = dict[str, str]
Place = tuple[int | None, str]
"""A layer, and the name of a head or scope."""


def facts(study: Study) -> Facts:
    """What was measured, in words, the most telling fact first."""
    about = study.info.about
    identity = study.info.identity
    seed = about.random_init
    found = {
        "model": shown(about.model),
        "weights": PRETRAINED if seed is None else f"random weights (seed {seed})",
        "revision": shown(identity.revision or "none", 20),
        "text": shown(about.text, 60),
        "special tokens": "special tokens" if identity.special_tokens else "no special tokens",
        "dtype": shown(identity.dtype, 20),
        "device": shown(about.device, 20),
        "gap": "no gap" if identity.gap is None else f"gap {identity.gap:g}",
        "tolerance": f"tol {identity.tol:g}",
        "seed": f"seed {identity.seed}",
    }
    # Digests tell apart what has one name: two checkpoints of a directory, two versions of a file.
    return found | {
        "digest of the weights": f"weights {identity.weights[:8]}",
        "digest of the text": f"text {identity.text[:8]}",
        "configuration": f"configuration {identity.config[:8]}",
    }


def labels(studies: Sequence[Study]) -> list[str]:
    """A name for each study that says what differs."""
    found = [facts(study) for study in studies]
    places = ["" if study.directory is None else study.directory.name for study in studies]
    return names(found, places)


def names(found: Sequence[Facts], places: Sequence[str]) -> list[str]:
    """A name for each study out of the facts that differ, and its place if they do not suffice."""
    chosen = telling(found)
    models = [own["model"] for own in found]
    if len(set(models)) > 1 and all(map(os.path.isabs, models)):
        # Checkpoints of one run have long paths, of which only the end differs. A run beside its
        # own checkpoints: both keep the name of the run.
        folder = os.path.commonpath(models)
        folder = os.path.dirname(folder) if folder in models else folder
        models = [os.path.relpath(model, folder) for model in models]
    found = [{**own, "model": model} for own, model in zip(found, models, strict=True)]
    given = [", ".join(own[name] for name in chosen) or own["model"] for own in found]
    repeated = Counter(given)
    given = [
        f"{text}, {shown(place, 40)}" if repeated[text] > 1 and place else text
        for text, place in zip(given, places, strict=True)
    ]
    repeated = Counter(given)
    return [
        f"{text} ({given[: i + 1].count(text)})" if repeated[text] > 1 else text
        for i, text in enumerate(given)
    ]


def telling(found: Sequence[Facts]) -> list[str]:
    """The fewest facts, from the most telling on, that tell apart what differs."""
    chosen: list[str] = []
    groups = 1
    for name in differing(found):
        # A fact that splits no group further, such as a digest beside a name, adds only length.
        split = len({tuple(own[key] for key in (*chosen, name)) for own in found})
        if split > groups:
            chosen.append(name)
            groups = split
    return chosen


def shared(found: Sequence[Facts]) -> str:
    """Model, weights, text and dtype, as far as all studies have the same."""
    same = {name: own for name, own in found[0].items() if all(f[name] == own for f in found)}
    # Pretrained weights are what a reader expects; random ones are worth a word.
    told = {name: text for name, text in same.items() if text != PRETRAINED}
    what, on = (
        ", ".join(told[name] for name in pair if name in told)
        for pair in (("model", "weights"), ("text", "dtype"))
    )
    return " on ".join(filter(None, (what, on)))


def differing(found: Sequence[Facts]) -> list[str]:
    """The names of the facts that differ."""
    return [name for name in found[0] if len({own[name] for own in found}) > 1]


@dataclass(frozen=True)
class Digest:
    """A study reduced to medians over samples: by map (for heads, the largest one) and by cell.

    `place` is the name of its directory, `note` what a reader must know, such as missing rows.
    """

    facts: Facts
    place: str
    medians: dict[Map, dict[int, float]]
    cells: dict[int, dict[Place, float]]
    laws: dict[Map, Growth]
    rows: int
    failed: int
    note: str

    @property
    def lengths(self) -> set[int]:
        """The lengths with a value."""
        return {n for found in self.medians.values() for n in found}


def digest(study: Study, cells: bool = True) -> Digest:
    """Reduce a study; `cells` keeps the medians of single heads as well."""
    require_drawable(study)
    medians: dict[Map, dict[int, float]] = {}
    for at in study.maps:
        by_length: dict[int, list[float]] = defaultdict(list)
        for row in study.largest(*at):
            by_length[row.n].append(row.value)
        medians[at] = {n: median(values) for n, values in sorted(by_length.items())}
    places: dict[int, dict[Place, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in study.sigma if cells else ():
        # Heads are columns by number, maps of a whole layer by name: the two never coincide.
        column = shown(row.scope, 30) if row.head is None else str(row.head)
        places[row.n][row.layer, column].append(row.value)
    return Digest(
        facts=facts(study),
        place="" if study.directory is None else study.directory.name,
        medians=medians,
        cells={n: {at: median(v) for at, v in here.items()} for n, here in places.items()},
        laws={at: law for at in study.maps if (law := study.law(*at)) is not None},
        rows=len(study.rows),
        failed=len(study.failed),
        note=warning(study),
    )


@dataclass(frozen=True)
class Comparison:
    """Studies with names, the greatest common length, and the maps positive in all of them there.

    `n` is None if there is no common length.
    """

    digests: list[Digest]
    names: list[str]
    n: int | None
    maps: list[Map]

    def at(self, i: int, on: Map) -> float:
        """sigma of study i on a common map at the common length."""
        assert self.n is not None
        return self.digests[i].medians[on][self.n]

    @property
    def valued(self) -> list[int]:
        """The studies with values; one whose jobs all failed must not spoil the comparison."""
        return [i for i, one in enumerate(self.digests) if one.medians]

    @property
    def first(self) -> int:
        """The study that the others are compared with: the first one given that has values."""
        return next(iter(self.valued), 0)

    def mean(self, i: int) -> float | None:
        """The geometric mean of sigma over the common maps; None if there is none."""
        if not self.maps or not self.digests[i].medians:
            return None
        return _mean([self.at(i, on) for on in self.maps])

    def ranked(self) -> list[int]:
        """The studies by that mean, the largest first."""
        return sorted(range(len(self.names)), key=lambda i: -(self.mean(i) or 0.0))

    def differences(self) -> list[tuple[Map, float]]:
        """The common maps with the largest sigma / the smallest, the largest ratio first."""
        spread = []
        for on in self.maps:
            values = [self.at(i, on) for i in self.valued]
            spread.append((on, max(values) / min(values)))
        return sorted(spread, key=lambda item: -item[1])

    def as_dict(self) -> dict[str, Any]:
        """The studies, and sigma of every common map in each of them, as plain values."""
        studies = [
            {"name": name, "directory": one.place, "mean": self.mean(i), "note": one.note}
            for i, (name, one) in enumerate(zip(self.names, self.digests, strict=True))
        ]
        maps = [
            {
                "scope": on[0],
                "layer": on[1],
                "sigma": [
                    self.at(i, on) if i in self.valued else None for i in range(len(studies))
                ],
                "ratio": ratio,
            }
            for on, ratio in self.differences()
        ]
        return {"n": self.n, "studies": studies, "maps": maps}

    def curve(self, i: int, maps: Sequence[Map]) -> dict[int, float]:
        """Per length, the geometric mean of study i over maps that it has there."""
        own = self.digests[i].medians
        lengths = sorted(set.intersection(*(set(own.get(on, {})) for on in maps)) if maps else ())
        found = {n: [own[on][n] for on in maps] for n in lengths}
        return {n: _mean(v) for n, v in found.items() if all(0 < x < math.inf for x in v)}


def compare(digests: Iterable[Digest]) -> Comparison:
    """Find what the studies have in common."""
    found = list(digests)
    if len(found) < 2:
        raise UserError("a comparison needs at least two studies; give more directories")
    given = names([one.facts for one in found], [one.place for one in found])
    valued = [one for one in found if one.medians]
    lengths = set.intersection(*(one.lengths for one in valued)) if len(valued) > 1 else set()
    # A length may be common to all studies without any map being measured there in all of them.
    for n in sorted(lengths, reverse=True):
        maps = [
            on
            for on in valued[0].medians
            if all(0 < one.medians.get(on, {}).get(n, 0.0) < math.inf for one in valued)
        ]
        if maps:
            return Comparison(found, given, n, maps)
    return Comparison(found, given, max(lengths, default=None), [])


def _mean(values: Sequence[float]) -> float:
    # Geometric: twice and half as large cancel.
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _mean_law(curve: dict[int, float]) -> Growth | None:
    """The growth law of a mean over layers."""
    try:
        return fit("mean", None, list(curve.items()))
    except UserError:
        return None


def _map_name(on: Map) -> str:
    return f"{layer_name(on[1])}, {shown(on[0], 30)}"


def verdict(found: Comparison) -> str:
    """The comparison in a sentence or two."""
    if found.n is None:
        return "The studies with values have no length in common, so that they cannot be compared."
    if not found.maps:
        return f"At n = {found.n:,} the studies have no map with a positive σ in common."
    ranked = [i for i in found.ranked() if found.mean(i) is not None]
    top = ranked[0]
    last = ranked[-1]
    high = found.mean(top)
    low = found.mean(last)
    assert high is not None and low is not None
    over = f"at n = {found.n:,}, over the {counted(len(found.maps), 'map')} that all studies have"
    # Three digits would show such a ratio as 1.00.
    if high / low < 1.005:
        return f"No difference in the geometric mean {over}."
    text = (
        f"“{found.names[last]}” is {digits(high / low)} × smoother than “{found.names[top]}”: "
        f"geometric mean of σ {over}."
    )
    on, most = found.differences()[0]
    return f"{text} The largest difference is in {_map_name(on)}: a factor of {digits(most)}."


def comparison_table(found: Comparison) -> RenderableType:
    """What `lipscope compare` prints: a line per study, the largest sigma first."""
    facts = [one.facts for one in found.digests]
    heads = ("study", "σ, mean", "× first", "largest median σ", "α")
    lines = [(found.names[i], *_line(found, i)) for i in found.ranked()]
    given = zip(found.names, found.digests, strict=True)
    notes = [f"{name}: {one.note}" for name, one in given if one.note]
    what = ", ".join(telling(facts)) or "no setting"
    at = "" if found.n is None else f" at n = {found.n:,}"
    legend = (
        f"σ, mean: geometric mean over {counted(len(found.maps), 'common map')}{at} of the medians "
        f"over samples.\nα: median growth exponent of the maps. What differs: {what}."
    )
    return Group(
        Text(f"{len(found.names):,} studies: {shared(facts)}\n", style="bold"),
        text_table(heads, lines, left=heads[:1], folding=heads[:1]),
        Text(f"\n{legend}", style="dim"),
        Text("\n".join(["", verdict(found), *notes])),
    )


def _line(found: Comparison, i: int) -> tuple[str, str, str, str]:
    """Mean sigma, its ratio to the first study, the largest median and the exponent of study i."""
    mean = found.mean(i)
    first = found.mean(found.first)
    ratio = "–" if mean is None or not first else digits(mean / first)
    own = found.digests[i]
    here = {on: v[found.n] for on, v in own.medians.items() if found.n in v}
    top = max(here, key=lambda on: here[on], default=None)
    largest = "–" if top is None else f"{digits(here[top])} ({layer_name(top[1])})"
    alphas = [law.alpha for law in own.laws.values()]
    return digits(mean), ratio, largest, exponent(median(alphas)) if alphas else "–"


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
        lines.append([name, *_line(found, i), f"{own.rows:,}", f"{own.failed:,}"])
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
    views |= {_map_name(on): [on] for on in single[:MOST]}
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
        law = _mean_law(points) if len(maps) > 1 else found.digests[i].laws.get(maps[0])
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
        f"studies first: {digits(most)} in {_map_name(on)}. Colours compare with the first study: "
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
        lines.append([escape(_map_name(on)), *cells, digits(most)])
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
