"""How the report writes numbers, tokens and tables: steady digits, powers of n, intervals."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from rich.table import Table

from lipscope._files import for_terminal

DIGITS = 3
_SUPERSCRIPT = str.maketrans("-0123456789.", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹·")


def shown(text: str, width: int = 200) -> str:
    """Untrusted text in one line, with invisible and bidirectional characters spelled out."""
    return for_terminal(text, width)


def shown_token(token: str, width: int = 40) -> str:
    """A token for readers; the continuation mark of WordPiece, ``##``, becomes an ellipsis."""
    # Only before letters and digits: "###" is a heading of Markdown and a token of its own.
    inner = token[2:]
    return shown("…" + inner if token.startswith("##") and inner.isalnum() else token, width)


def digits(value: float | None, count: int = DIGITS) -> str:
    """A number with a fixed number of significant digits: 18.0 beside 18.3, never 18."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    # The exponent after rounding: 9.996 has one digit before the point, but is written 10.0.
    mantissa, exponent = f"{value:.{count - 1}e}".split("e")
    power = int(exponent)
    if -4 <= power < 6:
        return f"{value:.{max(0, count - 1 - power)}f}"
    return f"{mantissa} × 10{str(power).translate(_SUPERSCRIPT)}"


def interval(low: float, high: float, count: int = DIGITS) -> str:
    """[low, high]."""
    return f"[{digits(low, count)}, {digits(high, count)}]"


def exponent(alpha: float) -> str:
    """An exponent to two decimals, without the sign of a negative zero."""
    return f"{round(alpha, 2) + 0.0:.2f}"


def exponent_range(alpha: float, low: float, high: float) -> str:
    """An exponent with its interval."""
    return f"{exponent(alpha)} [{exponent(low)}, {exponent(high)}]"


def power(alpha: float, decimals: int = 2) -> str:
    """n to a power, as in n⁰·³³."""
    return "n" + f"{round(alpha, decimals) + 0.0:.{decimals}f}".translate(_SUPERSCRIPT)


def counted(count: int, noun: str) -> str:
    """1 row, 1,404 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def layer_name(layer: int | None) -> str:
    """A layer by its number; the whole model has none."""
    return "model" if layer is None else f"layer {layer}"


def place_name(layer: int | None) -> str:
    """A layer in a sentence."""
    return "the whole model" if layer is None else layer_name(layer)


def text_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = (),
    folding: Collection[str] = (),
    gap: int = 2,
) -> Table:
    """A table for the terminal; columns not in `left` are numbers, those in `folding` may wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for head in heads:
        # Names are long and fold; numbers never do.
        table.add_column(
            head,
            justify="left" if head in left else "right",
            no_wrap=head not in folding,
            overflow="fold" if head in folding else "ellipsis",
        )
    for row in rows:
        table.add_row(*row)
    return table
