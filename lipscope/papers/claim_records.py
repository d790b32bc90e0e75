"""What claims measured, kept in the store of a study, and found again under the same conditions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial
from inspect import getsource
from pathlib import Path
from typing import Any

from lipscope import __version__
from lipscope.papers.claims import Claim, Numbers
from lipscope.papers.setting import Setting
from lipscope.study.records import About, Identity, StudyInfo, record_of
from lipscope.study.store import Store
from lipscope.study.validation import CLAIM

PAGE = "reproduce.html"
INFO = StudyInfo(
    record_of(Identity, {"weights": "claims of two papers"}),
    record_of(About, {"model": "claims of two papers", "command": "lipscope reproduce"}),
)
"""Claims have models and texts of their own: the identity of the store only says what it is."""


@dataclass(frozen=True)
class Record:
    """What one run of a claim measured, and under which conditions.

    used: hash of every model and text, or what stood in for it
    code: hash of the source of the run
    """

    id: str
    numbers: Numbers
    quick: bool
    seed: int
    device: str
    seconds: float
    used: dict[str, str]
    code: str = ""
    version: str = __version__

    @property
    def key(self) -> str:
        """One per claim and set of conditions; readable, because damage is reported by key."""
        conditions = json.dumps([self.used, self.code, self.version], sort_keys=True)
        size = "quick" if self.quick else "full"
        return f"{self.id} {size} seed {self.seed} {self.device} {_checksum(conditions)}"


class ClaimRecords:
    """The records of a directory, or of this call alone."""

    def __init__(self, directory: Path | None) -> None:
        self._store = Store.create(directory, INFO, noun="a reproduction", marks=(PAGE,))
        self._records = {
            key: Record(**json.loads(value)) for key, value in self._store.records(CLAIM)
        }

    def find(self, claim: Claim, setting: Setting) -> Record | None:
        """The best record of a claim that this setting would give again; None if there is none.

        A full run beats a quick one, a GPU a processor that could not do it all, then a later run
        an earlier one.
        """
        code = code_of(claim)
        large = "gpu" in claim.needs
        found = [
            record
            for record in self._records.values()
            if (record.id, record.seed, record.version) == (claim.id, setting.seed, __version__)
            and record.code == code
            and (setting.quick or not record.quick)
            and not (large and record.device == "cpu" != setting.device)
            and setting.same(record.used)
        ]
        return max(
            reversed(found),  # of equals, the first is taken
            key=lambda record: (not record.quick, large and record.device != "cpu"),
            default=None,
        )

    def add(self, claim: Claim, record: Record) -> Record:
        """Keep a record; it is on disk when this returns."""
        record = replace(record, code=code_of(claim))
        self._store.put_all([(CLAIM, record.key, json.dumps(record.__dict__, sort_keys=True))])
        self._records.pop(record.key, None)  # the newest is last
        self._records[record.key] = record
        return record

    def close(self) -> None:
        """Release the directory."""
        self._store.close()


def unwrapped(claim: Claim) -> tuple[Any, tuple[Any, ...]]:
    """The function behind `run`, and the arguments that are already given to it."""
    run: Any = claim.run
    arguments: tuple[Any, ...] = ()
    while isinstance(run, partial):
        run, arguments = run.func, (*run.args, *arguments)
    return run, arguments


def code_of(claim: Claim) -> str:
    """A hash of the source of `run`: numbers of another experiment are not this claim's."""
    try:
        return _checksum(getsource(unwrapped(claim)[0]))
    except (OSError, TypeError):  # no source at hand
        return ""


def _checksum(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]
