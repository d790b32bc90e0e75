"""What a study is made of: rows, the tokens behind them, jobs, and the facts that decide every number."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

FAILED = "failed"
FAILING = (FAILED, "overflow", "non_finite")


class Row(NamedTuple):
    """One number of a study, with its certificate.

    probe: what was asked ("sigma": the local Lipschitz constant); scope: of which map.
    n, sample: at which input.
    layer, head: where; no layer for the whole model, no head for all heads together.
    kind and norm: "local" and "2" for sigma; bounds have "upper" and "lower".
    status: converged, breakdown, resolution, imprecise, max_steps, overflow, non_finite, or
            "failed: why"; a gap asked for and not reached is added to it:
            "converged: gap not reached: why".
    radius: the largest norm of a token at the map's input.
    seconds: time of the solve, shared out over its batch.
    """

    probe: str
    scope: str
    layer: int | None
    head: int | None
    n: int
    sample: int
    kind: str
    norm: str
    value: float
    lower: float
    upper: float
    residual: float
    status: str
    radius: float
    dtype: str
    device: str
    seconds: float

    @property
    def failing(self) -> bool:
        """Whether there is no number here, by its own status."""
        return self.status.split(":")[0] in FAILING

    @property
    def missed(self) -> str:
        """Why a gap asked for was not reached; empty where it was, or where none was asked for."""
        return "" if self.failing else self.status.partition(": ")[2]

    def check(self) -> Row:
        """This row, once it says nothing that cannot be true."""
        if math.isnan(self.value):
            if not self.failing:
                raise ValueError(
                    f"status {self.status!r} promises a value, and there is none: {self}"
                )
        elif not self.lower <= self.value <= self.upper:
            raise ValueError(f"lower <= value <= upper does not hold: {self}")
        return self


COLUMNS = Row._fields


class Sensitivity(NamedTuple):
    """How much each token of a sample drives (`right`) and receives (`left`) the largest change of one map.

    The norms, token by token, of the right and left singular vectors; each list has norm one.
    """

    scope: str
    layer: int | None
    head: int | None
    n: int
    sample: int
    right: tuple[float, ...]
    left: tuple[float, ...]


class Sample(NamedTuple):
    """The tokens of one sample as text; empty where the model reads no text."""

    n: int
    sample: int
    tokens: tuple[str, ...]


Input = tuple[int, tuple[int, ...]]


class Job(NamedTuple):
    """A unit of work, kept whole or not at all: samples of one length at one layer, or of the whole model."""

    n: int
    samples: tuple[int, ...]
    layer: int | None
    scopes: tuple[str, ...]
    heads: tuple[int, ...]

    @property
    def input(self) -> Input:
        """What the model is run on: jobs with the same input share one forward pass."""
        return self.n, self.samples

    @property
    def weight(self) -> float:
        """Roughly what it costs: products with n x d matrices, and n x n of them."""
        return len(self.samples) * self.n * (1 + self.n / 1024)

    def targets(self) -> list[tuple[str, int | None, int | None, int, int]]:
        """(scope, layer, head, n, sample) of every row this job owes."""
        return [
            (scope, self.layer, head, self.n, sample)
            for scope in self.scopes
            for head in (self.heads if scope == "heads" else (None,))
            for sample in self.samples
        ]

    def failed_rows(self, reason: str, dtype: str, device: str) -> tuple[Row, ...]:
        """The rows of a job that could not be done, and why."""
        nan, status = math.nan, f"{FAILED}: {' '.join(reason.split())}"
        return tuple(
            Row(
                "sigma",
                *target,
                "local",
                "2",
                nan,
                0.0,
                math.inf,
                nan,
                status,
                nan,
                dtype,
                device,
                nan,
            )
            for target in self.targets()
        )


class Outcome(NamedTuple):
    """What came of a job: its rows, or the reason why there are none."""

    job: Job
    rows: tuple[Row, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    failure: str | None = None


class Settings(NamedTuple):
    """How well numbers are to be known: relative residual, upper / lower - 1 (None: as it comes); and the seed."""

    tol: float
    gap: float | None
    seed: int


@dataclass(frozen=True)
class Identity:
    """Everything, beside a row's own columns, that decides its number. One study has one."""

    weights: str
    config: str
    revision: str
    tokenizer: str
    text: str
    special_tokens: bool
    dtype: str
    mask: str
    tol: float
    seed: int
    numeric_version: int
    gap: float | None = None  # studies from before it could be asked for have none

    def differences(self, other: Identity) -> list[str]:
        """Names of the fields in which two identities differ."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


@dataclass(frozen=True)
class About:
    """What a reader wants to know of a study; nothing here decides a number."""

    model: str
    architecture: str
    layers: int
    heads: int
    device: str
    text: str
    text_tokens: int
    scopes: dict[str, str]
    difference_to_eager: float
    confidence: float
    versions: dict[str, str]
    command: str


@dataclass(frozen=True)
class StudyInfo:
    """Identity and description of a study."""

    identity: Identity
    about: About
