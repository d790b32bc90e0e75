"""Run the claims of the papers, keep what they measured, and judge it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lipscope import UserError, __version__
from lipscope._ambient import entry_point
from lipscope._display import with_bar
from lipscope._files import whole_file
from lipscope.papers import registry
from lipscope.papers.claim_runs import (
    INFO,
    MISSING,
    PAGE,
    ClaimJob,
    ClaimWork,
    Record,
    find_record,
    group_of,
    open_claims,
    start_claims,
)
from lipscope.papers.claims import PAPERS, Claim, Kind, Verdict
from lipscope.papers.page import Entry, reproduction_html
from lipscope.papers.quoted import QUOTED
from lipscope.papers.setting import STAND_IN, TEXTS, TOKENIZER, Progress, Setting
from lipscope.study.engines import open_engine
from lipscope.study.jobs import check_engine, check_shard
from lipscope.study.run import run_jobs


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

    def as_dict(self) -> dict[str, Any]:
        """The outcome as JSON: id, paper, says, needs, verdict, numbers."""
        verdict = self.verdict
        return {
            "id": self.claim.id,
            "paper": self.claim.paper,
            "says": self.claim.says,
            "needs": self.claim.needs,
            "source": QUOTED[self.claim.id].source,
            "quoted": dict(QUOTED[self.claim.id].values),
            "verdict": None if verdict is None else verdict.kind.value,
            "holds": None if verdict is None else verdict.holds,
            "interval": None if verdict is None else verdict.interval,
            "reason": self.error or ("" if verdict is None else verdict.reason),
            "numbers": None if self.record is None else self.record.numbers,
            "used": {} if self.record is None else self.record.used,
            "quick": None if self.record is None else self.record.quick,
            "device": None if self.record is None else self.record.device,
            "seconds": None if self.record is None else self.record.seconds,
        }


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
    listed = registry.chosen(paper, only)
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
            partial(start_claims, __version__, registry.claims, setting.options),
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
            write_page(outcomes, directory / PAGE, setting)
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


def write_page(outcomes: Sequence[Outcome], path: Path, setting: Setting) -> None:
    """Write `reproduce.html`."""
    about = f"lipscope {__version__}, {'quick run' if setting.quick else 'full run'}"
    html = reproduction_html([_entry(one) for one in outcomes], PAPERS, about)
    with whole_file(path) as draft:
        draft.write_text(html, encoding="utf-8")


def _entry(one: Outcome) -> Entry:
    claim = one.claim
    verdict = one.verdict
    record = one.record
    return Entry(
        id=claim.id,
        paper=claim.paper,
        says=claim.says,
        source=QUOTED[claim.id].source,
        needs=claim.needs,
        verdict=one.word,
        range=None if verdict is None else verdict.interval,
        reason=one.error if verdict is None else verdict.reason,
        about="" if record is None else _about(record),
        command=_command(claim, record),
        picture=None if record is None or claim.plot is None else claim.plot(record.numbers),
    )


def _about(record: Record) -> str:
    used = "; ".join(f"{name}: {_short(what)}" for name, what in record.used.items())
    size = "quick" if record.quick else "full"
    return f"{size}, {record.device}, {record.seconds:.1f} s, seed {record.seed}" + (
        f"; {used}" if used else ""
    )


def _short(what: str) -> str:
    """A note with the first digits of its hash."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", what)


def _command(claim: Claim, record: Record | None) -> str:
    parts = ["lipscope reproduce --only", claim.id]
    if record is not None:
        brought = {name for name, what in record.used.items() if what.startswith("sha256 ")}
        options = {
            "--quick": record.quick,
            "--models DIR": brought - TEXTS.keys(),
            "--text-dir DIR": brought & TEXTS.keys(),
            f"--device {record.device}": record.device != "cpu",
            f"--seed {record.seed}": record.seed != 0,
        }
        parts += [words for words, given in options.items() if given]
    return " ".join([*parts, "--out DIR"])
