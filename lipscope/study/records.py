"""The records of a study: rows, token norms, and the facts that determine every number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lipscope._types import UserError

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

SIGMA = "sigma"
"""The probe that measures the local Lipschitz constant."""

BUDGET = "budget"
OBSERVED = "observed error"
WORST_CASE = "worst case"
"""The probes of predicted and observed numerical errors; the scope of their rows is a format."""

FAILED = "failed"
FAILING = (FAILED, "overflow", "non_finite")


class Row(NamedTuple):
    """One number of a study, with its certificate.

    probe:       what was measured ("sigma": the local Lipschitz constant)
    scope:       of which map
    layer, head: where; no layer for the whole model, no head for all heads together
    n, sample:   at which input
    kind, norm:  "local" and "2" for sigma; bounds have the kinds "upper" and "lower"
    status:      converged, breakdown, resolution, imprecise, max_steps, overflow, non_finite or
                 failed; evaluated, predicted or observed for numbers that are not solved for
    radius:      the largest norm of a token at the map's input
    seconds:     time of the solve, divided by the size of its batch
    reason:      why the row failed, or why a requested gap was not reached; empty otherwise
    extra:       what only this probe has to say, as a JSON object
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
    reason: str = ""
    extra: Mapping[str, Any] = {}

    def __hash__(self) -> int:
        # Rows stay members of sets: what is equal has an equal hash without `extra` too.
        return hash(self[:-1])

    @property
    def failing(self) -> bool:
        """Whether the row has no number, according to its status."""
        return self.status in FAILING

    @property
    def missed(self) -> str:
        """Why a requested gap was not reached; empty if it was, or if none was requested."""
        return "" if self.failing else self.reason

    @property
    def explained(self) -> str:
        """The status, and the reason if there is one."""
        return f"{self.status}: {self.reason}" if self.reason else self.status

    def flat(self) -> tuple[Any, ...]:
        """The fields in order, with `extra` as text, for tables."""
        return (*self[:-1], json.dumps(self.extra) if self.extra else "")


COLUMNS = Row._fields


class Sensitivity(NamedTuple):
    """How much each token causes (`right`) and receives (`left`) the largest change of one map.

    The norms, token by token, of the right and left singular vectors; each list has norm 1.
    """

    scope: str
    layer: int | None
    head: int | None
    n: int
    sample: int
    right: tuple[float, ...]
    left: tuple[float, ...]


class SampleTokens(NamedTuple):
    """The tokens of one sample as text; empty if the model does not read text."""

    n: int
    sample: int
    tokens: tuple[str, ...]


RowKey = tuple[str, int | None, int | None, int, int]
"""(scope, layer, head, n, sample) of a row."""


@dataclass(frozen=True)
class Fingerprint:
    """Everything, besides a row's own columns, that determines its number; one per study."""

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
    gap: float | None = None

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the fields in which two identities differ."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


@dataclass(frozen=True)
class Description:
    """The description of a study for its readers; nothing here affects a number."""

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
    random_init: int | None = None


@dataclass(frozen=True)
class StudyHeader:
    """Identity and description of a study."""

    identity: Fingerprint
    about: Description


_EMPTY: dict[str, Any] = {
    "str": "unknown",
    "int": 0,
    "bool": False,
    "float": 0.0,
    "int | None": None,
    "float | None": None,
    "dict[str, str]": {},
}
"""What stands for a lost field, by its annotation."""


def record_of(kind: type[T], facts: Any) -> T:
    """A Fingerprint or Description from facts that may lack fields, or be lost."""
    known = facts if isinstance(facts, dict) else {}
    empty = {f.name: _EMPTY[str(f.type)] for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: known.get(name, value) for name, value in empty.items()})


def data_frame(records: Iterable[tuple[Any, ...]], columns: Sequence[str]) -> pd.DataFrame:
    """A DataFrame with these columns; `layer` and `head` are nullable integers.

    Raises:
        UserError: If pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise UserError(
            "to_dataframe needs pandas; install it with: pip install 'lipscope[data]'"
        ) from error
    frame = pd.DataFrame.from_records(list(records), columns=list(columns))
    return frame.astype({name: "Int64" for name in ("layer", "head") if name in columns})
