"""What a claim of a paper is: how to run it, how to judge its numbers, and what a verdict says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipscope.papers.page import Picture
    from lipscope.papers.setting import Setting

Numbers = dict[str, Any]
"""What a run measured: JSON, stored as it is; the only thing that a judge and a plot see."""

PAPERS = {
    "castin2024": "Castin, Ablin and Peyré (2024), How smooth is attention?",
    "kim2021": "Kim, Papamakarios and Mnih (2021), The Lipschitz constant of self-attention",
}


class Kind(StrEnum):
    """What a verdict says."""

    REPRODUCED = "REPRODUCED"
    DIFFERS = "DIFFERS"
    STAND_IN = "STAND-IN"
    NEEDS = "NEEDS"


@dataclass(frozen=True)
class Quoted:
    """What a paper states: numbers by name, and where they stand."""

    source: str
    values: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.values[name]


@dataclass(frozen=True)
class Verdict:
    """What stored numbers say about a claim.

    kind:     REPRODUCED, DIFFERS, STAND-IN or NEEDS
    holds:    whether the claim held where it was tested; None if it could not be tested
    interval: of the quantity that was judged, where it is one number
    reason:   what was compared with what; for DIFFERS, the cause that was tested
    """

    kind: Kind
    holds: bool | None
    interval: tuple[float, float] | None = None
    reason: str = ""


def judged(holds: bool, reason: str, interval: tuple[float, float] | None = None) -> Verdict:
    """The verdict of a claim that was tested as it is stated; `decide` knows about stand-ins."""
    kind = Kind.REPRODUCED if holds else Kind.DIFFERS
    return Verdict(kind=kind, holds=bool(holds), interval=interval, reason=reason)


class NotAvailable(Exception):  # noqa: N818, it is an answer, not an error
    """Raised by a run for something that the user must bring; the verdict is NEEDS."""


@dataclass(frozen=True)
class Claim:
    """One claim: an id, what the paper says, and how it is tested.

    id:    as in the table of the documentation, for example "C25"
    paper: "castin2024" or "kim2021"
    says:  the claim in our own words
    needs: what the full test needs: "nothing", "gpu", "bert-base-uncased", "Alice text", ...
    run:   measures; what it returns is stored
    judge: compares stored numbers with the quoted ones
    plot:  the figure beside the paper's, drawn from stored numbers
    """

    id: str
    paper: str
    says: str
    needs: str
    run: Callable[[Setting], Numbers]
    judge: Callable[[Numbers, Quoted], Verdict]
    plot: Callable[[Numbers], Picture] | None = None


def castin_claim(
    id: str,
    says: str,
    run: Callable[[Setting], Numbers],
    judge: Callable[[Numbers, Quoted], Verdict],
    plot: Callable[[Numbers], Picture] | None = None,
    needs: str = "nothing",
) -> Claim:
    """A claim of the first paper, which has most of them."""
    return Claim(id=id, paper="castin2024", says=says, needs=needs, run=run, judge=judge, plot=plot)
