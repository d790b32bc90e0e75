"""Ctrl-C and SIGTERM at random times over all commands, in real processes.

    python -m tests.cli.interrupts 100        # about 10 minutes; the seed is the second argument

A signal is sent a random time after the process has installed its handlers, which is a few
milliseconds after Python itself is ready; imports of torch and transformers come later. Each
process must end with 130 or 143 and one line on stderr, or with 0 if it was done before. The
directories of `measure` and `train` are interrupted again and again, and completed at the end:
they must hold what a run in peace holds.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lipscope.papers.charlm.files import read_checkpoint
from lipscope.study.study import Study
from tests.study.tiny import PROSE, save_tiny

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ending:
    """How a process ended: its exit code and what it said on stderr."""

    code: int
    said: str
    seconds: float
    before: float

    def fault(self, number: int) -> str | None:
        """What is wrong with this ending after signal `number`."""
        if self.code == 0:
            return None if not self.said else "done, and said something on stderr"
        if self.code != 128 + number:
            return f"exit code {self.code}"
        if self.said.count("\n") != 1 or not self.said.startswith("lipscope: Stopped; "):
            return "not one line"
        return None


def command_lines(place: Path) -> dict[str, list[str]]:
    """One command per verb, on a tiny model."""
    tiny, text, study = (str(place / name) for name in ("tiny", "text", "study"))
    small = {"depth": 1, "width": 8, "heads": 2, "context": 8, "steps": 400, "every": 20}
    options = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    measure = ["measure", tiny, "--text", text, "--samples", "1"]
    return {
        "measure": [*measure, "--lengths", "4-40", "--out", str(place / "torn")],
        "measure workers": [*measure, "--lengths", "4-12", "--workers", "2", "--quiet"],
        "train": ["train", "--text", text, *options, "--out", str(place / "model")],
        "bounds": ["bounds", tiny, "--text", text, "--lengths", "8", "--layers", "0"],
        "attack": ["attack", tiny, "--kind", "ascent", "--text", text, "--length", "8"],
        "simulate": ["simulate", "--n", "12", "--time", "4", "--out", str(place / "flow")],
        "report": ["report", "--quiet", study, "--out", str(place / "page.html")],
        "show": ["show", study],
        "export": ["export", study],
        "doctor": ["doctor"],
        "help": ["measure", "--help"],
    }


def run(words: list[str], number: int = 0, delay: float = 0.0) -> Ending:
    """Run a command; send it a signal `delay` seconds after its handlers are installed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "lipscope", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the workers of a process as well
    )
    while child.poll() is None and not handles_sigterm(child.pid):
        time.sleep(0.001)
    before = time.monotonic() - start
    if number:
        time.sleep(delay)
        if child.poll() is None:
            os.killpg(child.pid, number)
    said = child.communicate(timeout=600)[1]
    return Ending(child.returncode, said, time.monotonic() - start - before, before)


def handles_sigterm(pid: int) -> bool:
    """Whether the process has a handler of its own for SIGTERM; Python has none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line for line in lines if line.startswith("SigCgt")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def leftovers(place: Path) -> list[str]:
    return sorted(path.name for path in place.rglob(".unfinished-*"))


def losses(place: Path, commands: dict[str, list[str]]) -> list[str]:
    """Complete what was interrupted, and compare it with a run in peace."""
    found = []
    for verb, out in (("measure", "torn"), ("train", "model")):
        calm = [str(place / "calm" / out) if word == str(place / out) else word
                for word in commands[verb]]  # fmt: skip
        for words in (commands[verb], calm):
            if (ending := run(words)).code != 0:
                found.append(f"{verb} could not be completed: {ending.said}")
    torn, calm_study = (Study.open(place / part / "torn").rows for part in ("", "calm"))
    if [row._replace(seconds=0) for row in torn] != [row._replace(seconds=0) for row in calm_study]:
        found.append("the study differs from one measured in peace")
    weights = [(place / part / "model" / "model.safetensors").read_bytes() for part in ("", "calm")]
    if weights[0] != weights[1]:
        found.append("the model differs from one trained in peace")
    return found


def saved_as_said(said: str, place: Path) -> bool:
    """Whether the step that `train` says it has saved is the one in the checkpoint."""
    checkpoint = read_checkpoint(place / "model")
    step = "nothing" if checkpoint is None else f"step {checkpoint[1]['step']} of 400"
    return "what was saved is kept" in said or f"; {step} is saved" in said


def main(count: int, seed: int) -> int:
    draw, tally, faults = random.Random(seed), Counter[str](), []
    began = time.monotonic()
    # A shell starts background jobs with Ctrl-C ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        save_tiny(place / "tiny", layers=2)
        (place / "text").write_text(PROSE * 3)
        commands = command_lines(place)
        run([*commands["measure"][:6], "--lengths", "4,8,16", "--out", str(place / "study")])
        lasts: dict[str, float] = {}
        for i in range(count):
            verb = list(commands)[i % len(commands)]
            number = signal.SIGTERM if draw.random() < 0.25 else signal.SIGINT
            # The first interrupts of a verb guess its duration; later ones know it better.
            ending = run(commands[verb], number, draw.uniform(0, lasts.get(verb, 4.0)))
            if ending.code == 0:
                lasts[verb] = min(ending.seconds, lasts.get(verb, ending.seconds))
            fault = ending.fault(number)
            if verb == "train" and ending.code and not saved_as_said(ending.said, place):
                fault = "it says that another step is saved"
            if leftovers(place):
                fault = f"left {leftovers(place)}"
            tally["done before the signal" if ending.code == 0 else f"exit {ending.code}"] += 1
            if fault:
                faults.append(f"{verb}, signal {number}: {fault}\n{ending.said}")
                print(faults[-1], flush=True)
        faults += losses(place, commands)
    print(f"{count} signals over {len(commands)} commands: {dict(tally)}")
    print(f"{len(faults)} faults, {time.monotonic() - began:.0f} s", *faults[-5:], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*(int(word) for word in (*sys.argv[1:], *("100", "0")[len(sys.argv) - 1 :]))))
