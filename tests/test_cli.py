"""The commands, end to end, on a tiny model in a folder."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from lipscope import __version__
from lipscope._types import UserError
from lipscope.cli import main
from lipscope.models.scopes import SCOPES
from lipscope.study.records import COLUMNS
from lipscope.study.store import Store
from lipscope.study.study import Study
from tests.study.fakes import info, row, sensitivity
from tests.study.tiny import PROSE, save_tiny

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", layers=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(PROSE)
    return str(path)


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    """A study of 100,000 rows."""
    place = tmp_path_factory.mktemp("big") / "study"
    store = Store.create(place, info())
    rows = [
        row("heads", layer, head, n, sample, value=(1 + layer) * n**0.25 + head / 100)
        for n in (8, 16, 32, 64, 128)
        for sample in range(40)
        for layer in range(25)
        for head in range(20)
    ]
    largest = max((r for r in rows if r.n == 128), key=lambda r: r.value)
    store.write(rows, [sensitivity(largest)])
    store.close()
    assert len(rows) == 100_000
    return place


def run(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(command.split()) == 0
    said = capsys.readouterr()
    # Said beside the output: where the page is, and on a slow machine how long it takes.
    beside = re.compile(r"lipscope: (the report is in .*|measuring, \d+ %, about \d+:\d\d left)")
    assert all(beside.fullmatch(line) for line in said.err.splitlines())
    return said.out


def test_measure_show_and_export_agree(tiny, text, tmp_path, capsys):
    out = str(tmp_path / "s")
    shown = run(f"measure {tiny} --text {text} --lengths 4,8,16 --samples 2 --out {out}", capsys)
    assert shown == run(f"show {out}", capsys)
    pieces = ("prose.txt", "σ at n = 16", "heads", "attention", "R(n)", "Most sensitive: layer")
    assert all(piece in shown for piece in pieces)
    assert max(map(len, shown.splitlines())) <= 80
    table = list(csv.DictReader(io.StringIO(run(f"export {out} --csv", capsys))))
    assert tuple(table[0])[: len(COLUMNS)] == COLUMNS and len(table) == 3 * 2 * 2 * 3
    written = tmp_path / "rows.csv"
    run(f"export {out} {written}", capsys)
    assert written.read_text() == run(f"export {out}", capsys)
    tokens = list(csv.DictReader(io.StringIO(run(f"export {out} --tokens", capsys))))
    assert len(tokens) == 2 * 2 * 3 * (4 + 8 + 16)


def test_json_holds_every_number(tiny, text, tmp_path, capsys):
    out = str(tmp_path / "s")
    told = run(f"measure {tiny} --text {text} --lengths 4,8,16 --json --out {out}", capsys)
    found = json.loads(told)
    assert found == json.loads(run(f"show {out} --json", capsys))
    study = Study.open(out)
    assert [r["value"] for r in found["rows"]] == [r.value for r in study.rows]
    assert [g["alpha"] for g in found["growth"]] == [law.alpha for law in study.growth()]
    assert found["most_sensitive"]["value"] == study.peak().value
    assert len(found["most_sensitive"]["tokens"]) == 16
    assert found["identity"]["tol"] == 1e-6 and found["failed"] == 0
    assert (
        found["joint_confidence"]
        == study.joint_confidence
        == pytest.approx(1 - len(study.rows) * 1e-9)
    )


def test_text_from_stdin(tiny, text, tmp_path):
    words = f"-m lipscope measure {tiny} --text - --lengths 4 --json --quiet".split()
    command = [sys.executable, *words]
    done = subprocess.run(command, input=PROSE.encode(), capture_output=True, cwd=ROOT, check=True)
    assert json.loads(done.stdout)["about"]["text_tokens"] == 300
    assert done.stderr == b""


def test_failed_rows_make_the_exit_code_3(tiny, text, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("too big")

    monkeypatch.setattr("lipscope.study.probe.solve", fail)
    assert main(["measure", tiny, "--text", text, "--lengths", "4"]) == 3
    assert "the first reason: failed: MemoryError: too big" in capsys.readouterr().out


def rows_in(out: Path) -> int:
    """The number of rows so far; 0 before there is a study."""
    try:
        return len(Study.open(out).rows)
    except UserError:
        return 0


def test_ctrl_c_says_how_to_go_on(tiny, text, tmp_path):
    """A real SIGINT to a real process, which then resumes."""
    out = tmp_path / "s"
    words = f"-m lipscope measure {tiny} --text {text} --lengths 4-40 --out {out}".split()
    child = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not rows_in(out):
        time.sleep(0.02)
        assert child.poll() is None
    os.kill(child.pid, signal.SIGINT)
    printed, said = child.communicate(timeout=60)
    assert child.returncode == 130 and printed == ""
    assert "of 74 jobs are saved in" in said and "Run the same command again" in said
    assert [line for line in said.splitlines() if " left" not in line] == [said.splitlines()[-1]]
    assert 0 < len(Study.open(out).rows) < 37 * 3 * 2 * 3


def test_version_help_and_doctor(capsys):
    assert run("--version", capsys) == f"lipscope {__version__}\n"
    told = run("measure --help", capsys)
    assert all(scope.formula in told and scope.description in told for scope in SCOPES.values())
    report = run("doctor", capsys)
    for piece in ("lipscope", "torch", "transformers", "cuda", "hub cache", "offline", "embedded"):
        assert piece in report


@pytest.mark.wide
@pytest.mark.parametrize("command", ["show", "export"])
def test_100_000_rows_without_torch(big, command):
    code = (
        "import sys; from lipscope.cli import main; code = main(); "
        "heavy = {'torch', 'transformers'} & set(sys.modules); "
        "print(*heavy, file=sys.stderr, end=''); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command, str(big)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        len(done.stdout.splitlines()) == 100_001
        if command == "export"
        else "Most sensitive" in done.stdout
    )


def test_help_needs_no_torch():
    code = "import sys, lipscope.cli; lipscope.cli.main(['measure', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert not {b"torch", b"transformers"} & set(done.stdout.split())


def test_a_threshold_decides_the_exit_code(tiny, text, capsys):
    measure = ["measure", tiny, "--text", text, "--lengths", "4", "--samples", "1", "--quiet"]
    assert main([*measure, "--fail-above", "1e9"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*measure, "--json"]) == 0
    largest = max(row["value"] for row in json.loads(capsys.readouterr().out)["rows"])
    assert main([*measure, "--fail-above", str(largest)]) == 0  # not above it
    assert main([*measure, "--fail-above", str(largest * 0.999)]) == 1
    assert f"1 of 6 measured σ are above {largest * 0.999:g}" in capsys.readouterr().err
    assert main([*measure, "--fail-above", "nan"]) == 2


def test_all_texts_are_used_and_columns_are_read(tiny, tmp_path, capsys):
    half = len(PROSE) // 6 * 3
    table = "label,body\n1," + PROSE[:half] + "\n2," + PROSE[half:] + "\n"
    lines = "".join(json.dumps({"body": part}) + "\n" for part in (PROSE[:half], PROSE[half:]))
    for name, content in (("a.csv", table), ("a.jsonl", lines), ("first", PROSE[:half])):
        (tmp_path / name).write_text(content)
    (tmp_path / "second").write_text("\ufeff" + PROSE[half:])
    measure = ["measure", tiny, "--lengths", "4", "--samples", "1", "--json", "--quiet"]
    counts = []
    for words in (
        ["--text", "a.csv", "--column", "body"],
        ["--text", "a.jsonl", "--column", "body"],
        ["--text", "first", "--text", "second"],
    ):
        paths = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words]
        assert main([*measure, *paths]) == 0
        counts.append(json.loads(capsys.readouterr().out)["about"]["text_tokens"])
    assert counts == [300, 300, 300]
    assert main([*measure, "--text", str(tmp_path / "a.csv"), "--column", "title"]) == 2
    assert "has no column 'title'; its columns are label, body" in capsys.readouterr().err


def test_text_that_is_none_is_warned_of(tiny, tmp_path, capsys):
    (tmp_path / "a.csv").write_text("words that nobody knows " * 8)
    measure = ["measure", tiny, "--text", str(tmp_path / "a.csv"), "--lengths", "4"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(measure) == 0
    said = capsys.readouterr().err
    assert "a.csv is read as prose, CSV and all; --column NAME reads one column" in said
    assert "32 of 32 tokens are unknown to the tokenizer" in said and "Traceback" not in said


def test_without_a_report_there_is_none(tiny, text, tmp_path):
    measure = ["measure", tiny, "--text", text, "--lengths", "4", "--samples", "1"]
    assert main([*measure, "--out", str(tmp_path / "s"), "--no-report"]) == 0
    assert not list((tmp_path / "s").glob("*.html"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered(shell):
    environment = {**os.environ, "_LIPSCOPE_COMPLETE": f"source_{shell}"}
    command = [sys.executable, "-m", "lipscope"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "lipscope" in done.stdout and "Traceback" not in done.stderr


def test_the_headline_is_about_the_scopes_asked_for(tiny, text, capsys):
    scopes = ["--scope", "block", "--scope", "heads", "--scope", "model"]
    measure = ["measure", tiny, "--text", text, "--lengths", "4", "--samples", "1", *scopes]
    assert main([*measure, "--json", "--quiet"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    blocks = {row["layer"]: row["value"] for row in rows if row["scope"] == "block"}
    first, second = sorted(blocks, key=lambda layer: -blocks[layer])
    assert main(measure) == 0
    said = capsys.readouterr().out
    assert f"Most sensitive: layer {first} (block), σ = {blocks[first]:.4g}" in said
    ranked = f"{first} ({blocks[first]:#.3g}), {second} ({blocks[second]:#.3g})"
    assert f"Layers by largest σ (block, n = 4): {ranked}." in " ".join(said.split())
