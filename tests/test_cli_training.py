"""`lipscope train`: what it leaves behind can be measured, and every mistake is a line and exit code 2."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lipscope.cli import main
from lipscope.nn.checkpoint import FILE

PROSE = "she sells sea shells by the sea shore, and he sells none of them. " * 12
SMALL = ["--depth", "2", "--width", "8", "--heads", "2", "--context", "8", "--steps", "20", "--every", "10"]


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text").write_text(PROSE)
    return str(tmp_path / "text")


@pytest.mark.parametrize(
    "extra", [["--attention", "cosine"], ["--attention", "contractive", "--invertible"], ["--norm", "post"]]
)
def test_a_trained_model_is_measured(tmp_path, text, extra, capsys):
    out = str(tmp_path / "model")
    assert main(["train", "--text", text, *SMALL, *extra, "--out", out]) == 0
    assert "test loss" in capsys.readouterr().out
    assert {"curves.csv", "curves.png", "config.json", "model.safetensors"} <= {p.name for p in Path(out).iterdir()}
    command = ["measure", out, "--text", text, "--lengths", "4,8", "--samples", "1", "--scope", "attention"]
    assert main(command) == 0
    assert "attention" in capsys.readouterr().out


def test_training_needs_neither_transformers_nor_pydantic(tmp_path, text):
    code = (
        "import sys; from pathlib import Path; from lipscope.cli.training import train\n"
        "train(Path(sys.argv[1]), depth=1, width=8, heads=1, context=8, steps=2, every=1, out=Path(sys.argv[2]))\n"
        "print({'transformers', 'pydantic', 'plotly'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, text, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_the_same_command_goes_on_and_another_is_refused(tmp_path, text, capsys):
    command = ["train", "--text", text, *SMALL, "--out", str(tmp_path / "model")]
    assert main(command) == 0
    first = capsys.readouterr().out
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert main(command) == 0
    assert capsys.readouterr().out == first
    assert main([*command, "--lr", "0.1"]) == 2
    assert "holds a training with lr 0.003, not 0.1" in capsys.readouterr().err
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--attention", "linear"], "choose one of dot, l2, contractive, cosine"),
        (["--invertible"], "choose attention contractive"),
        (["--attention", "contractive", "--constant", "0"], "constant must be a positive number, got 0.0"),
        (["--attention", "contractive", "--constant", "-1"], "constant must be a positive number"),
        (["--attention", "contractive", "--invertible", "--constant", "1"], "below 1"),
        (["--norm", "batch"], "choose one of pre, post, none"),
        (["--attention", "contractive", "--invertible", "--norm", "post"], "choose norm pre"),
        (["--width", "9"], "multiple of the number of heads"),
        (["--context", "1000"], "give more text, or a smaller context"),
        (["--steps", "0"], "steps must be a whole number"),
        (["--lr", "nan"], "lr must be a positive number"),
        (["--device", "nonsense"], "cannot be used here"),
        (["--device", "meta"], "cannot be used here"),
        (["--width", "100000000"], "try a smaller width (100000000)"),
        (["--batch", "1000000000000"], "batch (1000000000000)"),
        (["--text", "nowhere"], "cannot be read"),
    ],
)
def test_mistakes_are_told_in_a_line_and_nothing_is_left(tmp_path, text, options, complaint, capsys):
    out = tmp_path / "model"
    assert main(["train", "--text", text, *SMALL, "--out", str(out), *options]) == 2
    told = capsys.readouterr().err
    assert complaint in told and told.count("\n") == 1
    assert not out.exists()


@pytest.mark.slow
def test_kills_of_the_whole_command_change_no_bit(tmp_path, text):
    command = [sys.executable, "-m", "lipscope.cli", "train", "--text", text, *SMALL, "--steps", "300", "--out"]
    torn = tmp_path / "torn"
    for _ in range(5):
        before = (torn / FILE).stat().st_mtime_ns if (torn / FILE).exists() else 0
        child = subprocess.Popen([*command, str(torn)], stdout=subprocess.DEVNULL)
        while child.poll() is None and (not (torn / FILE).exists() or (torn / FILE).stat().st_mtime_ns == before):
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    subprocess.run([*command, str(torn)], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*command, str(tmp_path / "calm")], check=True, stdout=subprocess.DEVNULL)
    for name in ("model.safetensors", "curves.csv"):
        assert (torn / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path, text, capsys):
    assert main(["train", "--text", text, *SMALL, "--out", str(tmp_path)]) == 2
    assert "not a training and not empty (it holds text)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_text_in_another_encoding_is_refused(tmp_path, capsys):
    (tmp_path / "latin").write_bytes("né à Rouen".encode("latin-1") * 50)
    assert main(["train", "--text", str(tmp_path / "latin"), *SMALL, "--out", str(tmp_path / "model")]) == 2
    assert "is not UTF-8 (byte 1)" in capsys.readouterr().err
