"""The tokens of a sample as coloured words, and the data with which the script shows others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lipscope.report.content import NORM_UNIT, Strip
from lipscope.report.formats import digits, layer_name, shown
from lipscope.report.palette import level

SIDES = (
    ("right", "Input: tokens whose change matters most"),
    ("left", "Output: tokens that change most"),
)


def token_part(strip: Strip) -> str:
    """The tokens of one map, by their norms in the right and the left singular vector."""
    found = "".join(
        f'<h3>{title}</h3><div class="strip" data-side="{side}" role="group" tabindex="0" '
        f'aria-label="{title}. Arrow keys move over the tokens.">'
        f"{_tokens(strip.words, getattr(strip, side))}</div>"
        for side, title in SIDES
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


def _tokens(words: Sequence[str], norms: Sequence[int]) -> str:
    most = max(norms) or 1
    # The square root of the norm: beside a token that carries nearly all, others stay visible.
    return "".join(
        f'<span class="token c{level(math.sqrt(norm / most))}">{escape(word)}</span>'
        for word, norm in zip(words, norms, strict=True)
    )
