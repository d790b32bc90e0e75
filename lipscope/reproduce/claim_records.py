"""What claims measured, kept in the store of a study, and found again under the same conditions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from inspect import getsource
from pathlib import Path
from typing import Any

from lipscope import __version__
from lipscope.reproduce.claims import Claim, Numbers
from lipscope.reproduce.setting import PROSE, STAND_IN, Setting
from lipscope.study.records import About, Identity, StudyInfo, record_of
from lipscope.study.store import CLAIM, Store

PAGE, OLD_FILE = "reproduce.html", "claims.jsonl"
INFO = StudyInfo(
    record_of(Identity, {"weights": "claims of two papers"}),
    record_of(About, {"model": "claims of two papers", "command": "lipscope reproduce"}),
)
"""Claims have models and texts of their own: the identity of the store only says what it is."""

OLD_PROSE = "e8120eb72c4b7099687c9794bdf191fa24be16944bec1e02468e0f5574f8b362"
"""sha256 of the prose that stood in when records did not say which; it is that of Python 3.11."""

SAME_NUMBERS = {"V7": "e9fab382d34802c6"}
"""Hashes of earlier runs whose numbers are those of the present ones, by claim."""


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
        self._store = Store.create(directory, INFO, noun="a reproduction", marks=(PAGE, OLD_FILE))
        self._records = {
            key: Record(**json.loads(value)) for key, value in self._store.records(CLAIM)
        }
        if directory is not None:
            self._put(
                record
                for record in map(_dated, read_records(directory / OLD_FILE))
                if record.key not in self._records
            )

    def find(self, claim: Claim, setting: Setting) -> Record | None:
        """The best record of a claim that this setting would give again; None if there is none.

        A full run beats a quick one, a GPU a processor that could not do it all, then a later run
        an earlier one.
        """
        codes, large = {code_of(claim), SAME_NUMBERS.get(claim.id)}, "gpu" in claim.needs
        found = [
            record
            for record in self._records.values()
            if (record.id, record.seed, record.version) == (claim.id, setting.seed, __version__)
            and record.code in codes
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
        self._put([record])
        return record

    def close(self) -> None:
        """Release the directory."""
        self._store.close()

    def _put(self, records: Iterable[Record]) -> None:
        found = {record.key: record for record in records}
        self._store.put_all(
            (CLAIM, key, json.dumps(record.__dict__, sort_keys=True))
            for key, record in found.items()
        )
        for key, record in found.items():
            self._records.pop(key, None)  # the newest is last
            self._records[key] = record


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


def read_records(path: Path) -> Iterator[Record]:
    """The intact records of a file of JSON lines, as earlier versions wrote it."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        checksum, _, content = line.partition(" ")
        if checksum == _checksum(content):
            yield Record(**json.loads(content))


def _dated(record: Record) -> Record:
    """The record of an earlier version with the prose that it was made with."""
    plain = STAND_IN + PROSE
    dated = f"{plain} (sha256 {OLD_PROSE})"
    used = {name: dated if what == plain else what for name, what in record.used.items()}
    return replace(record, used=used)
