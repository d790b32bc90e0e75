"""Two studies side by side: the ratio of their sigmas, map by map and head by head."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from lipscope.report.content import heat, layer_name, shown
from lipscope.study.growth import Growth
from lipscope.study.study import Study


def comparison(first: Study, second: Study) -> dict[str, Any]:
    """Cells of both studies at the largest common length, and a line per common map."""
    lengths = {row.n for row in first.sigma} & {row.n for row in second.sigma}
    if not lengths:
        return {"n": None, "layers": [], "columns": [], "ratios": [], "lines": []}
    n = max(lengths)
    one, two = heat(first), heat(second)
    layers = [name for name in one["layers"] if name in two["layers"]]
    columns = [name for name in one["columns"] if name in two["columns"]]
    left, right = (_medians(table, n) for table in (one, two))
    ratios = [[_ratio(left.get((a, b)), right.get((a, b))) for b in columns] for a in layers]
    return {
        "n": n,
        "layers": layers,
        "columns": columns,
        "ratios": ratios,
        "lines": lines(first, second, n),
    }


def lines(first: Study, second: Study, n: int) -> list[dict[str, Any]]:
    """Per common map: sigma (median over samples, the largest head) and exponent in each study."""
    found, others = [], set(second.maps)
    for scope, layer in (at for at in first.maps if at in others):
        values = [
            [row.value for row in study.largest(scope, layer) if row.n == n]
            for study in (first, second)
        ]
        if not all(values):
            continue
        sigmas = [median(value) for value in values]
        found.append(
            {
                "scope": shown(scope, 30),
                "layer": layer_name(layer),
                "sigma": sigmas,
                "ratio": _ratio(*sigmas),
                "alpha": [_exponent(study.law(scope, layer)) for study in (first, second)],
            }
        )
    return found


def verdict(first: Study, second: Study) -> str:
    """The comparison in a sentence."""
    table = comparison(first, second)
    if table["n"] is None:
        return (
            "The two studies have no length in common at which both have values, so they cannot "
            "be compared."
        )
    known = [line for line in table["lines"] if line["ratio"] is not None]
    if not known:
        return f"At n = {table['n']} the two studies have no map with a positive σ in common."
    ratios = [line["ratio"] for line in known]
    # Ratios are averaged geometrically: twice and half as large cancel.
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    least, most = min(known, key=lambda x: x["ratio"]), max(known, key=lambda x: x["ratio"])
    return (
        f"At n = {table['n']}, over the {len(known)} maps in both studies, σ of the second is "
        f"{mean:.3g} times σ of the first (geometric mean); from {least['ratio']:.3g} "
        f"({least['layer']}, {least['scope']}) to {most['ratio']:.3g} "
        f"({most['layer']}, {most['scope']})."
    )


def differences(first: Study, second: Study) -> list[str]:
    """The settings that the numbers depend on and that differ between the studies."""
    a, b = first.info, second.info
    found = [name.replace("_", " ") for name in a.identity.differences(b.identity)]
    return found + (["model name"] if a.about.model != b.about.model else [])


def _medians(table: dict[str, Any], n: int) -> dict[tuple[str, str], float]:
    cells = table["cells"][table["lengths"].index(n)]
    return {
        (layer, column): cell[0]
        for layer, line in zip(table["layers"], cells, strict=True)
        for column, cell in zip(table["columns"], line, strict=True)
        if cell is not None
    }


def _ratio(first: float | None, second: float | None) -> float | None:
    return second / first if first and second else None


def _exponent(law: Growth | None) -> list[float] | None:
    return None if law is None else [law.alpha, law.low, law.high]
