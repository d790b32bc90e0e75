"""Run claims one after the other, keep what they measured, and judge it.

Numbers are kept in one file of JSON lines, not in the store of a study: a study holds rows of one
model and one text, a claim holds whatever its figure needs. Every line carries a checksum and is on
disk before the next claim starts. Two such files from two machines are joined by appending one to
the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import getsource
from pathlib import Path
from typing import Any

from lipscope import __version__
from lipscope._checks import explained
from lipscope._files import claim_folder, whole_file
from lipscope._types import UserError
from lipscope.report.reproduction import Entry, reproduction_html
from lipscope.reproduce.claims import PAPERS, Claim, Kind, NotAvailable, Numbers, Verdict
from lipscope.reproduce.quoted import QUOTED
from lipscope.reproduce.registry import chosen
from lipscope.reproduce.setting import Progress, Setting

FILE, PAGE, LOCK = "claims.jsonl", "reproduce.html", "claims.lock"


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


@explained
def reproduce_papers(
    paper: str | None = None,
    only: Sequence[str] | None = None,
    *,
    models: os.PathLike[str] | None = None,
    texts: os.PathLike[str] | None = None,
    quick: bool = False,
    device: str = "cpu",
    seed: int = 0,
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
        out: Directory for the numbers and for `reproduce.html`.
        progress: Called with the number of claims done and their total.

    Returns:
        One outcome per claim, with its verdict.

    Raises:
        UserError: If a claim, a paper or a folder does not exist.

    Example:
        >>> import lipscope as ls
        >>> outcome, = ls.reproduce_papers(only=["S3"], quick=True)
        >>> outcome.claim.id, outcome.word
        ('S3', 'REPRODUCED')
    """
    listed = chosen(paper, only)
    setting = Setting(
        quick=quick,
        models=_folder("models", models),
        texts=_folder("texts", texts),
        device=device,
        seed=seed,
    )
    with _kept(None if out is None else Path(out)) as keep:
        outcomes = []
        for i, claim in enumerate(listed):
            if progress is not None:
                progress(i, len(listed))
                setting.progress = _inner(progress, i, len(listed))
            outcomes.append(_outcome(claim, setting, keep))
        if out is not None:
            write_page(outcomes, Path(out) / PAGE, setting)
    return outcomes


def _inner(progress: Progress, done: int, total: int) -> Progress:
    """Progress inside claim `done`, as a fraction of one claim."""
    return lambda part, whole: progress(done + min(part / max(whole, 1), 1.0), total)


def _folder(name: str, given: os.PathLike[str] | None) -> Path | None:
    if given is None:
        return None
    folder = Path(given)
    if not folder.is_dir():
        raise UserError(f"{name} must be a folder, and there is none at {folder}")
    return folder


def _outcome(claim: Claim, setting: Setting, keep: Keep) -> Outcome:
    try:
        record = keep.find(claim, setting) or keep.add(_measure(claim, setting))
        return Outcome(claim, decide(claim, record), record)
    except NotAvailable as missing:
        return Outcome(claim, Verdict(Kind.NEEDS, None, reason=str(missing)))
    except Exception as error:  # one claim that fails must not take the others with it
        return Outcome(claim, None, error=f"{type(error).__name__}: {error}")


def _measure(claim: Claim, setting: Setting) -> Record:
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
        code=_code(claim),
    )


def _code(claim: Claim) -> str:
    """A hash of the source of `run`: numbers of another experiment are not this claim's."""
    run: Any = claim.run
    while isinstance(run, partial):
        run = run.func
    try:
        return _checksum(getsource(run))
    except (OSError, TypeError):  # no source at hand
        return ""


def decide(claim: Claim, record: Record) -> Verdict:
    """The verdict of a claim from its stored numbers; STAND-IN if something stood in."""
    verdict = claim.judge(record.numbers, QUOTED[claim.id])
    stood_in = [
        f"{what.removeprefix('stand-in ')} in place of {name}"
        for name, what in record.used.items()
        if what.startswith("stand-in ")
    ]
    if not stood_in or verdict.kind is Kind.NEEDS:
        return verdict
    reason = f"{verdict.reason} (on {', '.join(stood_in)})"
    return replace(verdict, kind=Kind.STAND_IN, reason=reason)


class Keep:
    """The records of a directory, or of this call alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._records = [] if path is None else list(read_records(path))

    def find(self, claim: Claim, setting: Setting) -> Record | None:
        """The last record of a claim that this setting would give again; a full run beats quick."""
        for record in reversed(self._records):
            enough = record.quick == setting.quick or not record.quick
            same = (record.id, record.seed) == (claim.id, setting.seed)
            same = same and (record.version, record.code) == (__version__, _code(claim))
            # A GPU is asked for where a processor could not do it all.
            again = "gpu" in claim.needs and record.device == "cpu" != setting.device
            if enough and same and not again and setting.same(record.used):
                return record
        return None

    def add(self, record: Record) -> Record:
        """Append a record; it is on disk when this returns."""
        self._records.append(record)
        if self._path is None:
            return record
        content = json.dumps(record.__dict__, sort_keys=True)
        with open(self._path, "ab") as file:
            # A line that a crash cut short would otherwise swallow this one.
            torn = file.tell() > 0 and not self._path.read_bytes().endswith(b"\n")
            file.write(b"\n" * torn + f"{_checksum(content)} {content}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        return record


def _checksum(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_records(path: Path) -> Iterator[Record]:
    """The intact records of a file; damaged lines are left out, and their claims run again."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        checksum, _, content = line.partition(" ")
        if checksum == _checksum(content):
            yield Record(**json.loads(content))


@contextmanager
def _kept(out: Path | None) -> Iterator[Keep]:
    if out is None:
        yield Keep(None)
        return
    lock = claim_folder(out, "a reproduction", (FILE, PAGE), LOCK)
    try:
        yield Keep(out / FILE)
    finally:
        lock.release()


def write_page(outcomes: Sequence[Outcome], path: Path, setting: Setting) -> None:
    """Write `reproduce.html`."""
    about = f"lipscope {__version__}, {'quick run' if setting.quick else 'full run'}"
    html = reproduction_html([_entry(one) for one in outcomes], PAPERS, about)
    with whole_file(path) as draft:
        draft.write_text(html, encoding="utf-8")


def _entry(one: Outcome) -> Entry:
    claim, verdict, record = one.claim, one.verdict, one.record
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
    used = "; ".join(f"{name}: {what[:60]}" for name, what in record.used.items())
    size = "quick" if record.quick else "full"
    return f"{size}, {record.device}, {record.seconds:.1f} s, seed {record.seed}" + (
        f"; {used}" if used else ""
    )


def _command(claim: Claim, record: Record | None) -> str:
    parts = ["lipscope reproduce --only", claim.id]
    parts += ["--quick"] if record is not None and record.quick else []
    parts += ["--device", record.device] if record is not None and record.device != "cpu" else []
    return " ".join([*parts, "--out DIR"])
