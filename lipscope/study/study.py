"""A study: the rows of a measurement, read back, fitted and looked at."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lipscope._types import UserError
from lipscope.study.growth import Growth, fit
from lipscope.study.records import COLUMNS, Row, StudyInfo
from lipscope.study.store import Store

if TYPE_CHECKING:
    import pandas as pd

SIGMA = "sigma"

CERTIFIED = "local"
"""The kind of a row whose bounds are those of a solve, at whatever input it was made."""


class Token(NamedTuple):
    """A token and its part in the largest change of a map: as its cause (`right`), its receiver (`left`)."""

    position: int
    token: str
    right: float
    left: float


class Study:
    """Numbers from a model and a text, as `measure` gives them and `Study.open(DIR)` reads them again."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Study:
        """The study that `measure(..., out=directory)` wrote."""
        return cls(Store.open(Path(directory)))

    @property
    def directory(self) -> Path | None:
        return self._store.directory

    @cached_property
    def info(self) -> StudyInfo:
        return self._store.info()

    @cached_property
    def rows(self) -> list[Row]:
        """Every row, of every probe, in a fixed order."""
        return self._store.rows()

    @cached_property
    def sigma(self) -> list[Row]:
        """The rows of local Lipschitz constants that have a value."""
        return [row for row in self.rows if row.probe == SIGMA and not row.failing]

    @property
    def failed(self) -> list[Row]:
        """The rows without a value; their status says why."""
        return [row for row in self.rows if row.failing]

    @cached_property
    def certified(self) -> list[Row]:
        """The rows of any probe whose upper bound is the solver's, and so holds with a probability.

        Bounds from theorems and numbers that were only evaluated hold without one.
        """
        return [
            row
            for row in self.rows
            if row.kind == CERTIFIED and row.upper < math.inf and not row.failing
        ]

    @property
    def joint_failure(self) -> float:
        """1 - joint_confidence, without the rounding of the difference."""
        if not self.certified:
            return 1.0
        # What is kept is 1 - failure; six digits undo its rounding.
        each = Decimal(f"{1 - (self.info.about.confidence or _default_confidence()):.6g}")
        return min(1.0, float(len(self.certified) * each))

    @property
    def joint_confidence(self) -> float:
        """The probability, at least, with which all upper bounds of the study hold together.

        A union bound over the rows of `certified`: each solve fails with the probability that the
        study keeps in `info.about.confidence`, whatever the number of maps in its batch, and every
        solve has at least one row. The probability is over the random starts of the solver; see
        docs/choosing.md for the other hypotheses. 0.0 where no row has an upper bound.
        """
        return 1 - self.joint_failure

    @property
    def maps(self) -> list[tuple[str, int | None]]:
        """(scope, layer) of everything measured, layer by layer."""
        found = {(row.scope, row.layer) for row in self.sigma}
        return sorted(
            found, key=lambda item: (item[1] is None, item[1] or 0, self._scope_order(item[0]))
        )

    @cached_property
    def _largest(self) -> dict[tuple[str, int | None], dict[tuple[int, int], Row]]:
        """Per map and (n, sample), the row of the largest sigma: heads count by their largest."""
        table: dict[tuple[str, int | None], dict[tuple[int, int], Row]] = defaultdict(dict)
        for row in self.sigma:
            cell, key = table[row.scope, row.layer], (row.n, row.sample)
            if key not in cell or row.value > cell[key].value:
                cell[key] = row
        return table

    def largest(self, scope: str, layer: int | None) -> list[Row]:
        """One row per length and sample: the map itself, or its head with the largest sigma."""
        return [row for _, row in sorted(self._largest.get((scope, layer), {}).items())]

    def law(self, scope: str, layer: int | None) -> Growth | None:
        """sigma ~ C n^alpha at one layer and scope; None where there are too few lengths for a fit."""
        try:
            return fit(scope, layer, [(row.n, row.value) for row in self.largest(scope, layer)])
        except UserError:
            return None

    def radius(self, scope: str, layer: int | None) -> dict[int, float]:
        """R(n): per length, the median over samples of the largest norm of a token at the map's input."""
        rows = self.largest(scope, layer)
        return {
            n: median(row.radius for row in rows if row.n == n)
            for n in sorted({row.n for row in rows})
        }

    def growth(self) -> list[Growth]:
        """sigma ~ C n^alpha for every layer and scope with enough lengths, by `lipscope.study.growth.METHOD`."""
        laws = [law for scope, layer in self.maps if (law := self.law(scope, layer)) is not None]
        if not laws and self.maps:
            scope, layer = self.maps[0]
            fit(
                scope, layer, [(row.n, row.value) for row in self.largest(scope, layer)]
            )  # says what is missing
        return laws

    def peak(self) -> Row:
        """The largest sigma at the greatest length, over the layers of one scope: attention, if measured."""
        scopes = [scope for scope, _ in self.maps]
        scope = "attention" if "attention" in scopes else scopes[0]
        longest = max(row.n for row in self.sigma if row.scope == scope)
        return max(
            (r for r in self.sigma if r.scope == scope and r.n == longest), key=lambda r: r.value
        )

    def tokens(
        self,
        layer: int | None,
        scope: str | None = None,
        *,
        n: int | None = None,
        sample: int | None = None,
        head: int | None = None,
    ) -> list[Token]:
        """The tokens of one sample and how much each takes part in the largest change of a layer.

        Unless told otherwise: all heads together if measured, the greatest n, the sample of largest sigma.
        """
        scopes = [s for s, at in self.maps if at == layer]
        if not scopes:
            raise UserError(
                f"layer {layer} was not measured; this study has {sorted({str(at) for _, at in self.maps})}."
            )
        scope = scope or next((s for s in scopes if s != "heads"), scopes[0])
        rows = [
            r
            for r in self.sigma
            if (r.scope, r.layer) == (scope, layer) and (head is None or r.head == head)
        ]
        rows = [
            r
            for r in rows
            if r.n == (n or max(x.n for x in rows)) and (sample is None or r.sample == sample)
        ]
        if not rows:
            raise UserError(
                f"nothing was measured at layer {layer}, {scope}, n = {n}, sample {sample}, head {head}."
            )
        row = max(rows, key=lambda r: r.value)
        return self.tokens_of(row)

    def tokens_of(self, row: Row) -> list[Token]:
        """The tokens behind one row."""
        found = self._store.sensitivity(row.scope, row.layer, row.head, row.n, row.sample)
        if found is None:
            raise UserError(
                f"the study kept no token norms for layer {row.layer}, scope {row.scope}, n = {row.n}."
            )
        words = self._store.sample(row.n, row.sample).tokens or tuple(f"#{i}" for i in range(row.n))
        return [
            Token(i, *item)
            for i, item in enumerate(zip(words, found.right, found.left, strict=True))
        ]

    def token_records(self) -> Iterator[tuple[Any, ...]]:
        """(scope, layer, head, n, sample, position, token, right, left) for every token of every map."""
        words_of = cache(lambda n, sample: self._store.sample(n, sample).tokens)
        for found in self._store.sensitivities():
            words = words_of(found.n, found.sample) or ("",) * found.n
            for position, norms in enumerate(zip(words, found.right, found.left, strict=True)):
                yield (*found[:5], position, *norms)

    def to_dataframe(self) -> pd.DataFrame:
        """The rows as a pandas table, with `layer` and `head` as nullable integers."""
        try:
            import pandas as pd
        except ImportError as error:
            raise UserError(
                "to_dataframe needs pandas; install it with: pip install 'lipscope[data]'"
            ) from error
        frame = pd.DataFrame.from_records(self.rows, columns=list(COLUMNS))
        return frame.astype({"layer": "Int64", "head": "Int64"})

    def plot_heatmap(self, ax: Any = None, *, n: int | None = None) -> Any:
        """Layers x heads, coloured by sigma at one length (the greatest, unless told); matplotlib Axes in and out."""
        from lipscope.report.figures import heatmap

        return heatmap(self, ax, n)

    def plot_growth(self, ax: Any = None, *, scope: str | None = None) -> Any:
        """sigma against length on log axes, with the fitted laws and guides; matplotlib Axes in and out."""
        from lipscope.report.figures import growth

        return growth(self, ax, scope)

    def plot_tokens(
        self, ax: Any = None, *, layer: int | None = None, scope: str | None = None
    ) -> Any:
        """The tokens of a layer (the roughest, unless told) by their part in its largest change; Axes in and out."""
        from lipscope.report.figures import tokens

        return tokens(self, ax, layer, scope)

    def _repr_html_(self) -> str:
        from lipscope.report.notebook import summary_html

        return summary_html(self)

    def _scope_order(self, scope: str) -> int:
        known = list(self.info.about.scopes)
        return known.index(scope) if scope in known else len(known)

    def __repr__(self) -> str:
        lengths = sorted({row.n for row in self.sigma})
        at = f" in {self.directory}" if self.directory else ""
        span = f", n = {lengths[0]} to {lengths[-1]}" if lengths else ""
        return f"Study({self.info.about.model}: {len(self.sigma)} values, {len(self.failed)} failed{span}{at})"


def _default_confidence() -> float:
    """That of float64 searches in a study whose own dtype gives no upper bound, and keeps 0."""
    from lipscope.linalg.spectral import (
        Solver,
    )  # brings torch, which reading a study can do without

    return 1 - Solver().failure
