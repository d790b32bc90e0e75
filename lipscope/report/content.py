"""The data behind the page of a study: plain lists and numbers, with all texts made safe."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

from lipscope._files import for_terminal
from lipscope._types import UserError
from lipscope.study.records import COLUMNS, Row
from lipscope.study.study import SIGMA, Study

STRIP_TOKENS, ALL_STRIPS = 2048, 300_000
"""Maximum number of tokens shown per sample, and in all."""

TEXT_COLUMNS = ("probe", "scope", "kind", "norm", "status", "dtype", "device")
BOUND_KINDS = ("upper", "lower")

Map = tuple[str, int | None]


def shown(text: str, width: int = 200) -> str:
    """Untrusted text in one line, with invisible and bidirectional characters spelled out."""
    return for_terminal(text, width)


def layer_name(layer: int | None) -> str:
    return "model" if layer is None else f"layer {layer}"


def content(study: Study) -> dict[str, Any]:
    """Everything the page draws of one study."""
    return {
        "name": shown(study.info.about.model, 60),
        "heat": heat(study),
        "growth": growth(study),
        "tokens": tokens(study),
        "bounds": bounds(study),
        "table": table(study),
    }


def cell(rows: list[Row]) -> list[float]:
    """Median over samples, the interval it lies in, the range over samples, and their number."""
    # A median does not decrease in any of its members: where their bounds hold, it lies between the
    # median of the lower bounds and that of the upper ones.
    values = [row.value for row in rows]
    low, high = median(row.lower for row in rows), median(row.upper for row in rows)
    return [median(values), low, high, min(values), max(values), len(values)]


def heat(study: Study) -> dict[str, Any]:
    """One table per length: layers by heads, and a column for each scope without heads."""
    found: dict[tuple[int, str, str], list[Row]] = defaultdict(list)
    for row in study.sigma:
        column = row.scope if row.head is None else f"head {row.head}"
        found[row.n, layer_name(row.layer), shown(column, 30)].append(row)
    layers = sorted(
        {row.layer for row in study.sigma}, key=lambda layer: (layer is None, layer or 0)
    )
    heads = sorted({row.head for row in study.sigma if row.head is not None})
    scopes = dict.fromkeys(scope for scope, _ in study.maps if scope != "heads")
    names, columns = [layer_name(layer) for layer in layers], [f"head {head}" for head in heads]
    # An empty column separates single heads from the scopes of a whole layer.
    gap = [" "] if heads and scopes else []
    columns += gap + [shown(scope, 30) for scope in scopes]
    lengths = sorted({row.n for row in study.sigma})
    cells = [
        [
            [
                cell(found[key]) if (key := (n, name, column)) in found else None
                for column in columns
            ]
            for name in names
        ]
        for n in lengths
    ]
    return {"lengths": lengths, "layers": names, "columns": columns, "cells": cells}


def growth(study: Study) -> list[dict[str, Any]]:
    """Per map: medians over samples with ranges, the fitted growth law, and R(n)."""
    curves = []
    for scope, layer in study.maps:
        by_length: dict[int, list[Row]] = defaultdict(list)
        for row in study.largest(scope, layer):
            by_length[row.n].append(row)
        law = study.law(scope, layer)
        curves.append(
            {
                "scope": shown(scope, 30),
                "layer": layer_name(layer),
                "n": sorted(by_length),
                "cells": [cell(by_length[n]) for n in sorted(by_length)],
                "law": law and [law.C, law.alpha, law.low, law.high, law.rms],
                "R": [median(row.radius for row in by_length[n]) for n in sorted(by_length)],
            }
        )
    return curves


def tokens(study: Study) -> dict[str, Any]:
    """Per map: the tokens of the sample of largest sigma, at the largest length that fits."""
    maps = study.maps
    limit = max(1, min(STRIP_TOKENS, ALL_STRIPS // max(1, len(maps))))
    words: dict[str, list[str]] = {}
    strips = []
    for scope, layer in maps:
        rows = study.largest(scope, layer)
        n = max((row.n for row in rows if row.n <= limit), default=min(row.n for row in rows))
        row = max((row for row in rows if row.n == n), key=lambda row: row.value)
        try:
            found = study.tokens_of(row)[:limit]
        except UserError:
            continue  # no token norms were saved for this map
        sample = f"{row.n}-{row.sample}"
        words[sample] = [shown(token.token, 40) for token in found]
        strips.append(
            {
                "scope": shown(scope, 30),
                "layer": layer_name(layer),
                "head": row.head,
                "n": row.n,
                "sample": row.sample,
                "value": row.value,
                "words": sample,
                "right": [round(token.right, 4) for token in found],
                "left": [round(token.left, 4) for token in found],
            }
        )
    return {"words": words, "strips": strips}


def bounds(study: Study) -> list[dict[str, Any]]:
    """Per map: the largest sigma among the rows with bounds, and these bounds."""
    around: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in study.rows:
        if row.probe != SIGMA and row.kind in BOUND_KINDS and row.norm == "2" and not row.failing:
            around[row.scope, row.layer, row.head, row.n, row.sample].append(row)
    best: dict[Map, Row] = {}
    for row in study.sigma:
        key, old = (row.scope, row.layer), best.get((row.scope, row.layer))
        if row[1:6] in around and (old is None or (row.n, row.value) > (old.n, old.value)):
            best[key] = row
    return [
        {
            "scope": shown(scope, 30),
            "layer": layer_name(layer),
            "n": row.n,
            "sigma": [row.value, row.lower, row.upper],
            "marks": [[shown(mark.probe, 60), mark.kind, mark.value] for mark in around[row[1:6]]],
        }
        for (scope, layer), row in ((at, best[at]) for at in study.maps if at in best)
    ]


def table(study: Study) -> dict[str, Any]:
    """All rows, by column; repeated texts are stored once and referenced by index."""
    columns = dict(zip(COLUMNS, zip(*study.rows, strict=True), strict=True)) if study.rows else {}
    found: dict[str, Any] = {}
    for name, values in columns.items():
        if name in TEXT_COLUMNS:
            known = {text: i for i, text in enumerate(dict.fromkeys(values))}
            found[name] = {
                "texts": [shown(text, 300) for text in known],
                "at": [known[text] for text in values],
            }
        else:
            found[name] = list(values)
    return {"columns": list(COLUMNS), "count": len(study.rows), "values": found}
