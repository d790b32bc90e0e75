"""Studies made up for the tests of reports: any rows, any tokens, no model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from lipscope.study.records import Row, SampleTokens, StudyHeader
from lipscope.study.store import Store
from lipscope.study.study import Study
from tests.study.fakes import info, row, sensitivity

HARMLESS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
HOSTILE = (
    "</script><script>window.broken=1</script>",
    '"><img src=x onerror="window.broken=1">',
    "<a href='javascript:window.broken=1'>x</a>",
    "\u202egnirts\u2066\x1b[31m\x00\u2028",
    "]]>--><!--<script>{{7*7}}${7*7}$data",
    "=cmd|' /C calc'!A0",
    "x" * 10_000,
    "\ud800 \u0301\u0301 &lt;b&gt; `$title`",
)


def study(
    place: Path,
    rows: list[Row],
    words: tuple[str, ...] = HARMLESS,
    *,
    right: tuple[float, ...] | None = None,
    identity: dict | None = None,
    **about: object,
) -> Study:
    """A study in a directory, with token norms for every row that has a value."""
    facts = info(**(identity or {}))
    store = Store.create(place, StudyHeader(facts.identity, replace(facts.about, **about)))
    inputs = sorted({(r.n, r.sample) for r in rows})
    store.write_samples(
        SampleTokens(n, s, tuple(words[i % len(words)] for i in range(n))) for n, s in inputs
    )
    norms = [sensitivity(r) for r in rows if not r.failing and r.probe == "sigma"]
    if right is not None:
        norms = [found._replace(right=right) for found in norms]
    store.write(rows, norms)
    store.close()
    return Study.open(place)


def grid(lengths=(8, 16, 32), layers=2, heads=2, samples=2) -> list[Row]:
    """sigma = (1 + layer) sqrt(n), a little more with every sample and less with every head."""
    return [
        row(
            scope,
            layer,
            head,
            n,
            sample,
            value=(1 + layer) * math.sqrt(n) * (1 + sample / 10) / (1 + (head or 0)),
        )
        for n in lengths
        for sample in range(samples)
        for layer in range(layers)
        for scope, head in [("attention", None), *(("heads", h) for h in range(heads))]
    ]


def failed(reason: str = "out of <b>memory</b>") -> Row:
    return row(value=math.nan, lower=0.0, upper=math.inf, status="failed", reason=reason)


def bounded(rows: list[Row], factors: dict[str, float]) -> list[Row]:
    """Upper bounds around every sigma without a head, by name and factor."""
    return [
        r._replace(
            probe=name, kind="upper", value=r.value * by, lower=r.value * by, upper=r.value * by
        )
        for r in rows
        if r.head is None
        for name, by in factors.items()
    ]


def worst_found(rows: list[Row], factor: float) -> list[Row]:
    """The worst input found for every sigma without a head."""
    return [
        r._replace(
            probe="worst found",
            value=r.value * factor,
            lower=r.value * factor,
            upper=r.value * factor * 1.1,
        )
        for r in rows
        if r.head is None
    ]
