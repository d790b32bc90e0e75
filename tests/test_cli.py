"""The commands, end to end, on a tiny model in a folder."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lipscope import __version__
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
        row(
            "heads",
            layer,
            head,
            n,
            sample,
            value=(1 + layer) * n**0.25 + head / 100 + sample / 1000,
        )
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


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_measure_show_and_export_agree(tiny, text, tmp_path, capsys):
    out = str(tmp_path / "s")
    shown = run(
        "measure",
        tiny,
        "--text",
        text,
        "--lengths",
        "4,8,16",
        "--samples",
        "2",
        "--out",
        out,
        capsys=capsys,
    )
    assert shown == run("show", out, capsys=capsys)
    for piece in (
        "prose.txt",
        "σ at n = 16",
        "heads",
        "attention",
        "R(n)",
        "Most sensitive: layer",
    ):
        assert piece in shown
    assert max(map(len, shown.splitlines())) <= 80
    table = list(csv.DictReader(io.StringIO(run("export", out, "--csv", capsys=capsys))))
    assert tuple(table[0]) == COLUMNS and len(table) == 3 * 2 * 2 * 3
    written = tmp_path / "rows.csv"
    run("export", out, str(written), capsys=capsys)
    assert written.read_text() == run("export", out, capsys=capsys)
    tokens = list(csv.DictReader(io.StringIO(run("export", out, "--tokens", capsys=capsys))))
    assert len(tokens) == 2 * 2 * 3 * (4 + 8 + 16)


def test_json_holds_every_number(tiny, text, tmp_path, capsys):
    out = str(tmp_path / "s")
    told = run(
        "measure",
        tiny,
        "--text",
        text,
        "--lengths",
        "4,8,16",
        "--json",
        "--out",
        out,
        capsys=capsys,
    )
    found = json.loads(told)
    assert found == json.loads(run("show", out, "--json", capsys=capsys))
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


def test_the_recorded_command_measures_the_same(tiny, text, tmp_path, capsys, monkeypatch):
    first = tmp_path / "a"
    options = [
        "--lengths",
        "4,6",
        "--samples",
        "1",
        "--scope",
        "attention",
        "--scope",
        "heads",
        "--layers",
        "1",
        "--heads",
        "1",
        "--seed",
        "5",
        "--tol",
        "1e-4",
    ]
    run(
        "measure",
        tiny,
        "--text",
        text,
        *options,
        "--special-tokens",
        "--out",
        str(first),
        capsys=capsys,
    )
    study = Study.open(first)
    words = study.info.about.command.split()
    assert words[:2] == ["lipscope", "measure"]
    monkeypatch.chdir(Path(text).parent)
    run(*words[1:], "--out", str(tmp_path / "b"), capsys=capsys)
    again = Study.open(tmp_path / "b")
    assert again.info == study.info
    assert [r[:-1] for r in again.rows] == [r[:-1] for r in study.rows]


def test_text_from_stdin(tiny, text, tmp_path):
    command = [
        sys.executable,
        "-m",
        "lipscope.cli",
        "measure",
        tiny,
        "--text",
        "-",
        "--lengths",
        "4",
        "--json",
    ]
    done = subprocess.run(command, input=PROSE.encode(), capture_output=True, cwd=ROOT, check=True)
    assert json.loads(done.stdout)["about"]["text_tokens"] == 300
    assert done.stderr == b""


def test_failed_rows_make_the_exit_code_1(tiny, text, monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise MemoryError("too big")

    monkeypatch.setattr("lipscope.study.work.sigma", fail)
    assert main(["measure", tiny, "--text", text, "--lengths", "4"]) == 1
    assert "the first reason: failed: MemoryError: too big" in capsys.readouterr().out


def test_ctrl_c_says_how_to_go_on(tiny, text, tmp_path):
    """A real SIGINT to a real process, which then resumes."""
    out = tmp_path / "s"
    command = [
        sys.executable,
        "-m",
        "lipscope.cli",
        "measure",
        tiny,
        "--text",
        text,
        "--lengths",
        "4-40",
        "--out",
        str(out),
    ]
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not out.joinpath("study.sqlite-wal").exists() or not Study.open(out).rows:
        time.sleep(0.02)
        assert child.poll() is None
    os.kill(child.pid, signal.SIGINT)
    printed, said = child.communicate(timeout=60)
    assert child.returncode == 130 and printed == ""
    assert "of 74 jobs are saved in" in said and "Run the same command again" in said
    assert len(said.splitlines()) == 1
    assert 0 < len(Study.open(out).rows) < 37 * 3 * 2 * 3


def test_version_help_and_doctor(capsys):
    assert run("--version", capsys=capsys) == f"lipscope {__version__}\n"
    told = run("measure", "--help", capsys=capsys)
    assert all(scope.formula in told and scope.description in told for scope in SCOPES.values())
    report = run("doctor", capsys=capsys)
    for piece in ("lipscope", "torch", "transformers", "cuda", "hub cache", "offline", "embedded"):
        assert piece in report


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
    code = (
        "import sys; import lipscope.cli as cli; cli.main(['measure', '--help']); "
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers"} & set(done.stdout.split())
