"""Claims as jobs of a study without a model; what one measured is found again later."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import getsource
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lipscope import UserError, __version__
from lipscope.papers.claims import Claim, NotAvailable, Numbers
from lipscope.papers.setting import Setting
from lipscope.study.jobs import Outcome
from lipscope.study.records import Description, Fingerprint, StudyHeader, record_of
from lipscope.study.salvage import CLAIM
from lipscope.study.store import Store

PAGE = "reproduce.html"
MISSING = "needs: "
"""Begins the failure of a claim without something that the user must bring."""

INFO = StudyHeader(
    record_of(Fingerprint, {"weights": "claims of two papers"}),
    record_of(Description, {"model": "claims of two papers", "command": "lipscope reproduce"}),
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

    def stored(self) -> tuple[str, str, str]:
        """The record as a study keeps it."""
        return CLAIM, self.key, json.dumps(self.__dict__, sort_keys=True)


class ClaimJob(NamedTuple):
    """A claim to run; those of one group share measurements, which a worker keeps."""

    id: str
    group: str
    weight: float = 1.0
    fatal: bool = False

    @property
    def place(self) -> str:
        """The name that decides which shard the claim belongs to."""
        return self.id

    def failed_rows(self, reason: str, dtype: str, device: str) -> tuple[()]:
        """Nothing: a claim that failed is run again."""
        return ()


@dataclass
class ClaimWork:
    """Runs a claim under a setting, which keeps models and shared measurements.

    report: tells which share of the current claim is done
    """

    claims: dict[str, Claim]
    setting: Setting
    report: Callable[[float], None] = lambda share: None

    def __call__(self, job: ClaimJob) -> Outcome:
        claim = self.claims[job.id]
        setting = self.setting
        setting.used = {}
        setting.progress = lambda done, total: self.report(done / max(total, 1))
        began = time.perf_counter()
        try:
            numbers = claim.run(setting)
        except NotAvailable as missing:
            return Outcome(job, failure=f"{MISSING}{missing}")
        record = Record(
            id=claim.id,
            numbers=numbers,
            quick=setting.quick,
            seed=setting.seed,
            device=setting.device,
            seconds=time.perf_counter() - began,
            used=dict(setting.used),
            code=code_of(claim),
        )
        return Outcome(job, records=(record.stored(),))


def start_claims(
    version: str, claims: Callable[[], list[Claim]], options: dict[str, Any], threads: int
) -> ClaimWork:
    """The same work, on a worker, which has the claims itself: local functions do not travel."""
    if version != __version__:
        raise UserError(
            f"the worker has lipscope {__version__}, not {version}; install the same everywhere"
        )
    torch.set_num_threads(threads)
    return ClaimWork({claim.id: claim for claim in claims()}, Setting(**options))


def open_claims(directory: Path | None) -> Store:
    """The store of a reproduction, in a directory or in memory."""
    return Store.create(directory, INFO, noun="a reproduction", marks=(PAGE,))


def find_record(store: Store, claim: Claim, setting: Setting) -> Record | None:
    """The best record of a claim that this setting would give again; None if there is none.

    A full run beats a quick one, a GPU a processor that could not do it all, then a later run
    an earlier one.
    """
    code = code_of(claim)
    large = "gpu" in claim.needs
    every = (Record(**json.loads(value)) for _, value in store.records(CLAIM))
    found = [
        record
        for record in every
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


def group_of(claim: Claim) -> str:
    """Claims that run the same function with the same arguments share what it measures."""
    run, arguments = unwrapped(claim)
    return f"{run.__module__}.{run.__qualname__} {arguments}"


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
