"""A study: the rows of a measurement, with growth fits, token norms and plots."""

from __future__ import annotations

import math
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from decimal import Decimal
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lipscope._checks import name_bad_argument
from lipscope._files import whole_file
from lipscope._types import UserError
from lipscope.models.scopes import per
from lipscope.study.directory import FILE, claim, require_same
from lipscope.study.growth import Growth, check_lengths, fit
from lipscope.study.jobs import JobCount, command_lines, count_jobs
from lipscope.study.records import COLUMNS, SIGMA, Row, StudyHeader, data_frame
from lipscope.study.salvage import COMMANDS, INFO
from lipscope.study.store import Store, content, damage

if TYPE_CHECKING:
    import pandas as pd

SUBJECT_COLUMNS = ("model", "revision", "weights", "text")
"""Columns of an export that follow those of the rows."""

CERTIFIED = "local"
"""The kind of a row whose bounds come from a solve, whatever the input."""


class DamageWarning(UserWarning):
    """Warn that a part of a study is lost; the rest is intact."""


class Token(NamedTuple):
    """A token and its share in the largest change of a map, as cause (right) or receiver (left)."""

    position: int
    token: str
    right: float
    left: float


class Study:
    """The numbers of a measurement, each with its certificate.

    :func:`measure` returns a study; ``Study.open(directory)`` reads one that was saved.

    Attributes:
        rows: All rows, of all probes, in a fixed order.
        sigma: The rows of local Lipschitz constants that have a value.
        failed: The rows without a value; their status says why.
        maps: (scope, layer) of everything measured.
        info: What was measured: model, text, settings, versions.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> from transformers import LlamaConfig, LlamaModel
        >>> _ = torch.manual_seed(0)
        >>> model = LlamaModel(LlamaConfig(
        ...     vocab_size=99, hidden_size=32, intermediate_size=48,
        ...     num_hidden_layers=2, num_attention_heads=4))
        >>> study = ls.measure(model, torch.arange(64), lengths=[4, 8, 16], samples=1)
        >>> study.maps
        [('heads', 0), ('attention', 0), ('heads', 1), ('attention', 1)]
        >>> all(row.lower <= row.value <= row.upper for row in study.sigma)
        True
        >>> [(law.scope, law.layer, law.lengths) for law in study.growth()][0]
        ('heads', 0, (4, 8, 16))
        >>> len(study.tokens(layer=0, n=8))
        8
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def __reduce__(self) -> tuple[Any, ...]:
        if self.directory is not None:
            return Study.open, (self.directory.absolute(),)
        return _in_memory, (self.store.to_bytes(),)

    @classmethod
    @name_bad_argument
    def open(cls, directory: str | os.PathLike[str]) -> Study:
        """Open the study that `measure(..., out=directory)` saved."""
        return cls(Store.open(Path(directory)))

    def close(self) -> None:
        """Close the file of the study; nothing can be read from it afterwards."""
        self.store.close()

    def save(self, directory: str | os.PathLike[str]) -> Study:
        """Write a copy of the study to a new or empty directory, and open it.

        Args:
            directory: Where to; ``measure(..., out=directory)`` can add to it later.

        Returns:
            The copy.

        Raises:
            UserError: If the directory holds something, or cannot be written.
        """
        return copy_study(self, Path(directory))

    @property
    def directory(self) -> Path | None:
        """The directory the study is saved in; None if it is in memory."""
        return self.store.directory

    @cached_property
    def info(self) -> StudyHeader:
        """Identity and description of the study."""
        info = self.store.info()
        self._warn()
        return info

    def _warn(self) -> None:
        """Warn of what has been found to be lost: a part is not the whole."""
        if self.damage:
            warnings.warn(self.damage, DamageWarning, stacklevel=3)

    @cached_property
    def rows(self) -> list[Row]:
        """All rows, of all probes, in a fixed order."""
        rows = self.store.rows()
        self._warn()
        return rows

    @property
    def damage(self) -> str:
        """What the reads so far have found to be lost, in one sentence; empty if nothing is."""
        return damage(self.store)

    @cached_property
    def commands(self) -> list[str]:
        """The command lines that made the study, without those that a later one includes."""
        known = [self.info.about.command] if self.info.about.command else []
        return command_lines(self.store.commands()) or known

    @cached_property
    def jobs(self) -> JobCount:
        """How many jobs are done, of how many that were asked for."""
        return count_jobs(self.store.commands(), self.rows)

    @property
    def unfinished(self) -> str:
        """ "18 of 42 jobs are done" for a run that was interrupted; empty if all are."""
        done, asked = self.jobs
        return f"{done} of {asked} jobs are done" if done < asked else ""

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
        """The rows of any probe whose upper bound is the solver's, which holds with a probability.

        Bounds from theorems, and numbers that were only evaluated, hold with certainty.
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
        failure = 1 - self.info.about.confidence
        if failure == 1:  # a study whose own dtype has no certificate
            from lipscope.linalg.spectral import Solver  # late: reading a study needs no torch

            failure = Solver().failure
        # The study stores 1 - failure in binary; six decimal digits recover the failure itself.
        each = Decimal(f"{failure:.6g}")
        return min(1.0, float(len(self.certified) * each))

    @property
    def joint_confidence(self) -> float:
        """A lower bound on the probability that all upper bounds of the study hold together.

        A union bound over the rows of `certified`: `info.about.confidence` is the probability with
        which the upper bound of a row holds. The probability is over the random starts of the
        solver; see docs/choosing.md for the other hypotheses. It is 0.0 if no row has an upper
        bound.
        """
        return 1 - self.joint_failure

    @property
    def maps(self) -> list[tuple[str, int | None]]:
        """(scope, layer) of everything measured, layer by layer."""
        found = {(row.scope, row.layer) for row in self.sigma}
        order = {scope: i for i, scope in enumerate(self.info.about.scopes)}
        return sorted(
            found, key=lambda at: (at[1] is None, at[1] or 0, order.get(at[0], len(order)))
        )

    @cached_property
    def _largest(self) -> dict[tuple[str, int | None], dict[tuple[int, int], Row]]:
        """Per map and (n, sample), the row with the largest sigma (for heads, of all heads)."""
        table: dict[tuple[str, int | None], dict[tuple[int, int], Row]] = defaultdict(dict)
        for row in self.sigma:
            cell = table[row.scope, row.layer]
            key = (row.n, row.sample)
            if key not in cell or row.value > cell[key].value:
                cell[key] = row
        return table

    def largest(self, scope: str, layer: int | None) -> list[Row]:
        """One row per length and sample: the map itself, or the head with the largest sigma."""
        return [row for _, row in sorted(self._largest.get((scope, layer), {}).items())]

    def law(self, scope: str, layer: int | None) -> Growth | None:
        """sigma ~ C n^alpha at one layer and scope; None if there are too few lengths to fit."""
        try:
            rows = self.largest(scope, layer)
            points = [(row.n, row.value) for row in rows]
            return fit(scope, layer, points, [row.sample for row in rows])
        except UserError:
            return None

    def radius(self, scope: str, layer: int | None) -> dict[int, float]:
        """R(n): per length, the median over samples of the largest token norm at the input."""
        rows = self.largest(scope, layer)
        return {
            n: median(row.radius for row in rows if row.n == n)
            for n in sorted({row.n for row in rows})
        }

    def growth(self) -> list[Growth]:
        """sigma ~ C n^alpha for every layer and scope with enough lengths.

        The method is described in `lipscope.study.growth.METHOD`.
        """
        laws = [law for scope, layer in self.maps if (law := self.law(scope, layer)) is not None]
        if not laws and self.maps:
            scope, layer = self.maps[0]
            check_lengths(scope, layer, [(row.n, row.value) for row in self.largest(scope, layer)])
        return laws

    def peak(self) -> Row:
        """The largest sigma at the greatest length, over the scopes that were measured.

        Single heads count only if nothing larger was measured, and the whole model only if no layer
        was: the answer is a layer, if there is one.
        """
        scopes = {scope for scope, _ in self.maps}
        layers = {name for name in scopes if per(name) == "layer"}
        layers = layers or {name for name in scopes if per(name) == "head"} or scopes
        longest = max(row.n for row in self.sigma if row.scope in layers)
        return max(
            (r for r in self.sigma if r.scope in layers and r.n == longest), key=lambda r: r.value
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
        """The tokens of one sample and their shares in the largest change of a layer.

        Args:
            layer: The layer number; None for the whole model.
            scope: The map. Default: all heads together, if measured.
            n: The length. Default: the greatest.
            sample: The sample. Default: the one with the largest sigma.
            head: The head, for the scope heads. Default: the one with the largest sigma.
        """
        scopes = [s for s, at in self.maps if at == layer]
        if not scopes:
            raise UserError(
                f"layer {layer} was not measured; "
                f"this study has {sorted({str(at) for _, at in self.maps})}"
            )
        scope = scope or next((s for s in scopes if per(s) != "head"), scopes[0])
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
                f"nothing was measured at layer {layer}, scope {scope}, n = {n}, "
                f"sample {sample}, head {head}"
            )
        row = max(rows, key=lambda r: r.value)
        return self.tokens_of(row)

    def tokens_of(self, row: Row) -> list[Token]:
        """The tokens behind one row."""
        found = self.store.sensitivity(row.scope, row.layer, row.head, row.n, row.sample)
        self._warn()
        if found is None:
            raise UserError(
                f"the study has no token norms for layer {row.layer}, scope {row.scope}, "
                f"n = {row.n}"
            )
        # Embeddings and pixels have no text: their tokens are named by position.
        sample = self.store.sample(row.n, row.sample)
        words = (sample and sample.tokens) or tuple(f"#{i}" for i in range(row.n))
        return [
            Token(i, *item)
            for i, item in enumerate(zip(words, found.right, found.left, strict=True))
        ]

    def token_records(self) -> Iterator[tuple[Any, ...]]:
        """(scope, layer, head, n, sample, position, token, right, left) of every token and map."""
        sample_of = cache(self.store.sample)
        every = self.store.sensitivities()
        self._warn()
        for found in every:
            sample = sample_of(found.n, found.sample)
            if sample is None:  # lost, and said to be
                continue
            words = sample.tokens or ("",) * found.n
            for position, norms in enumerate(zip(words, found.right, found.left, strict=True)):
                yield (*found[:5], position, *norms)

    @property
    def subject(self) -> tuple[str, ...]:
        """Model, revision, weights (the first digits of their digest) and text."""
        identity = self.info.identity
        about = self.info.about
        return about.model, identity.revision, identity.weights[:12], about.text

    def to_dataframe(self) -> pd.DataFrame:
        """The rows as a pandas DataFrame, with `layer` and `head` as nullable integers.

        The last columns, the same in every row, say what was measured: frames of several studies
        can be concatenated.
        """
        records = [(*row.flat(), *self.subject) for row in self.rows]
        return data_frame(records, [*COLUMNS, *SUBJECT_COLUMNS])

    def plot_heatmap(self, ax: Any = None, *, n: int | None = None) -> Any:
        """Plot a heat map of sigma, layers x heads, at length n (by default the greatest).

        Args:
            ax: matplotlib Axes to draw on. Default: new ones.
            n: The length.

        Returns:
            The Axes.
        """
        from lipscope.report.figures import heatmap

        return heatmap(self, ax, n)

    def plot_growth(self, ax: Any = None, *, scope: str | None = None) -> Any:
        """Plot sigma against length on log axes, with the fitted laws; returns matplotlib Axes."""
        from lipscope.report.figures import growth

        return growth(self, ax, scope)

    def plot_tokens(
        self, ax: Any = None, *, layer: int | None = None, scope: str | None = None
    ) -> Any:
        """Plot the tokens of a layer by their shares in its largest change.

        Args:
            ax: matplotlib Axes to draw on. Default: new ones.
            layer: The layer. Default: the one with the largest sigma.
            scope: The map. Default: all heads together, if measured.

        Returns:
            The Axes.
        """
        from lipscope.report.figures import tokens

        return tokens(self, ax, layer, scope)

    def _repr_html_(self) -> str:
        from lipscope.report.study_table import summary_html

        return summary_html(self)

    def __repr__(self) -> str:
        lengths = sorted({row.n for row in self.sigma})
        at = f" in {self.directory}" if self.directory else ""
        span = f", n = {lengths[0]} to {lengths[-1]}" if lengths else ""
        counts = f"{len(self.sigma)} values, {len(self.failed)} failed"
        return f"Study({self.info.about.model}: {counts}{span}{at})"


@name_bad_argument
def merge(studies: Sequence[Study]) -> Study:
    """Join studies of one model, text and set of options, as several machines measure them.

    Args:
        studies: Any number of studies, in any order. Where several have a row, one with a value
            counts before one that failed.

    Returns:
        A study in memory, with the rows of all; :meth:`Study.save` writes it to a directory.

    Raises:
        UserError: If the studies differ in something that decides their numbers. To compare such
            studies, concatenate their data frames, whose last columns say what was measured.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> from transformers import LlamaConfig, LlamaModel
        >>> _ = torch.manual_seed(0)
        >>> model = LlamaModel(LlamaConfig(
        ...     vocab_size=99, hidden_size=32, intermediate_size=48,
        ...     num_hidden_layers=2, num_attention_heads=4))
        >>> parts = [ls.measure(model, torch.arange(64), [8], 1, layers=[i]) for i in range(2)]
        >>> ls.merge(parts)
        Study(LlamaModel: 10 values, 0 failed, n = 8 to 8)
    """
    given = list(studies)
    if not given or not all(isinstance(study, Study) for study in given):
        raise UserError("merge takes a list of at least one Study")
    for other in given[1:]:
        differences = given[0].info.identity.differences(other.info.identity)
        if differences:
            raise UserError(
                f"the studies differ in {', '.join(differences)}, so they are not parts of one; "
                "concatenate their data frames instead: "
                "pandas.concat([study.to_dataframe() for study in studies])"
            )
    return Study(join(study.store for study in given)[0])


def copy_study(study: Study, directory: Path) -> Study:
    """Everything intact in a study, in a new directory."""
    if os.path.lexists(directory / FILE):
        raise UserError(f"{directory} holds a study; give a new or empty directory")
    with ExitStack() as held:
        held.callback(claim(directory).release)
        write_whole(join([study.store])[0], directory)
    return Study.open(directory)


def _in_memory(content: bytes) -> Study:
    return Study(Store.from_bytes(content))


class Merged(NamedTuple):
    """What a merge found.

    content:  how much the merged study holds, as in "12 rows"
    disputed: rows that several parts have, with other numbers
    damaged:  a sentence for each part that has lost something; the rest of it is there
    """

    content: str
    disputed: int
    damaged: list[str]


def join(stores: Iterable[Store]) -> tuple[Store, int]:
    """Everything intact in some stores, in memory, and the number of rows that they disagree on.

    Of several rows with one key, one that has a value is kept before one that failed; among equals
    the choice is by content. So neither the order nor a part that comes twice changes anything.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    records: dict[tuple[str, str], Any] = {}
    commands: dict[str, Any] = {}
    disputed: set[tuple[Any, ...]] = set()
    info: StudyHeader | None = None
    for store in stores:
        info = info or store.info()
        for row in store.rows():
            known = rows.setdefault(row[:8], row)
            # Value, lower and upper.
            if not known.failing and not row.failing and known[8:11] != row[8:11]:
                disputed.add(row[:8])
            rows[row[:8]] = min(known, row, key=lambda r: (r.failing, repr(r)))
        for kind, key, value in store.all_records():
            records[kind, key] = min(records.get((kind, key), value), value, key=repr)
        commands |= {repr(command): command for command in store.commands()}
    assert info is not None
    records.pop((INFO, COMMANDS), None)
    joined = Store.create(None, info)
    joined.write(rows.values(), records=((*name, value) for name, value in records.items()))
    joined.add_commands(command for _, command in sorted(commands.items()))
    return joined, len(disputed)


def merge_directories(out: Path, parts: Sequence[Path]) -> Merged:
    """Write everything in some studies, and in that in `out` if there is one, to `out`.

    Args:
        out: A new or empty directory, or one that an earlier merge wrote. It is replaced as a
            whole, at the end.
        parts: Directories of studies of one model, text and set of options.

    Returns:
        What was found.

    Raises:
        UserError: If a part differs in something that decides its numbers, or cannot be read.
    """
    given = list(dict.fromkeys(parts))

    def check(part: Path) -> None:
        with closing(Store.open(given[0])) as first, closing(Store.open(part)) as other:
            require_same(first.info().identity, other.info().identity, given[0], part)

    for one in given:  # before anything is written
        check(one)
    with ExitStack() as held:
        held.callback(claim(out).release)
        if (out / FILE).exists() and out not in given:
            check(out)
            given.insert(0, out)
        damaged: list[str] = []
        joined, disputed = join(_opened(given, out, damaged))
        write_whole(joined, out)
    return Merged(content=content(joined), disputed=disputed, damaged=damaged)


def write_whole(store: Store, directory: Path) -> None:
    """Write a store that is in memory to a claimed directory: at once, or not at all."""
    with whole_file(directory / FILE) as draft:
        draft.write_bytes(store.to_bytes())


def _opened(parts: Iterable[Path], out: Path, damaged: list[str]) -> Iterator[Store]:
    """One store after the other, open while it is used; what is lost in it is noted."""
    for part in parts:
        with closing(Store.open(part)) as store:
            if store.check():
                if part == out:
                    raise UserError(damage(store))  # a damaged study is not written to
                damaged.append(damage(store))
            yield store
