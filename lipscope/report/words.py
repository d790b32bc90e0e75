"""The sentences of the report, with their numbers.

A median is over the samples of one length; "largest" is a single sample. The two are never given
one name: the heat map, the ranking and the curves are medians.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from decimal import ROUND_CEILING, Context
from statistics import median

from lipscope._types import UserError
from lipscope.models.scopes import WITHOUT_ROUTE
from lipscope.report.content import LengthCurve
from lipscope.report.formats import (
    counted,
    digits,
    exponent,
    interval,
    layer_name,
    place_name,
    power,
    shown,
    shown_token,
)
from lipscope.study.growth import CONFIDENCE, MIN_LENGTHS
from lipscope.study.records import BUDGET, Row
from lipscope.study.study import Study, Token

NOTHING = "No value has been measured yet."
TOP_TOKENS = 3
IMPRECISE = "imprecise"

HYPOTHESES = (
    "That probability is over the random starts of the solver. It assumes that no input was chosen "
    "with knowledge of the seed, and that the rounding error of every product is at most four "
    "times the largest one observed in products with the Jacobian and its transpose."
)
FIRST_TOKEN = (
    "That the first token dominates is common and says little about the text: in a causal model "
    "every later token sees it, and many models put most of their attention weight on it whatever "
    "it is (an attention sink), so that a change there reaches all outputs at once."
)


def place(row: Row) -> str:
    """Layer, scope and head of a row."""
    head = "" if row.head is None else f", head {row.head}"
    return f"{place_name(row.layer)}, {shown(row.scope, 30)}{head}"


def warning(study: Study) -> str:
    """What is missing from a study: jobs that were never done, or data that were lost."""
    rest = f"This study is unfinished: {study.unfinished}." if study.unfinished else ""
    return " ".join(filter(None, (rest, shown(study.damage, 400))))


def headline(study: Study) -> str:
    """One sentence."""
    if not study.sigma:
        priced = [row for row in study.rows if row.probe.startswith(BUDGET)]
        formats = sorted({row.extra["format"] for row in priced if "format" in row.extra})
        if formats:
            return f"Predicted numerical error in {', '.join(shown(f, 30) for f in formats)}."
        return "Every measurement failed: there is no value to show." if study.failed else NOTHING
    row, layers = most_sensitive(study)
    layer, value = next(iter(layers.items()))
    one = len(layers) == 1
    what = "the map" if one else f"the most sensitive layer ({layer_name(layer)})"
    return (
        f"At {counted(row.n, 'token')} of this text, {what} amplifies a small change of its "
        f"input by a factor of up to {digits(value)}."
    )


def most_sensitive(study: Study) -> tuple[Row, dict[int | None, float]]:
    """The largest row, and the layers of its scope and length by their median, largest first."""
    row = study.peak()
    found = {
        layer: median(values)
        for scope, layer in study.maps
        if scope == row.scope
        and (values := [r.value for r in study.largest(scope, layer) if r.n == row.n])
    }
    return row, dict(sorted(found.items(), key=lambda item: -item[1]))


def tiles(study: Study) -> list[tuple[str, str, str]]:
    """The four key numbers, as (what, number, where)."""
    if not study.sigma:
        return []
    row, layers = most_sensitive(study)
    layer, value = next(iter(layers.items()))
    law = study.law(row.scope, layer)
    gap = max(map(width, study.sigma), default=math.inf)
    have = "lower" if any(math.isinf(r.upper) for r in study.sigma) else "upper"
    # Every map is measured at the same samples, so that the first one counts them.
    samples = sum(r.n == row.n for r in study.largest(*study.maps[0]))
    return [
        ("largest median σ", digits(value), f"n = {row.n:,}, {counted(samples, 'sample')}"),
        ("most sensitive", layer_name(layer), f"map: {shown(row.scope, 30)}"),
        (
            "growth there",
            "no fit" if law is None else power(law.alpha),
            f"needs {MIN_LENGTHS} lengths"
            if law is None
            else f"{exponent(law.low)} to {exponent(law.high)} at 95 %",
        ),
        (
            "certificate",
            f"{have} bounds" if math.isinf(gap) else f"within {apart(gap)}",
            "not every σ has both bounds" if math.isinf(gap) else "every σ, upper / lower",
        ),
    ]


def describe_sigma(study: Study) -> str:
    """What sigma is, the largest one, and the range over layers."""
    if not study.sigma:
        return headline(study)
    row, layers = most_sensitive(study)
    text = (
        "σ is the largest factor by which a map can amplify a small change of its input tokens: "
        "its local Lipschitz constant at this text. A map with σ = 1 passes changes on as they "
        f"are. The largest σ of a single sample is {digits(row.value, 4)} ({place(row)}, "
        f"n = {row.n:,}, sample {row.sample}), known to lie in {interval(row.lower, row.upper, 4)}."
    )
    if len(layers) > 1:
        values = list(layers.values())
        text += (
            f" Over the {len(layers)} layers at this length, the medians over samples range from "
            f"{digits(values[-1])} to {digits(values[0])}."
        )
    return text


def describe_reference(
    mine: dict[int | None, float], theirs: dict[int | None, float], name: str
) -> str:
    """Medians of this study beside those of the reference, layer by layer."""
    ratios = [mine[at] / theirs[at] for at in mine if theirs.get(at, 0) > 0 and mine[at] > 0]
    ratios = [ratio for ratio in ratios if 0 < ratio < math.inf]  # one may be inf
    if not ratios:
        return f"{name} has no layer, map and length in common with this study."
    # Ratios are averaged geometrically: twice and half as large cancel.
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    verdict = (
        f"{digits(mean)} times as large as" if mean >= 1 else f"smaller by {digits(1 / mean)} than"
    )
    return (
        f"Is that much? In the geometric mean over {counted(len(ratios), 'layer')}, σ is {verdict} "
        f"in the reference, {name}; the ratio goes from {digits(min(ratios))} to "
        f"{digits(max(ratios))}."
    )


def describe_layers(study: Study) -> str:
    """The most and the least sensitive layer, and the most sensitive head."""
    row, layers = most_sensitive(study)
    ranked = [(layer_name(layer), digits(value)) for layer, value in layers.items()]
    (first, most), (last, least) = ranked[0], ranked[-1]
    text = f"Most sensitive: {first} (median σ = {most} at n = {row.n:,}, {shown(row.scope, 30)})"
    if len(ranked) > 1:
        text += f"; least sensitive: {last} ({least})"
    heads: dict[tuple[int | None, int], list[float]] = {}
    longest = max((r.n for r in study.sigma if r.head is not None), default=0)
    for r in study.sigma:
        if r.head is not None and r.n == longest:
            heads.setdefault((r.layer, r.head), []).append(r.value)
    if heads:
        (layer, head), values = max(heads.items(), key=lambda item: median(item[1]))
        text += (
            f". The most sensitive head is head {head} of {layer_name(layer)} "
            f"(median σ = {digits(median(values))})"
        )
    return text + ". Each cell is the median over samples."


def describe_growth(study: Study) -> str:
    """The law of the most sensitive layer in words."""
    row, layers = most_sensitive(study)
    layer = next(iter(layers))
    law = study.law(row.scope, layer)
    lengths = sorted({r.n for r in study.sigma})
    if law is None:
        return (
            f"Measured at n = {', '.join(f'{n:,}' for n in lengths)}. A growth law needs at least "
            f"{MIN_LENGTHS} lengths with a positive σ."
        )
    radius = list(study.radius(row.scope, layer).values())
    # An interval that contains 0 is no evidence of growth, whatever its middle says.
    flat = law.low <= 0 <= law.high
    verdict = "no significant growth" if flat else f"doubling n multiplies σ by {2**law.alpha:.2f}"
    return (
        f"In {layer_name(layer)} ({shown(row.scope, 30)}), σ behaves like {power(law.alpha)} "
        f"({100 * CONFIDENCE:.0f} % interval of the exponent: {exponent(law.low)} to "
        f"{exponent(law.high)}) from n = {lengths[0]:,} to {lengths[-1]:,}: {verdict}. "
        f"The residual of the fit is "
        f"{law.rms:.2f} in log σ (root mean square). Meanwhile R(n), the largest norm of a "
        f"token at the map's input, goes from {digits(radius[0])} to {digits(radius[-1])}. The "
        f"guides are {power(0.5, 1)}, the rate of the upper bound for tokens in a fixed ball, and "
        f"{power(0.25)} (Castin et al. 2024)."
    )


def describe_tokens(study: Study) -> str:
    """The tokens that matter most; why the first one does, and which follow without it."""
    row = study.peak()
    try:
        found = study.tokens_of(row)
    except UserError:
        return "The study has no token norms."
    text = (
        f"In {place(row)} (n = {row.n:,}, sample {row.sample}), the map is most sensitive to "
        f"changes of {_top(found, 'right')}. The output changes most at {_top(found, 'left')}. "
        "Percentages are shares of the squared norm of the singular vectors."
    )
    # Said only where it is so: in other models another token leads.
    if len(found) > 1 and max(found, key=lambda token: token.right).position == 0:
        text += f"\n{FIRST_TOKEN} Without token 0, the input side reads {_top(found[1:], 'right')}."
    return text


def _top(found: Sequence[Token], part: str) -> str:
    """The strongest tokens, with shares of those given."""
    # Norms of a singular vector square to 1 in all, but not without its first token.
    total = math.fsum(getattr(token, part) ** 2 for token in found) or 1.0
    ranked = sorted(found, key=lambda token: -getattr(token, part))[:TOP_TOKENS]
    shares = [100 * getattr(token, part) ** 2 / total for token in ranked]
    return ", ".join(
        f"“{shown_token(token.token, 24)}” (token {token.position}, {share:.1f} %)"
        for token, share in zip(ranked, shares, strict=True)
    )


def describe_certainty(study: Study) -> str:
    """How the rows ended, how tight they are, and how the attention was checked."""
    counts = Counter(row.status for row in study.rows)
    status = ", ".join(f"{count:,} {shown(name, 30)}" for name, count in counts.most_common(6))
    text = f"Of {counted(len(study.rows), 'row')}: {status}. " if study.rows else f"{NOTHING} "
    if study.sigma:
        text += f"{certificate(study)} "
    if study.certified:
        text += f"{HYPOTHESES} "
    if study.sigma:
        samples = Counter(row.n for row in study.largest(*study.maps[0]))
        text += f"Each median is over {counted(min(samples.values()), 'sample')} per length. "
    if replaces_attention(study):
        text += (
            "With lipscope's attention, the output of the model differs from that with its own "
            f"eager attention by {study.info.about.difference_to_eager:.1e}."
        )
    # The terminal's lines become one paragraph.
    return text.replace("\n", " ").rstrip()


def replaces_attention(study: Study) -> bool:
    """Whether the model ran on lipscope's attention, as it does at every scope if it can."""
    # A model that cannot is measured on its own attention: its difference is exactly 0, and it has
    # no scopes but these.
    return study.info.about.difference_to_eager > 0 or any(
        row.scope not in WITHOUT_ROUTE for row in study.sigma
    )


def certificate(study: Study) -> str:
    """How tight the bounds of a study are, and what to try where there are none."""
    bounded = [ratio for row in study.sigma if (ratio := width(row)) < math.inf]
    unbounded = sum(row.upper == math.inf for row in study.sigma)
    drowned = len(study.sigma) - len(bounded) - unbounded
    who = (
        "Every σ" if len(bounded) == len(study.sigma) else f"{len(bounded)} of {len(study.sigma)} σ"
    )
    text = "Every σ has a lower bound but no upper bound"
    if bounded:
        verb = "lies between its" if who.startswith("Every") else "lie between their"
        text = f"{who} {verb} lower and upper bound, at most {apart(max(bounded))} apart"
        text += f"; {_have(unbounded)} no upper bound" if unbounded else ""
    identity = study.info.identity
    if unbounded and identity.dtype != "float64":
        text += "; an upper bound needs --dtype float64"
    elif unbounded and identity.gap is None:  # with --gap, the rows say why it failed
        text += "; --gap iterates until there is one"
    if drowned:
        text += f"; {_have(drowned)} no lower bound above 0, because rounding may exceed them"
    text += "."
    if count := len(study.certified):
        who = f"All {count} upper bounds hold together" if count > 1 else "The upper bound holds"
        text += f"\n{who} with probability at least 1 - {_rounded_up(study.joint_failure)}."
    total = len(study.sigma)
    imprecise = sum(row.status == IMPRECISE for row in study.sigma)
    if imprecise:
        text += f"\n{imprecise} of {total} rows are imprecise: rounding may exceed 1 % of σ."
    missed = [row for row in study.sigma if row.missed]
    if missed:
        # The first reason stands for all: most often it is the same.
        reason = shown(missed[0].explained)
        gap = "the requested gap" if identity.gap is None else f"the gap of {identity.gap:g}"
        text += f"\n{len(missed)} of {total} rows miss {gap}; the first reason: {reason}."
    return text


def _have(count: int) -> str:
    return f"{count:,} has" if count == 1 else f"{count:,} have"


def _rounded_up(x: float) -> str:
    """A probability or a distance rounded up to two digits."""
    # Rounded to nearest, a stated bound could be smaller than the true one.
    return f"{float(Context(prec=2, rounding=ROUND_CEILING).create_decimal(repr(x))):g}"


def width(row: Row) -> float:
    """upper / lower; 1 where both are 0."""
    return row.upper / row.lower if row.lower > 0 else 1.0 if row.upper == 0 else math.inf


def apart(ratio: float) -> str:
    """How far apart upper and lower are: in per cent, or as a factor beyond 50 %."""
    # The last digits of the ratio are rounding: 1.1 is 10 %, not 10.1 %.
    percent = 100 * (ratio - 1) * (1 - 1e-9)
    return f"{_rounded_up(percent)} %" if ratio < 1.5 else f"a factor {ratio:.4g}"


def failures(study: Study) -> list[str]:
    """Why rows have no value, the most frequent reason first."""
    reasons = Counter(row.explained for row in study.failed)
    return [f"{count:,} × {shown(reason, 300)}" for reason, count in reasons.most_common(5)]


def medians(curves: Sequence[LengthCurve], scope: str, n: int) -> dict[int | None, float]:
    """Per layer, the median over samples at one scope and length."""
    return {
        curve.layer: curve.spreads[n].middle
        for curve in curves
        if curve.scope == scope and n in curve.spreads
    }
