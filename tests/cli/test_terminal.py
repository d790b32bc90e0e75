"""Parsing of lists of numbers, progress in log files, plain terminals, messages."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipscope._types import UserError
from lipscope.cli import commands, main, terminal
from lipscope.cli.terminal import LARGEST, MOST, ExitCode, Lines, numbers, read_texts, tell

ROOT = Path(__file__).resolve().parents[2]
PARTS = st.lists(st.integers(0, LARGEST) | st.tuples(st.integers(0, 50), st.integers(0, 50)))


@given(PARTS.filter(bool))
def test_a_list_of_numbers_is_what_it_says(parts):
    """Against a second reading of the same list, by Python's own ranges."""
    ranges = [sorted(part) if isinstance(part, tuple) else (part, part) for part in parts]
    text = ",".join(
        f"{first}-{last}" if isinstance(part, tuple) else str(first)
        for part, (first, last) in zip(parts, ranges, strict=True)
    )
    expected = [i for first, last in ranges for i in range(first, last + 1)]
    assert numbers("layers", text) == expected


@given(st.text(alphabet="0123456789-, x½\u0663\u2460", max_size=40) | st.text(max_size=20))
def test_any_text_is_a_list_of_numbers_or_refused(text):
    try:
        found = numbers("layers", text)
    except UserError as error:
        assert str(error).startswith("--layers") and len(str(error)) < 200
    else:
        assert found and all(0 <= i <= LARGEST for i in found) and len(found) <= MOST


@pytest.mark.parametrize("text", ["0-9999999999", "9" * 5000, f"0-{LARGEST}", "1-9" + "9" * 4300])
def test_numbers_are_refused_before_memory_is_taken(text):
    with pytest.raises(UserError, match=r"too large|more than 100000 numbers"):
        numbers("layers", text)


@given(st.text())
def test_whatever_is_told_is_one_line_without_control_characters(message):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert tell(message, 2) == 2
    line = said.getvalue()
    assert line.endswith("\n") and line.count("\n") == 1 and line[:-1].isprintable()


def test_progress_in_a_log_is_a_line_every_few_seconds(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    lines = Lines()
    now[0] = 40.0  # loading took this long, and does not count
    for done in range(101):
        lines("measuring", done, 100)
        now[0] += 1.0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 10 and said[3] == "lipscope: measuring, 31 %, about 1:09 left"


def test_a_column_needs_a_file():
    for sources in (None, [], ["-"]):
        with pytest.raises(UserError, match="give it with --text FILE"):
            read_texts(sources, "body")
    assert read_texts(["a", "b"]) == [Path("a"), Path("b")] and read_texts(["a"]) == Path("a")


def test_the_documented_exit_codes_are_those_of_the_code():
    page = (ROOT / "docs" / "command_line.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert {int(line.split("|")[1]) for line in rows} == {int(code) for code in ExitCode}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "f"), "No space left on device (f)"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not enough memory"),
    ],
)
def test_what_the_machine_lacks_is_one_line(error, words, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(commands, "app", fail)
    assert main(["doctor"]) == 2
    assert words in capsys.readouterr().err


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(commands, "app", fail)
    with pytest.raises(KeyError):
        main(["doctor"])


def test_a_terminal_without_greek_letters_is_shown_words():
    command = [sys.executable, "-m", "lipscope", "measure", "--help"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert said.returncode == 0 and "sigma" in said.stdout and said.stderr == ""


def test_a_full_disk_behind_stdout_is_one_line():
    command = [sys.executable, "-m", "lipscope", "--version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("lipscope: No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize(
    "campaign", ["tests.cli.bad_commands 1000", "tests.bad_calls 1000", "tests.cli.interrupts 100"]
)
def test_campaigns_find_nothing(campaign):
    done = subprocess.run([sys.executable, "-m", *campaign.split()], cwd=ROOT, text=True)
    assert done.returncode == 0
