"""Several studies compared: what differs, sigma of each on common maps, and where they part most.

A study may hold a hundred thousand rows, and a thousand studies may be compared: each is reduced
to its medians first (`digest`), and everything else works with those.
"""

from __future__ import annotations

import math
import os.path
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lipscope._types import UserError
from lipscope.report.content import Map, require_drawable
from lipscope.report.formats import counted, digits, exponent, layer_name, shown, text_table
from lipscope.report.words import warning
from lipscope.study.growth import Growth, fit
from lipscope.study.study import Study

PRETRAINED = "pretrained"

Facts = dict[str, str]
Place = tuple[int | None, str]
"""A layer, and the name of a head or scope."""


def facts(study: Study) -> Facts:
    """What was measured, in words, the most telling fact first."""
    about = study.info.about
    identity = study.info.identity
    seed = random_seed(study)
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


def random_seed(study: Study) -> int | None:
    """The seed of random weights; None if the weights are those of the model."""
    return study.info.about.random_init


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
    repeated = {text for text, count in Counter(given).items() if count > 1}
    if not repeated:
        return given
    given = [
        f"{text}, {shown(place, 40)}" if text in repeated and place else text
        for text, place in zip(given, places, strict=True)
    ]
    seen: Counter[str] = Counter()
    again = Counter(given)
    final = []
    for text in given:
        seen[text] += 1
        final.append(f"{text} ({seen[text]})" if again[text] > 1 else text)
    return final


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
    laws = {}
    for at in study.maps:
        by_length: dict[int, list[float]] = defaultdict(list)
        for row in study.largest(*at):
            by_length[row.n].append(row.value)
        medians[at] = {n: median(values) for n, values in sorted(by_length.items())}
        law = study.law(*at)
        if law is not None:
            laws[at] = law
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
        laws=laws,
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


def mean_law(curve: dict[int, float]) -> Growth | None:
    """The growth law of a mean over layers."""
    try:
        return fit("mean", None, list(curve.items()))
    except UserError:
        return None


def map_name(on: Map) -> str:
    """A map for readers."""
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
    return f"{text} The largest difference is in {map_name(on)}: a factor of {digits(most)}."


def comparison_table(found: Comparison) -> RenderableType:
    """What `lipscope compare` prints: a line per study, the largest sigma first."""
    title = shared([one.facts for one in found.digests])
    heads = ("study", "σ, mean", "× first", "largest median σ", "α")
    lines = [(found.names[i], *line(found, i)) for i in found.ranked()]
    table = text_table(heads, lines, left=heads[:1], folding=heads[:1])
    notes = [
        f"{name}: {one.note}"
        for name, one in zip(found.names, found.digests, strict=True)
        if one.note
    ]
    what = ", ".join(telling([one.facts for one in found.digests])) or "no setting"
    at = "" if found.n is None else f" at n = {found.n:,}"
    legend = (
        f"σ, mean: geometric mean over {counted(len(found.maps), 'common map')}{at} of the medians "
        f"over samples.\nα: median growth exponent of the maps. What differs: {what}."
    )
    return Group(
        Text(
            f"{counted(len(found.names), 'study').replace('studys', 'studies')}: {title}\n",
            style="bold",
        ),
        table,
        Text(f"\n{legend}", style="dim"),
        Text("\n".join(["", verdict(found), *notes])),
    )


def line(found: Comparison, i: int) -> tuple[str, str, str, str]:
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
