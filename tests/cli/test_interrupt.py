"""Ctrl-C and SIGTERM end in one line, whenever they come and whoever swallows them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lipscope.cli import STOPPED, commands, main

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import os, signal, sys
from lipscope.cli import main
from lipscope.cli.terminal import progress
import lipscope.cli.doctor as doctor

def swallow():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass

sys.argv = ["lipscope", "doctor"]
"""


def ended(code: str) -> tuple[int, str]:
    """How a process ends that does as told when it is asked what is installed."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr


HEARD = (130, f"lipscope: {STOPPED}\n")
RUN = "\ndoctor.report = report\nsys.exit(main())"
CASES = {
    "in the command itself": ("def report(): raise KeyboardInterrupt" + RUN, HEARD),
    "where a library continues": (
        "def report():\n    swallow()\n    with progress() as tell: tell(0, 1)\n    return {}"
        + RUN,
        HEARD,
    ),
    "where a library fails": (
        "def report():\n    swallow()\n    raise ImportError('initialization failed')" + RUN,
        HEARD,
    ),
    "where it looks like a mistake": (
        "def report():\n    swallow()\n"
        "    from lipscope._types import UserError\n    raise UserError('cannot load')" + RUN,
        HEARD,
    ),
    "while commands are loaded": (
        "class Slow:\n    def find_spec(self, name, *_):\n"
        "        if name == 'lipscope.cli.commands': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Slow())\nsys.exit(main())",
        HEARD,
    ),
    "where Python would print it": (
        "class Mortal:\n    def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "def report():\n    Mortal()\n    return {}" + RUN,
        HEARD,
    ),
    "where somebody knows what is saved": (
        "def report():\n    try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except KeyboardInterrupt as stop:\n"
        "        stop.add_note('Stopped; all\x1b is saved.')\n        raise" + RUN,
        (143, "lipscope: Stopped; all\\x1b is saved.\n"),
    ),
    "after the work": (
        "doctor.report = dict\ncode = main()\nos.kill(os.getpid(), signal.SIGINT)\nsys.exit(code)",
        (0, ""),
    ),
    "where a process is told to ignore it": (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "def report():\n    swallow()\n    return {}" + RUN,
        (0, ""),
    ),
}


@pytest.mark.parametrize("place", CASES)
def test_it_is_heard_once(place):
    code, expected = CASES[place]
    assert ended(code) == expected


def test_one_in_the_exec_of_a_string_does_not_decide_how_python_ends(tmp_path):
    caught = "import sys\ntry: exec('raise KeyboardInterrupt')\nexcept KeyboardInterrupt: pass\n"
    late = "from lipscope.cli import interruption\ninterruption.remove(at_exit=True)\n"
    for name, code, expected in (("theirs", "", -signal.SIGINT), ("ours", late, 130)):
        (tmp_path / f"{name}.py").write_text(f"{caught}{code}sys.exit(130)")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", name], cwd=tmp_path, env=environment, timeout=120
        )
        assert done.returncode == expected


def test_it_is_heard_while_arguments_are_read(monkeypatch, capsys):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "app", stop)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == f"lipscope: {STOPPED}\n"


def test_a_host_keeps_its_own_handler(capsys):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert main(["--version"]) == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
