"""Run the claims of the papers as jobs of a study, keep what they measured, and judge it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import getsource
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lipscope import UserError, __version__
from lipscope._ambient import entry_point
from lipscope._display import with_bar
from lipscope.papers.claims import PAPERS, QUOTED, Claim, Kind, NotAvailable, Numbers, Verdict
from lipscope.papers.page import reproduction_html
from lipscope.papers.setting import STAND_IN, TEXTS, TOKENIZER, Progress, Setting
from lipscope.report.document import write
from lipscope.study.engines import open_engine
from lipscope.study.jobs import Outcome as JobOutcome
from lipscope.study.jobs import check_engine, check_shard
from lipscope.study.records import Description, Fingerprint, StudyHeader, record_of
from lipscope.study.run import run_jobs
from lipscope.study.salvage import CLAIM
from lipscope.study.store import Store

MODULES = (
    *("castin_checks", "castin_heads", "castin_measures", "castin_text"),
    *("kim_bounds", "kim_flow", "kim_layers", "kim_training"),
)
"""The files with claims, each in a list CLAIMS."""

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

    def __call__(self, job: ClaimJob) -> JobOutcome:
        claim = self.claims[job.id]
        setting = self.setting
        setting.used = {}
        setting.progress = lambda done, total: self.report(done / max(total, 1))
        began = time.perf_counter()
        try:
            numbers = claim.run(setting)
        except NotAvailable as missing:
            return JobOutcome(job, failure=f"{MISSING}{missing}")
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
        return JobOutcome(job, records=(record.stored(),))


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


def claims() -> list[Claim]:
    """Every claim, ordered by paper, letter and number."""
    found = [claim for name in MODULES for claim in import_module(f"lipscope.papers.{name}").CLAIMS]
    return sorted(found, key=lambda claim: ("CSVNKA".index(claim.id[0]), int(claim.id[1:])))


def chosen(paper: str | None = None, only: Sequence[str] | None = None) -> list[Claim]:
    """The claims of a paper, or those named; raises UserError for what does not exist."""
    every = claims()
    if paper is not None and paper not in PAPERS:
        raise UserError(f"there is no paper {paper!r}; choose one of {', '.join(PAPERS)}")
    found = [claim for claim in every if paper is None or claim.paper == paper]
    if only is None:
        return found
    known = {claim.id: claim for claim in found}
    names: list[str] = []
    for part in only:
        name = part.strip()
        span = re.fullmatch(r"([A-Z])(\d{1,3})-\1(\d{1,3})", name)
        ends = range(int(span[2]), int(span[3]) + 1) if span else ()
        names += [f"{span[1]}{i}" for i in ends if span] or [name]
    for name in names:
        if name not in known:
            raise UserError(
                f"there is no claim {name!r}{f' of {paper}' if paper else ''}; "
                "`lipscope reproduce --list` names them all"
            )
    return [claim for claim in found if claim.id in names]


@dataclass(frozen=True)
class Outcome:
    """A claim with its verdict, or with the error that its run ended with.

    Attributes:
        claim: The claim.
        verdict: What the numbers say; None if the run failed.
        record: The numbers; None if the run failed or something was missing.
        error: Why the run failed; empty otherwise.

    """

    claim: Claim
    verdict: Verdict | None
    record: Record | None = None
    error: str = ""

    @property
    def word(self) -> str:
        """The verdict in capitals; a stand-in with what was found on it."""
        if self.verdict is None:
            return "FAILED"
        if self.verdict.kind is not Kind.STAND_IN:
            return self.verdict.kind.value
        held = Kind.REPRODUCED if self.verdict.holds else Kind.DIFFERS
        return f"{Kind.STAND_IN.value}: {held.value}"

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the quantity that was judged, if it is one number."""
        return None if self.verdict is None else self.verdict.interval

    @property
    def reason(self) -> str:
        """Why the verdict is what it is, or why there is none."""
        return self.error if self.verdict is None else self.verdict.reason

    def as_dict(self) -> dict[str, Any]:
        """The outcome as JSON: id, paper, says, needs, verdict, numbers."""
        verdict = self.verdict
        record = self.record
        return {
            "id": self.claim.id,
            "paper": self.claim.paper,
            "says": self.claim.says,
            "needs": self.claim.needs,
            "source": QUOTED[self.claim.id].source,
            "quoted": dict(QUOTED[self.claim.id].values),
            "verdict": None if verdict is None else verdict.kind.value,
            "holds": None if verdict is None else verdict.holds,
            "interval": self.interval,
            "reason": self.reason,
            "numbers": getattr(record, "numbers", None),
            "used": {} if record is None else record.used,
        } | {name: getattr(record, name, None) for name in ("quick", "device", "seconds")}


@entry_point
@torch.enable_grad()
@with_bar("reproducing")
def reproduce_papers(
    paper: str | None = None,
    only: Sequence[str] | None = None,
    *,
    models: os.PathLike[str] | None = None,
    texts: os.PathLike[str] | None = None,
    quick: bool = False,
    device: str = "cpu",
    seed: int = 0,
    workers: int = 1,
    cluster: str | None = None,
    shard: Sequence[int] | None = None,
    out: os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Test the claims of Castin et al. (2024) and Kim et al. (2021).

    Each claim is run once under a setting; with `out`, its numbers are kept, and the next call
    with the same models and texts only judges them again.

    Args:
        paper: "castin2024" or "kim2021". Default: both.
        only: Ids of claims, such as "C25", or ranges, such as "C1-C8". Default: all.
        models: A folder with models by name, such as "bert-base-uncased" and "gpt2". The embedded
            model stands in for those that are missing.
        texts: A folder with texts; see docs/reproduction.md for the file names. The embedded prose
            stands in for those that are missing.
        quick: Run each claim in seconds, with fewer lengths, samples and steps.
        device: The device for large runs.
        seed: Seed of everything random.
        workers: Number of worker processes on this machine; 1 runs claims in this process.
        cluster: Workers on other machines: the address of a dask scheduler, or a batch system and
            a number of its jobs ("slurm:64"); see docs/scaling.md.
        shard: (k, N): run only the k-th of N parts of the claims, k from 1.
        out: Directory for the numbers and for `reproduce.html`; repeat the call to resume.
        progress: Called with the number of claims done and their total.

    Returns:
        One outcome per claim, with its verdict.

    Raises:
        UserError: If a claim, a paper or a folder does not exist, or workers cannot be started.

    Example:
        >>> import lipscope as ls
        >>> outcome, = ls.reproduce_papers(only=["S3"], quick=True)
        >>> outcome.claim.id, outcome.word
        ('S3', 'REPRODUCED')
    """
    if torch.get_default_dtype() != torch.float32:
        raise UserError(
            "the claims draw their models in float32, and torch's default dtype is "
            f"{torch.get_default_dtype()}; call torch.set_default_dtype(torch.float32) first"
        )
    check_engine(workers, cluster)
    listed = chosen(paper, only)
    if shard is not None:
        part = check_shard(shard)
        listed = [claim for claim in listed if part.has(claim.id)]
    setting = Setting(
        quick=quick,
        models=None if models is None else Path(models),
        texts=None if texts is None else Path(texts),
        device=device,
        seed=seed,
    )
    directory = None if out is None else Path(out)
    with closing(open_claims(directory)) as store:
        missing = [claim for claim in listed if find_record(store, claim, setting) is None]
        failures = run_jobs(
            ClaimWork({claim.id: claim for claim in missing}, setting),
            partial(start_claims, __version__, claims, setting.options),
            [ClaimJob(claim.id, group_of(claim)) for claim in missing],
            store,
            INFO,
            engine=partial(open_engine, workers, cluster),
            progress=progress,
        )
        why = {job.id: failure for job, failure in failures.items()}
        outcomes = [
            _outcome(claim, why.get(claim.id) or find_record(store, claim, setting))
            for claim in listed
        ]
        if directory is not None:
            about = f"lipscope {__version__}, {'quick run' if quick else 'full run'}"
            write(reproduction_html(outcomes, about), directory / PAGE, typed=False)
    return outcomes


def _outcome(claim: Claim, end: Record | str | None) -> Outcome:
    """The outcome of a claim from its record, or from the reason why it has none."""
    assert end is not None
    if isinstance(end, str):
        if end.startswith(MISSING):
            return Outcome(claim, Verdict(Kind.NEEDS, None, reason=end.removeprefix(MISSING)))
        return Outcome(claim, None, error=end)
    try:
        return Outcome(claim, decide(claim, end), end)
    except Exception as error:  # one claim that fails must not take the others with it
        return Outcome(claim, None, error=f"{type(error).__name__}: {error}")


def decide(claim: Claim, record: Record) -> Verdict:
    """The verdict of a claim from its stored numbers; STAND-IN if something stood in."""
    verdict = claim.judge(record.numbers, QUOTED[claim.id])
    # Where nothing was read, the tokenizer was not used.
    read = any(name in TEXTS for name in record.used)
    stood_in = [
        f"{what.removeprefix(STAND_IN).partition(' (sha256')[0]} in place of {name}"
        for name, what in record.used.items()
        if what.startswith(STAND_IN) and (read or not name.endswith(TOKENIZER))
    ]
    if not stood_in or verdict.kind is Kind.NEEDS:
        return verdict
    reason = f"{verdict.reason} (on {', '.join(stood_in)})"
    return replace(verdict, kind=Kind.STAND_IN, reason=reason)
