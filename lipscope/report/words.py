"""The answers in plain words, each with its numbers."""

from __future__ import annotations

import math
from collections import Counter
from statistics import median

from lipscope._types import UserError
from lipscope.report.content import bounds, layer_name, shown
from lipscope.report.study_table import certificate, width
from lipscope.study.growth import CONFIDENCE, MIN_LENGTHS, Growth
from lipscope.study.records import Row
from lipscope.study.study import Study, Token

NOTHING = "No value has been measured yet."
TOP_TOKENS = 3

HYPOTHESES = (
    "That probability is over the random starts of the solver. It takes for granted that no input "
    "was chosen with knowledge of the seed, and that the rounding of every product is within four "
    "times the one seen in products with the Jacobian and its transpose."
)


def place(row: Row) -> str:
    where = "the whole model" if row.layer is None else layer_name(row.layer)
    return f"{where}, {shown(row.scope, 30)}" + ("" if row.head is None else f", head {row.head}")


def headline(study: Study) -> str:
    """One sentence."""
    if not study.sigma:
        return "Every measurement failed: there is no value to show." if study.failed else NOTHING
    row = study.peak()
    return (
        f"At {row.n} tokens of this text, the roughest place amplifies a small change of its input "
        f"up to {row.value:.3g} times."
    )


def tiles(study: Study) -> list[tuple[str, str, str]]:
    """(what, number, where) of the four numbers to remember."""
    if not study.sigma:
        return []
    row, law = study.peak(), peak_law(study)
    gap = widest(study)
    have = "lower" if any(math.isinf(row.upper) for row in study.sigma) else "upper"
    return [
        ("largest σ", f"{row.value:.4g}", f"at n = {row.n}, sample {row.sample}"),
        ("roughest place", place(row).split(",")[0], f"map: {shown(row.scope, 30)}"),
        (
            "growth there",
            "no fit" if law is None else f"n^{law.alpha:.2f}",
            f"needs {MIN_LENGTHS} lengths"
            if law is None
            else f"{law.low:.2f} to {law.high:.2f} at 95 %",
        ),
        (
            "certificate",
            f"{have} bounds" if math.isinf(gap) else f"within ×{gap:.3g}",
            "not every σ has both bounds" if math.isinf(gap) else "every σ, upper / lower",
        ),
    ]


def peak_law(study: Study) -> Growth | None:
    row = study.peak()
    return study.law(row.scope, row.layer)


def smooth(study: Study) -> str:
    if not study.sigma:
        return headline(study)
    row = study.peak()
    layers = layer_medians(study, row)
    text = (
        f"The measure is σ, the largest factor by which the map can stretch a small change of the tokens it is "
        f"given: its local Lipschitz constant at this text. Largest is σ = {row.value:.4g} ({place(row)}, "
        f"n = {row.n}, sample {row.sample}), known to lie in {interval(row)}."
    )
    if len(layers) > 1:
        values = sorted(layers.values())
        text += f" Over the {len(layers)} layers at this length the medians run from {values[0]:.3g} to {values[-1]:.3g}."
    return text


def rough(study: Study) -> str:
    row = study.peak()
    layers = layer_medians(study, row)
    ranked = sorted(layers, key=lambda name: -layers[name])
    text = f"Roughest: {ranked[0]} (median σ = {layers[ranked[0]]:.3g} at n = {row.n}, {shown(row.scope, 30)})"
    if len(ranked) > 1:
        text += f"; smoothest: {ranked[-1]} ({layers[ranked[-1]]:.3g})"
    heads = [r for r in study.sigma if r.head is not None]
    if heads:
        longest = max(r.n for r in heads)
        top = max((r for r in heads if r.n == longest), key=lambda r: r.value)
        text += f". The roughest single head is head {top.head} of {layer_name(top.layer)} (σ = {top.value:.3g})"
    return text + ". Each cell is the median over samples."


def growth(study: Study) -> str:
    row, law = study.peak(), peak_law(study)
    lengths = sorted({r.n for r in study.sigma})
    if law is None:
        return (
            f"Measured at n = {', '.join(map(str, lengths))}: a growth law needs at least {MIN_LENGTHS} lengths "
            "with a positive σ."
        )
    radius = list(study.radius(row.scope, row.layer).values())
    flat = law.low <= 0 <= law.high
    verdict = (
        "no growth can be told from chance"
        if flat
        else f"doubling n multiplies σ by {2**law.alpha:.2f}"
    )
    return (
        f"In {place(row)}, σ goes like n^{law.alpha:.2f} ({CONFIDENCE:.0%} interval of the exponent: {law.low:.2f} to "
        f"{law.high:.2f}) from n = {lengths[0]} to {lengths[-1]}: {verdict}. What the law leaves over is "
        f"{law.rms:.2f} in log σ. Meanwhile R(n), the largest norm of a token at the map's input, goes from "
        f"{radius[0]:.3g} to {radius[-1]:.3g}. The guides are n^1/2, the rate of the upper bound for tokens in a "
        "fixed ball, and n^1/4 (Castin et al. 2024)."
    )


def tokens(study: Study) -> str:
    row = study.peak()
    try:
        found = study.tokens_of(row)
    except UserError:
        return "The study kept no token norms."
    return (
        f"In {place(row)} (n = {row.n}, sample {row.sample}) the largest change is driven by {_top(found, 'right')}. "
        f"It shows at {_top(found, 'left')}. Percentages are shares of the squared norm of the singular vectors."
    )


def _top(found: list[Token], part: str) -> str:
    ranked = sorted(found, key=lambda token: -getattr(token, part))[:TOP_TOKENS]
    return ", ".join(
        f"“{shown(t.token, 24)}” (token {t.position}, {getattr(t, part) ** 2:.1%})" for t in ranked
    )


def worst(study: Study) -> str:
    found = bounds(study)
    if not found:
        return (
            "This study holds no bounds, so it cannot say how far these inputs are from the worst one. σ is local: "
            "another text, or a longer one, may give a larger value."
        )
    gaps = [
        (min(value for _, kind, value in item["marks"] if kind == "upper") / item["sigma"][0], item)
        for item in found
        if item["sigma"][0] > 0 and any(kind == "upper" for _, kind, _ in item["marks"])
    ]
    if not gaps:
        return (
            "This study holds lower bounds only; nothing here limits σ from above on other inputs."
        )
    least, item = min(gaps, key=lambda pair: pair[0])
    most, other = max(gaps, key=lambda pair: pair[0])
    return (
        f"Against the smallest upper bound of each map, σ is closest in {item['layer']}, {item['scope']} "
        f"(bound / σ = {least:.3g}) and farthest in {other['layer']}, {other['scope']} ({most:.3g})."
    )


def sure(study: Study) -> str:
    about = study.info.about
    counts = Counter(row.status.split(":")[0] for row in study.rows)
    status = ", ".join(f"{count} {shown(name, 30)}" for name, count in counts.most_common(6))
    text = f"Of {rows_of(study)}: {status}. " if study.rows else f"{NOTHING} "
    if study.sigma:
        text += f"{certificate(study)} "
    if study.certified:
        text += f"{HYPOTHESES} "
    if study.sigma:
        samples = Counter(row.n for row in study.largest(*study.maps[0]))
        few = min(samples.values())
        text += f"{few} sample{'s' if few > 1 else ''} of the text per length stand behind each median. "
    text += f"The model's attention, as measured, differs from its own eager attention by {about.difference_to_eager:.1e}."
    return text


def rows_of(study: Study) -> str:
    return "1 row" if len(study.rows) == 1 else f"{len(study.rows):,} rows"


def failures(study: Study) -> list[str]:
    """Why rows have no value, the most frequent reason first."""
    reasons = Counter(row.status for row in study.failed)
    return [f"{count} × {shown(reason, 300)}" for reason, count in reasons.most_common(5)]


def interval(row: Row) -> str:
    return f"[{row.lower:.4g}, {'∞' if math.isinf(row.upper) else f'{row.upper:.4g}'}]"


def widest(study: Study) -> float:
    """The largest upper / lower over all rows."""
    return max(map(width, study.sigma), default=math.inf)


def layer_medians(study: Study, like: Row) -> dict[str, float]:
    """Per layer, the median over samples of sigma at the length and scope of a row."""
    return {
        layer_name(layer): median(values)
        for scope, layer in study.maps
        if scope == like.scope
        and (values := [row.value for row in study.largest(scope, layer) if row.n == like.n])
    }
