"""What the page of a study shows: medians and ranges, growth curves, tokens, bounds, all rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lipscope._types import UserError
from lipscope.report.charts import Cell, Grid
from lipscope.report.formats import counted, digits, interval, layer_name, shown, shown_token
from lipscope.report.palette import level
from lipscope.study.growth import Growth
from lipscope.study.records import COLUMNS, Row
from lipscope.study.study import Study

STRIP_TOKENS = 2048
ALL_STRIPS = 300_000
"""Maximum number of tokens shown per sample, and of token norms in all."""

NORM_UNIT = 1000
"""Norms of tokens are stored as whole numbers of this fraction of 1."""

SMALLEST = 1e-100
LARGEST = 1e100
"""Numbers on a page, besides zero and infinity: ratios and powers of them must not overflow."""

MOST_CELLS = 1_000_000
"""Cells of all heat maps of a page."""

TEXT_COLUMNS = ("probe", "scope", "kind", "norm", "status", "dtype", "device", "reason", "extra")
FEW_DIGITS = {"residual": 2, "seconds": 2, "radius": 4}
"""Columns that readers need to fewer digits than the rest."""

Map = tuple[str, int | None]


@dataclass(frozen=True)
class Spread:
    """The samples of one map at one length: median, bounds on it, smallest and largest, number."""

    middle: float
    low: float
    high: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Spread:
        # A median does not decrease in any of its members: where their bounds hold, it lies
        # between the median of the lower bounds and that of the upper ones.
        values = [row.value for row in rows]
        return cls(
            middle=median(values),
            low=median(row.lower for row in rows),
            high=median(row.upper for row in rows),
            least=min(values),
            most=max(values),
            count=len(values),
        )

    def title(self, where: str, n: int) -> str:
        """The lines of a tooltip."""
        return (
            f"{where}, n = {n:,}\n"
            f"σ = {digits(self.middle, 4)}, median of {counted(self.count, 'sample')}\n"
            f"known to lie in {interval(self.low, self.high, 4)}\n"
            f"samples range over {interval(self.least, self.most, 4)}"
        )


@dataclass(frozen=True)
class Scale:
    """Levels of colour for positive values, logarithmic if they differ by more than 50 times."""

    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, values: Iterable[float]) -> Scale:
        known = [x for x in values if 0 < x < math.inf] or [1.0]
        low = min(known)
        high = max(known)
        return cls(low, high, True) if high > 50 * low else cls(0.0, high, False)

    def level(self, value: float) -> int:
        """The level of a value; 0 below the scale, the last one above it."""
        if not value > self.low:
            return 0
        if self.log:
            return level(
                math.log(min(value, self.high) / self.low) / math.log(self.high / self.low)
            )
        return level(value / self.high)


@dataclass(frozen=True)
class Heat:
    """One grid per length: layers by heads, and a column for each scope without heads."""

    lengths: list[int]
    grids: list[Grid]
    scale: Scale


def require_drawable(study: Study) -> None:
    """Raise UserError if a page cannot show a study: its numbers are absurd, or too scattered."""
    for row in study.rows:
        for x in () if row.failing else (row.value, row.lower, row.upper):
            if x != 0 and x != math.inf and not SMALLEST <= x <= LARGEST:
                raise UserError(
                    f"a page shows numbers from {SMALLEST:g} to {LARGEST:g}, and a row at n = "
                    f"{row.n} has {x:g}; `lipscope export` writes all numbers"
                )
    lengths = {row.n for row in study.sigma}
    layers = {row.layer for row in study.sigma}
    cells = len(lengths) * len(layers) * len({(row.scope, row.head) for row in study.sigma})
    if cells > MOST_CELLS:
        raise UserError(
            f"a page shows at most {MOST_CELLS:,} combinations of length, layer and head, and "
            f"this study has {cells:,}; `lipscope export` writes all numbers"
        )


def heat(study: Study) -> Heat:
    """The medians over samples of every map, at every length."""
    found: dict[tuple[int, int | None, str], list[Row]] = defaultdict(list)
    for row in study.sigma:
        column = row.scope if row.head is None else f"head {row.head}"
        found[row.n, row.layer, shown(column, 30)].append(row)
    spreads = {key: Spread.of(rows) for key, rows in found.items()}
    layers = sorted({row.layer for row in study.sigma}, key=lambda at: (at is None, at or 0))
    heads = sorted({row.head for row in study.sigma if row.head is not None})
    scopes = dict.fromkeys(scope for scope, _ in study.maps if scope != "heads")
    # An empty column separates single heads from the scopes of a whole layer.
    gap = [" "] if heads and scopes else []
    columns = [*(f"head {head}" for head in heads), *gap, *(shown(scope, 30) for scope in scopes)]
    scale = Scale.of(spread.middle for spread in spreads.values())
    measured = {key[1:] for key in spreads}

    def cell(n: int, layer: int | None, column: str) -> Cell | None:
        if (layer, column) not in measured:
            return None
        where = f"{layer_name(layer)}, {column}"
        spread = spreads.get((n, layer, column))
        # A cell without a value at this length is drawn all the same: it has one at another.
        if spread is None:
            return Cell("–", 0, f"{where}\nnot measured at n = {n:,}")
        title = spread.title(where, n)
        return Cell(digits(spread.middle), scale.level(spread.middle), title)

    # One scale for all lengths: a cell that darkens with n has really grown.
    lengths = sorted({row.n for row in study.sigma})
    grids = [
        Grid(
            rows=[layer_name(layer) for layer in layers],
            columns=[name.removeprefix("head ") for name in columns],
            cells=[[cell(n, layer, column) for column in columns] for layer in layers],
        )
        for n in lengths
    ]
    return Heat(lengths, grids, scale)


@dataclass(frozen=True)
class LengthCurve:
    """One map over all lengths: samples, the fitted law, and R(n)."""

    scope: str
    layer: int | None
    spreads: dict[int, Spread]
    law: Growth | None
    radius: dict[int, float]

    @property
    def last(self) -> Spread:
        """The samples at the greatest length."""
        return self.spreads[max(self.spreads)]


def length_curves(study: Study) -> list[LengthCurve]:
    """A curve per map; for heads, of the head with the largest sigma in each sample."""
    found = []
    for scope, layer in study.maps:
        by_length: dict[int, list[Row]] = defaultdict(list)
        for row in study.largest(scope, layer):
            by_length[row.n].append(row)
        found.append(
            LengthCurve(
                scope=scope,
                layer=layer,
                spreads={n: Spread.of(by_length[n]) for n in sorted(by_length)},
                law=study.law(scope, layer),
                radius=study.radius(scope, layer),
            )
        )
    return found


@dataclass(frozen=True)
class Strip:
    """The tokens of one sample, with their norms in the singular vectors of one map."""

    row: Row
    words: list[str]
    right: list[int]
    left: list[int]
    whole: bool


def strips(study: Study) -> list[Strip]:
    """Per map, and per head where there is space: the sample of largest sigma that fits."""
    maps = study.maps
    limit = max(1, min(STRIP_TOKENS, ALL_STRIPS // max(1, len(maps))))
    found = []
    for at in maps:
        rows = study.largest(*at)
        n = max((row.n for row in rows if row.n <= limit), default=min(row.n for row in rows))
        row = max((row for row in rows if row.n == n), key=lambda row: row.value)
        if (strip := _strip(study, row, limit)) is not None:
            found.append(strip)
    space = ALL_STRIPS - sum(len(strip.words) for strip in found)
    heads = [strip for strip in found if strip.row.head is not None]
    for strip in heads:
        # All heads of a layer are shown at the sample of its largest one, so that they compare.
        same = [
            row
            for row in study.sigma
            if row[1:3] == strip.row[1:3]
            and (row.n, row.sample) == (strip.row.n, strip.row.sample)
            and row.head != strip.row.head
        ]
        if len(same) * len(strip.words) > space / max(1, len(heads)):
            continue
        found += [other for row in same if (other := _strip(study, row)) is not None]
    return found


def _strip(study: Study, row: Row, limit: int = STRIP_TOKENS) -> Strip | None:
    try:
        found = study.tokens_of(row)
    except UserError:
        return None  # no token norms were saved for this map
    shown_part = found[:limit]
    return Strip(
        row=row,
        words=[shown_token(token.token) for token in shown_part],
        right=[round(NORM_UNIT * token.right) for token in shown_part],
        left=[round(NORM_UNIT * token.left) for token in shown_part],
        whole=len(shown_part) == len(found),
    )


def columns(study: Study) -> dict[str, Any]:
    """All rows by column: repeated texts once, numbers as texts of few digits."""
    flat = [row.flat() for row in study.rows]
    by_name = dict(zip(COLUMNS, zip(*flat, strict=True), strict=True)) if flat else {}
    found: dict[str, Any] = {}
    for name, values in by_name.items():
        if name in TEXT_COLUMNS:
            known = {text: i for i, text in enumerate(dict.fromkeys(values))}
            found[name] = {
                "texts": [shown(text, 300) for text in known],
                "at": [known[text] for text in values],
            }
        elif name in FEW_DIGITS:
            found[name] = [float(f"{x:.{FEW_DIGITS[name]}g}") for x in values]
        else:
            found[name] = list(values)
    return {"count": len(study.rows), "columns": found}
