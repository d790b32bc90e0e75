"""The sentences of the report, with their numbers."""

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
    "That probability is over the random starts of the solver. It assumes that no input was chosen "
    "with knowledge of the seed, and that the rounding error of every product is at most four "
    "times the largest one observed in products with the Jacobian and its transpose."
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
        f"At {row.n} tokens of this text, the most sensitive map amplifies a small change of its "
        f"input by a factor of up to {row.value:.3g}."
    )


def tiles(study: Study) -> list[tuple[str, str, str]]:
    """The four key numbers, as (what, number, where)."""
    if not study.sigma:
        return []
    row, law = study.peak(), peak_law(study)
    gap = widest(study)
    have = "lower" if any(math.isinf(row.upper) for row in study.sigma) else "upper"
    return [
        ("largest σ", f"{row.value:.4g}", f"at n = {row.n}, sample {row.sample}"),
        ("most sensitive", place(row).split(",")[0], f"map: {shown(row.scope, 30)}"),
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
        "σ is the largest factor by which a map can amplify a small change of its input tokens: "
        f"its local Lipschitz constant at this text. The largest is σ = {row.value:.4g} "
        f"({place(row)}, n = {row.n}, sample {row.sample}), known to lie in {interval(row)}."
    )
    if len(layers) > 1:
        values = sorted(layers.values())
        text += (
            f" Over the {len(layers)} layers at this length, the medians range from "
            f"{values[0]:.3g} to {values[-1]:.3g}."
        )
    return text


def rough(study: Study) -> str:
    row = study.peak()
    layers = layer_medians(study, row)
    ranked = sorted(layers, key=lambda name: -layers[name])
    text = (
        f"Most sensitive: {ranked[0]} (median σ = {layers[ranked[0]]:.3g} at n = {row.n}, "
        f"{shown(row.scope, 30)})"
    )
    if len(ranked) > 1:
        text += f"; least sensitive: {ranked[-1]} ({layers[ranked[-1]]:.3g})"
    heads = [r for r in study.sigma if r.head is not None]
    if heads:
        longest = max(r.n for r in heads)
        top = max((r for r in heads if r.n == longest), key=lambda r: r.value)
        text += (
            f". The most sensitive head is head {top.head} of {layer_name(top.layer)} "
            f"(σ = {top.value:.3g})"
        )
    return text + ". Each cell is the median over samples."


def growth(study: Study) -> str:
    row, law = study.peak(), peak_law(study)
    lengths = sorted({r.n for r in study.sigma})
    if law is None:
        return (
            f"Measured at n = {', '.join(map(str, lengths))}. A growth law needs at least "
            f"{MIN_LENGTHS} lengths with a positive σ."
        )
    radius = list(study.radius(row.scope, row.layer).values())
    flat = law.low <= 0 <= law.high
    verdict = "no significant growth" if flat else f"doubling n multiplies σ by {2**law.alpha:.2f}"
    return (
        f"In {place(row)}, σ behaves like n^{law.alpha:.2f} ({CONFIDENCE:.0%} interval of the "
        f"exponent: {law.low:.2f} to {law.high:.2f}) from n = {lengths[0]} to {lengths[-1]}: "
        f"{verdict}. The residual of the fit is {law.rms:.2f} in log σ (root mean square). "
        f"Meanwhile R(n), the largest norm of a token at the map's input, goes from "
        f"{radius[0]:.3g} to {radius[-1]:.3g}. The guides are n^1/2, the rate of the upper bound "
        "for tokens in a fixed ball, and n^1/4 (Castin et al. 2024)."
    )


def tokens(study: Study) -> str:
    row = study.peak()
    try:
        found = study.tokens_of(row)
    except UserError:
        return "The study has no token norms."
    return (
        f"In {place(row)} (n = {row.n}, sample {row.sample}), the map is most sensitive to changes "
        f"of {_top(found, 'right')}. The output changes most at {_top(found, 'left')}. Percentages "
        "are shares of the squared norm of the singular vectors."
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
            "This study contains no bounds, so it cannot say how far these inputs are from the "
            "worst case. σ is local: another text, or a longer one, may give a larger value."
        )
    gaps = [
        (min(value for _, kind, value in item["marks"] if kind == "upper") / item["sigma"][0], item)
        for item in found
        if item["sigma"][0] > 0 and any(kind == "upper" for _, kind, _ in item["marks"])
    ]
    if not gaps:
        return (
            "This study contains lower bounds only, so nothing limits σ from above on other inputs."
        )
    least, item = min(gaps, key=lambda pair: pair[0])
    most, other = max(gaps, key=lambda pair: pair[0])
    return (
        f"Compared with the smallest upper bound of each map, σ is closest in {item['layer']}, "
        f"{item['scope']} (bound / σ = {least:.3g}) and farthest in {other['layer']}, "
        f"{other['scope']} ({most:.3g})."
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
        text += f"Each median is over {few} sample{'s' if few > 1 else ''} of the text per length. "
    return text + (
        "With lipscope's attention, the output of the model differs from that with its own eager "
        f"attention by {about.difference_to_eager:.1e}."
    )


def rows_of(study: Study) -> str:
    return "1 row" if len(study.rows) == 1 else f"{len(study.rows):,} rows"


def failures(study: Study) -> list[str]:
    """Why rows have no value, the most frequent reason first."""
    reasons = Counter(row.status for row in study.failed)
    return [f"{count} × {shown(reason, 300)}" for reason, count in reasons.most_common(5)]


def interval(row: Row) -> str:
    return f"[{row.lower:.4g}, {'∞' if math.isinf(row.upper) else f'{row.upper:.4g}'}]"


def widest(study: Study) -> float:
    """The largest ratio upper / lower of all rows."""
    return max(map(width, study.sigma), default=math.inf)


def layer_medians(study: Study, like: Row) -> dict[str, float]:
    """Per layer, the median over samples of sigma at the length and scope of a row."""
    return {
        layer_name(layer): median(values)
        for scope, layer in study.maps
        if scope == like.scope
        and (values := [row.value for row in study.largest(scope, layer) if row.n == like.n])
    }
