"""The jobs of a study: what was requested, minus what is stored; its shards, and one attempt."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from typing import Any, NamedTuple

from lipscope._checks import check_whole
from lipscope._types import UserError
from lipscope.models.scopes import per
from lipscope.study.records import FAILED, SIGMA, Row, RowKey, Sensitivity

WHOLE_MODEL = "model"

GROUPED_TOKENS = 512
"""Samples of one length are solved together up to this many tokens; larger batches gain nothing."""

MOST_REASON = 10_000
"""Characters of the reason of a failed row."""

MOST_SHARDS = 1_000_000

PACKAGES = ("distributed", "cryptography")
"""What the extra `cluster` installs."""

Group = tuple[int, tuple[int, ...]]
"""(n, samples): samples of one length that share one forward pass."""


class Job(NamedTuple):
    """A unit of work, stored completely or not at all.

    It covers samples of one length, at one layer or of the whole model.
    """

    n: int
    samples: tuple[int, ...]
    layer: int | None
    scopes: tuple[str, ...]
    heads: tuple[int, ...]
    probe: str = SIGMA
    cost: float = 1.0

    @property
    def fatal(self) -> bool:
        """Whether an error ends the run; sigma has rows for its errors."""
        return self.probe != SIGMA

    @property
    def place(self) -> str:
        """The name that decides which shard the job belongs to."""
        # Never its samples or scopes: those depend on what is stored already.
        return f"{self.n} {_block(self.n, self.samples[0])} {self.layer}"

    @property
    def group(self) -> Group:
        """The model's input; jobs of one group share its forward pass."""
        return self.n, self.samples

    @property
    def weight(self) -> float:
        """The approximate cost: products with n x d matrices and with n x n matrices."""
        return self.cost * len(self.samples) * self.n * (1 + self.n / 1024)

    def row_keys(self) -> Iterator[RowKey]:
        """(scope, layer, head, n, sample) of every row this job produces."""
        for scope in self.scopes:
            for head in self.heads if per(scope) == "head" else (None,):
                for sample in self.samples:
                    yield scope, self.layer, head, self.n, sample

    def failed_rows(self, reason: str, dtype: str, device: str) -> tuple[Row, ...]:
        """The rows of a job that failed, with the reason."""
        nan = math.nan
        return tuple(
            Row(
                SIGMA,
                *key,
                kind="local",
                norm="2",
                value=nan,
                lower=0.0,
                upper=math.inf,
                residual=nan,
                status=FAILED,
                radius=nan,
                dtype=dtype,
                device=device,
                seconds=nan,
                reason=" ".join(reason.split())[:MOST_REASON],
            )
            for key in self.row_keys()
        )


class Outcome(NamedTuple):
    """The result of a job: its rows, or the reason why there are none.

    Engines run jobs of other kinds too: those of `lipscope budget` and `lipscope reproduce`.

    records: (kind, key, value) of what a study keeps besides rows
    """

    job: Any
    rows: tuple[Any, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    failure: str | None = None
    records: tuple[tuple[str, str, str | bytes], ...] = ()


Work = Callable[[Any], Outcome]


@dataclass(frozen=True)
class Request:
    """What to measure: scopes of layers, with the heads of each layer, at groups of samples."""

    groups: tuple[Group, ...]
    layers: tuple[int, ...]
    heads: Mapping[int, tuple[int, ...]]
    scopes: tuple[str, ...]

    def places(self) -> list[tuple[int | None, tuple[str, ...], tuple[int, ...]]]:
        """(layer, scopes, heads) of the jobs at every group; no layer for the whole model."""
        whole = tuple(scope for scope in self.scopes if per(scope) == "model")
        inside = tuple(scope for scope in self.scopes if scope not in whole)
        places: list[tuple[int | None, tuple[str, ...], tuple[int, ...]]] = [
            (layer, inside, self.heads[layer]) for layer in self.layers if inside
        ]
        if whole:
            places.append((None, whole, ()))
        return places

    def jobs(self, done: Collection[RowKey], probe: str = SIGMA, cost: float = 1.0) -> list[Job]:
        """The remaining jobs of a probe, shortest samples first."""
        jobs = []
        places = self.places()
        for n, samples in self.groups:
            for layer, scopes, heads in places:
                # Samples that lack the same rows stay together.
                missing = defaultdict[tuple[tuple[str, ...], tuple[int, ...]], list[int]](list)
                for sample in samples:
                    one = Job(n=n, samples=(sample,), layer=layer, scopes=scopes, heads=heads)
                    left = [key for key in one.row_keys() if key not in done]
                    maps = tuple(dict.fromkeys(key[0] for key in left))
                    missing[maps, tuple(h for _, _, h, _, _ in left if h is not None)] += [sample]
                jobs += [
                    Job(
                        n=n,
                        samples=tuple(same),
                        layer=layer,
                        scopes=maps,
                        heads=which,
                        probe=probe,
                        cost=cost,
                    )
                    for (maps, which), same in sorted(missing.items())
                    if maps
                ]
        return jobs


class Command(NamedTuple):
    """A command that made a study, or a part of it.

    verb:         measure, bounds or attack
    line:         the command line; empty if the call was made from Python with more than a text
    asked:        what it measures
    probe_prefix: how `Row.probe` begins in the rows that the command writes last at each place
    """

    verb: str
    line: str
    asked: Request
    probe_prefix: str = SIGMA

    def as_json(self) -> dict[str, Any]:
        """The command as JSON-compatible data."""
        asked = {**vars(self.asked), "heads": list(self.asked.heads.items())}
        # "probe" is the key in the files of every version.
        return {"verb": self.verb, "line": self.line, "asked": asked, "probe": self.probe_prefix}

    @staticmethod
    def from_json(data: Any) -> Command:
        """The command that `as_json` wrote; raises KeyError, TypeError or ValueError for others.

        Types and ranges are checked by `lipscope.study.salvage`.
        """
        asked = Request(
            groups=tuple((n, tuple(samples)) for n, samples in data["asked"]["groups"]),
            layers=tuple(data["asked"]["layers"]),
            heads={layer: tuple(heads) for layer, heads in data["asked"]["heads"]},
            scopes=tuple(data["asked"]["scopes"]),
        )
        return Command(
            verb=data["verb"], line=data["line"], asked=asked, probe_prefix=data["probe"]
        )


MOST_COMPARED = 10_000_000
"""Elements that `command_lines` compares before it keeps every line."""


def command_lines(commands: Sequence[Command]) -> list[str]:
    """The command lines, without those that ask for nothing but what another one asks for."""
    made = [one for one in commands if one.line]
    # Every place at every sample, without listing the product.
    keys: list[tuple[frozenset[Any], frozenset[Any]]] = []
    for asked in (one.asked for one in made):
        places = frozenset(
            (scope, layer, head)
            for layer, scopes, heads in asked.places()
            for scope in scopes
            for head in (heads if per(scope) == "head" else (None,))
        )
        samples = frozenset((n, sample) for n, some in asked.groups for sample in some)
        # A product with nothing is nothing.
        keys.append((places, samples) if places and samples else (frozenset(), frozenset()))
    if len(made) * sum(len(places) + len(samples) for places, samples in keys) > MOST_COMPARED:
        return [one.line for one in made]
    return [
        one.line
        for i, one in enumerate(made)
        if not any(
            (one.verb, one.probe_prefix) == (other.verb, other.probe_prefix)
            and keys[i][0] <= keys[j][0]
            and keys[i][1] <= keys[j][1]
            # Of two that ask for the same, the later one stays.
            and (keys[i] != keys[j] or i < j)
            for j, other in enumerate(made)
        )
    ]


class JobCount(NamedTuple):
    """How many jobs of a study are done, of how many asked for."""

    done: int
    asked: int


def count_jobs(commands: Iterable[Command], rows: Iterable[Row]) -> JobCount:
    """The jobs that some commands ask for, each once, and those whose rows are there."""
    asked = defaultdict[tuple[str, int, int, int | None], list[Job]](list)
    for command in commands:
        for layer, scopes, heads in command.asked.places():
            for n, samples in command.asked.groups:
                job = Job(n=n, samples=samples, layer=layer, scopes=scopes, heads=heads)
                if next(job.row_keys(), None) is None:  # heads of a layer that has none
                    continue
                # Runs with more samples or scopes extend a job of an earlier run.
                for probe in {SIGMA, command.probe_prefix}:
                    asked[probe, n, _block(n, samples[0]), layer].append(job)
    there = {probe: set[RowKey]() for probe, *_ in asked}
    for row in rows:
        for probe, keys in there.items():
            if row.probe.startswith(probe):
                keys.add(row[1:6])
    # A job ends at the first row that is missing: the work is bounded by jobs and rows.
    done = sum(
        all(key in there[probe] for job in jobs for key in job.row_keys())
        for (probe, *_), jobs in asked.items()
    )
    return JobCount(done, len(asked))


def grouped(pairs: Sequence[tuple[int, int]]) -> tuple[Group, ...]:
    """Samples (n, sample), shortest first, in groups that are solved together."""
    # Samples are grouped by their number, never by what happens to be missing: rounding depends on
    # the batch, and no result may depend on when a run was interrupted.
    blocks = groupby(sorted(pairs), lambda pair: (pair[0], _block(*pair)))
    return tuple((n, tuple(sample for _, sample in block)) for (n, _), block in blocks)


def _block(n: int, sample: int) -> int:
    """The number of the group, among those of one length, that a sample belongs to."""
    return sample // max(1, GROUPED_TOKENS // n)


def attempt(work: Work, job: Any) -> Outcome:
    """The outcome of a job; an error in it is its outcome."""
    try:
        return work(job)
    except Exception as error:
        return Outcome(job, failure=reason(error))


def reason(error: Exception) -> str:
    """An error in one line of a row's status."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Shard:
    """The `number`-th of `count` parts, counted from 1."""

    number: int
    count: int

    def has(self, name: str) -> bool:
        """Whether the job or model of this name belongs to this part, and to no other."""
        # A hash rather than a count: the same on every machine, whatever else is asked for.
        digest = hashlib.sha256(f"lipscope shard {name}".encode()).digest()
        return int.from_bytes(digest, "big") % self.count == self.number - 1


def check_shard(given: Sequence[int]) -> Shard:
    """(k, N) as a shard, or a UserError."""
    if len(given) != 2:
        raise UserError(f"a shard is a pair (k, N), as in (3, 64); got {tuple(given)}")
    check_whole("the number of shards", given[1], 1, MOST_SHARDS)
    check_whole("the shard", given[0], 1, given[1])
    return Shard(*given)


def parse_shard(text: str) -> Shard:
    """The shard that a command line names, as in 3/64."""
    number, slash, count = text.partition("/")
    if not slash or not number.isdecimal() or not count.isdecimal() or len(text) > 20:
        raise UserError(f"--shard takes K/N, as in 3/64; got {text[:40]!r}")
    return check_shard((int(number), int(count)))


def check_engine(workers: int, cluster: str | None) -> None:
    """Raise UserError for a number of workers or a cluster that cannot be, before work begins."""
    if workers < 1:
        raise UserError(f"workers must be at least 1, got {workers}")
    if cluster is not None and workers > 1:
        raise UserError(
            "workers are processes of this machine; give workers or a cluster, not both"
        )
    if (cluster is not None or workers > 1) and not all(map(find_spec, PACKAGES)):
        raise UserError(
            "workers and clusters need dask; install it with: pip install 'lipscope[cluster]'"
        )
