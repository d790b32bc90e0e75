"""Random bad command lines, in process: each ends with an exit code and at most one error line.

    python -m tests.cli.bad_commands 1000     # minutes; the seed is the second argument

A command that works is spoiled in one to three places: a value that no option can take, an option
that does not exist, a word too many, a word too few. Whatever happens, `main` must return one of
the documented exit codes within the time limit, without a traceback and without a raw control
character on the terminal.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from lipscope.cli import main as lipscope
from lipscope.cli.terminal import ExitCode
from tests.study.tiny import PROSE, save_tiny

LIMIT = 60
"""Seconds of CPU time for one command; it is slow only where time is taken without a check."""

VALUES = [
    "", " ", "0", "-1", "1", "2", "7.5", "nan", "inf", "-inf", "1e300", "1e-300", "1e-5", "true",
    "None", "[]", "{}", "0x10", "1_000", "10**9", "9" * 20, "9" * 5000, str(2**63), str(2**64),
    str(10**30), "999999999999", "0-9999999999", "0-", "-5", "5-2", "1,,2", "1,2,", ",", "0-3-5",
    "\u0663", "\u2460", "½", "a" * 300, "a/" * 3000, "~nosuchuser/x", "~", ".", "..", "/",
    "/dev/null", "/dev/full", "/proc/self/mem", "no/such/place", "--", "-", "-x", "--out",
    "\x1b[31mred", "a\nb", "\u202eevil", "\ud800", "%s%n", "${HOME}", "`id`", "$(id)",
    "'; DROP TABLE rows; --", "cpu:99", "cuda:77", "meta", "mps", "float8", "int8", "object",
    "float16", "inf,nan",
]  # fmt: skip


def command_lines(place: Path) -> list[list[str]]:
    """Commands that work, as short as they come; every option of each verb is in one of them."""
    tiny, text, study, csv = (str(place / name) for name in ("tiny", "text", "study", "a.csv"))
    out = str(place / "out")
    measure = ["measure", tiny, "--text", text, "--lengths", "4", "--samples", "1", "--layers", "0"]
    train = ["train", "--text", text, "--depth", "1", "--width", "4", "--heads", "1"]
    train += ["--context", "4", "--steps", "1", "--every", "1", "--batch", "1", "--out", out]
    return [
        [*measure, "--heads", "0", "--scope", "heads", "--tol", "1e-3", "--seed", "1"],
        [*measure, "--random-init", "3", "--dtype", "float32", "--device", "cpu", "--quiet"],
        [*measure, "--gap", "0.5", "--workers", "1", "--fail-above", "1e9", "--out", out],
        [*measure, "--text", csv, "--column", "body", "--tokenizer", tiny, "--revision", "main"],
        ["bounds", tiny, "--text", text, "--lengths", "2", "--layers", "0", "--radius", "1"],
        ["attack", tiny, "--text", text, "--kind", "direction", "--length", "3", "--layers", "0"],
        ["attack", tiny, "--text", text, "--kind", "tokens", "--length", "3", "--swaps", "1"],
        ["show", study],
        ["export", study, str(place / "rows.csv"), "--csv"],
        ["export", study, "--tokens"],
        ["report", study, "--out", str(place / "page.html")],
        ["compare", study, study, "--out", str(place / "page.html")],
        ["simulate", "--preset", "gaussian", "--n", "2", "--dim", "1", "--time", "0.1"],
        [*train, "--attention", "dot", "--lr", "0.01", "--warmup", "1", "--clip", "1"],
        [*train, "--norm", "none", "--weight-decay", "0", "--seed", "1", "--device", "cpu"],
        ["doctor"],
        ["--version"],
    ]


def spoil(words: list[str], draw: random.Random) -> list[str]:
    """The same command with one to three mistakes."""
    words = list(words)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        place = draw.randrange(len(words) + 1)
        value = draw.choice(VALUES)
        # Values follow their options, so most mistakes replace the word after an option.
        after = [i + 1 for i, word in enumerate(words[:-1]) if word.startswith("--")]
        kind = draw.choice(["value"] * 6 + ["insert", "delete", "option", "swap"])
        if kind == "value" and after:
            words[draw.choice(after)] = value
        elif kind == "insert":
            words.insert(place, value)
        elif kind == "delete" and words:
            words.pop(place - 1)
        elif kind == "option":
            words += [f"--{draw.choice(['lenghts', 'out', 'text', 'layers', 'json', ''])}", value]
        elif kind == "swap" and len(words) > 1:
            i, j = draw.sample(range(len(words)), 2)
            words[i], words[j] = words[j], words[i]
    return words


class TooSlowError(BaseException):
    """Not an Exception: no handler of the command may take it for one of its own."""


def too_slow(number: int, frame: object) -> None:
    raise TooSlowError


def fault(words: list[str]) -> tuple[str | None, int | None]:
    """What is wrong with how this command ends, and its exit code."""
    out, err = io.StringIO(), io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = lipscope(words)
    except TooSlowError:
        return f"no answer within {LIMIT} s", None
    except BaseException:
        return traceback.format_exc(limit=-3), None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    said = err.getvalue()
    if code not in set(ExitCode):
        return f"exit code {code}", code
    if "Traceback" in said or "\x1b" in said + out.getvalue():
        return f"said {said[-400:]!r}", code
    errors = [line for line in said.splitlines() if "warning: " not in line and " %, " not in line]
    if code == ExitCode.BAD_INPUT and (len(errors) != 1 or len(errors[0]) > 2000):
        return f"{len(errors)} lines: {said[-400:]!r}", code
    return None, code


def main(count: int, seed: int) -> int:
    draw, tally, faults, began = random.Random(seed), Counter[int | None](), [], time.monotonic()
    signal.signal(signal.SIGPROF, too_slow)
    limit = 12 * 2**30  # memory taken without a check shows as an error, not as a killed process
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        save_tiny(place / "tiny", layers=1)
        (place / "text").write_text(PROSE)
        (place / "a.csv").write_text("label,body\n1," + PROSE + "\n")
        commands, tiny = command_lines(place), str(place / "tiny")
        assert lipscope([*commands[0], "--out", str(place / "study"), "--quiet"]) == 0
        os.chdir(place)
        sys.stdin = SimpleNamespace(buffer=io.BytesIO())  # type: ignore[assignment]
        for i in range(count):
            words = spoil(commands[i % len(commands)], draw)
            if words and words[0] in ("measure", "bounds", "attack") and tiny not in words:
                words.append(tiny)  # without a model the default one would be measured for minutes
            begun = time.monotonic()
            found, code = fault(words)
            tally[code] += 1
            if found:
                shown = [word if len(word) < 60 else word[:60] + "…" for word in words]
                faults.append(f"{shown}: {found}")
                print(ascii(shown), found, flush=True)
            elif time.monotonic() - begun > LIMIT / 4:
                print(ascii(words)[:300], f"took {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{count} bad commands: exit codes {dict(sorted(tally.items(), key=str))}")
    print(f"{len(faults)} faults, {time.monotonic() - began:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*(int(word) for word in (*sys.argv[1:], *("1000", "0")[len(sys.argv) - 1 :]))))
