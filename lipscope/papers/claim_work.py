"""Run claims in this process or on workers, one job per claim."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from lipscope import __version__
from lipscope._types import UserError
from lipscope.papers import registry
from lipscope.papers.claim_records import Record, unwrapped
from lipscope.papers.claims import Claim, NotAvailable
from lipscope.papers.setting import Setting
from lipscope.study.engines import Engine
from lipscope.study.jobs import Outcome, run_in_process


class ClaimJob(NamedTuple):
    """A claim to run; those of one group share measurements, which a worker keeps."""

    id: str
    group: str
    fatal: bool = False


@dataclass
class ClaimWork:
    """Runs a claim under a setting, which keeps models and shared measurements.

    The one row of an outcome is a Record, or what is missing, NotAvailable.
    """

    claims: dict[str, Claim]
    setting: Setting

    def __call__(self, job: ClaimJob) -> Outcome:
        try:
            return Outcome(job, (measured(self.claims[job.id], self.setting),))
        except NotAvailable as missing:
            return Outcome(job, (missing,))


def measured(claim: Claim, setting: Setting) -> Record:
    """The record of one run of a claim."""
    setting.used = {}
    began = time.perf_counter()
    numbers = claim.run(setting)
    return Record(
        id=claim.id,
        # As it will be read back: tuples become lists, keys become strings.
        numbers=json.loads(json.dumps(numbers)),
        quick=setting.quick,
        seed=setting.seed,
        device=setting.device,
        seconds=time.perf_counter() - began,
        used=dict(setting.used),
    )


def run_claims(
    claims: Sequence[Claim], setting: Setting, engine: Engine | None
) -> Generator[Outcome]:
    """One result per claim, in the order in which they are done; the engine None is this process.

    Raises:
        UserError: If a worker has another version of lipscope, or not the same folders.
    """
    by_id = {claim.id: claim for claim in claims}
    jobs = [ClaimJob(claim.id, _group(claim)) for claim in claims]
    if engine is None:
        return run_in_process(ClaimWork(by_id, setting), jobs)
    # A worker has the claims itself: functions made by functions do not travel.
    return engine.run(partial(start_claims, __version__, registry.claims, setting.options), jobs)


def _group(claim: Claim) -> str:
    """Claims that run the same function with the same arguments share what it measures."""
    run, arguments = unwrapped(claim)
    return f"{run.__module__}.{run.__qualname__} {arguments}"


def start_claims(
    version: str, claims: Callable[[], list[Claim]], options: dict[str, Any], threads: int
) -> ClaimWork:
    """The same work, on a worker."""
    if version != __version__:
        raise UserError(
            f"the worker has lipscope {__version__}, not {version}; install the same everywhere"
        )
    torch.set_num_threads(threads)
    return ClaimWork({claim.id: claim for claim in claims()}, Setting(**options))
