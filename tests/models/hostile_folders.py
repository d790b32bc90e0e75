"""500 hostile model folders: each is refused in one sentence or measured, within seconds.

    python -m tests.models.hostile_folders                # resumes; about 10 minutes on one core
    python -m tests.models.hostile_folders --case 17      # one case, with its traceback
    python -m tests.models.hostile_folders --seed 1 --count 2000

Case i of a seed is always the same folder. Results are kept in the folder for temporary files, one
JSON line per case.
"""

import argparse
import json
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from lipscope._types import UserError
from lipscope.linalg.differentiate import jacobian
from lipscope.models.loading import load
from tests.models.hostile_cases import SPOILERS, canary
from tests.models.test_loading import words
from tests.models.zoo import make

SECONDS, WAITING = 30, 120
"""Limits of a case: processor time, and time by the clock, should it wait for something."""

BASES = ("bert", "gpt2", "llama")
NAMES = ("model", "with space", "\x1b[31mred", "{0}%s", "-out", "ünï", "a" * 200, "new\nline")
GIBIBYTE = 1 << 30


class TooSlow(BaseException):
    """The time limit; not an Exception, so that nothing on the way takes it for a refusal."""


def build(seed: int, case: int, place: Path) -> tuple[Path, list[str]]:
    """The folder of a case, and the names of what was done to it."""
    rng = random.Random(f"{seed}/{case}")
    folder = place / rng.choice((NAMES[0], NAMES[0], NAMES[0], *NAMES[1:]))
    base = rng.choice(BASES)
    make(base).save_pretrained(folder)
    words().save_pretrained(folder)
    kinds = list(SPOILERS)
    done = [kinds[case % len(kinds)]]
    if rng.random() < 0.25:
        done.append(rng.choice(kinds))
    for i, kind in enumerate(done):
        try:
            SPOILERS[kind](folder, rng)
        except (OSError, ValueError, KeyError):
            if i == 0:  # the second one may find nothing left to spoil
                raise
    return folder, [base, *done]


def measure(folder: Path, random_init: int | None) -> str:
    """Load the folder and multiply by one Jacobian; what `lipscope measure` does, in short."""
    model = load(str(folder), random_init=random_init)
    ids = [1, 2, 3, 4]
    if model.tokenizer is not None:
        ids = model.encode("w1 w2 w3 w4")[:8] or ids
        model.tokens(ids)
    (site,) = model.sites(ids, scopes=["block"], layers=[0])
    J = jacobian(site.f, site.X[0])
    assert J.mv(torch.ones(J.in_shape, dtype=site.X.dtype)).isfinite().all()
    return "measured"


def examine(seed: int, case: int) -> dict[str, Any]:
    """One case: what was done, and how it ended."""

    def stop(*_: Any) -> None:
        raise TooSlow

    place = Path(tempfile.mkdtemp(prefix="hostile-"))
    row: dict[str, Any] = {"seed": seed, "case": case}
    try:
        folder, row["what"] = build(seed, case, place)
        for alarm in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(alarm, stop)
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WAITING)
        # Not earlier: some cases are sparse files, larger than a reader may write.
        resource.setrlimit(resource.RLIMIT_FSIZE, (GIBIBYTE, resource.RLIM_INFINITY))
        try:
            row["outcome"] = measure(folder, random_init=0 if case % 7 == 6 else None)
        except UserError as error:
            plain = "\n" not in str(error).replace(str(folder), "") and len(str(error)) < 800
            inside = str(error).replace(str(folder), "").isprintable()
            row |= {"outcome": "refused" if plain and inside else "raw", "reason": str(error)}
        except TooSlow:
            row["outcome"] = "slow"
        except BaseException as error:
            row |= {"outcome": "traceback", "reason": f"{type(error).__name__}: {error}"[:300]}
            row["trace"] = traceback.format_exc()[-1500:]
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        row["seconds"] = round(time.process_time() - started, 2)
        if canary(folder).exists():
            row["outcome"] = "ran code"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return row


def limit_resources() -> None:
    """Protect the machine: what a case may take, at most."""
    resource.setrlimit(resource.RLIMIT_AS, (24 * GIBIBYTE, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--case", type=int, help="run one case and print how it ended")
    arguments = parser.parse_args()
    limit_resources()
    if arguments.case is not None:
        row = examine(arguments.seed, arguments.case)
        trace = row.pop("trace", "")
        print(json.dumps(row, indent=1), trace, sep="\n")
        return
    kept = Path(tempfile.gettempdir()) / f"lipscope-hostile-{arguments.seed}.jsonl"
    found = {}
    for line in kept.read_text().splitlines() if kept.exists() else []:
        row = json.loads(line)
        found[row["case"]] = row
    for case in range(arguments.count):
        if case not in found:
            found[case] = examine(arguments.seed, case)
            with kept.open("a") as file:
                file.write(json.dumps(found[case]) + "\n")
    rows = [found[case] for case in range(arguments.count)]
    for row in rows:
        if row["outcome"] not in ("refused", "measured"):
            print(row["case"], row["outcome"], row["what"], row.get("reason", ""))
    seconds = sorted(row["seconds"] for row in rows)
    print(dict(Counter(row["outcome"] for row in rows)))
    print(
        f"{len(rows)} folders, {sum(seconds):.0f} s of processor time, at most {seconds[-1]} s each"
    )


if __name__ == "__main__":
    main()
