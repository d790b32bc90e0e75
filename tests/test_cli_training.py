"""`lipscope train`: its folder can be measured, and every error is one line and exit code 2."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lipscope.cli import main
from lipscope.cli.terminal import Report
from lipscope.papers.charlm.files import FILE, LOCK, read_checkpoint

PROSE = "she sells sea shells by the sea shore, and he sells none of them. " * 12
SMALL = ["--depth", "2", "--width", "8", "--heads", "2", "--context", "8"]
SMALL += ["--steps", "20", "--every", "10"]


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text").write_text(PROSE)
    return str(tmp_path / "text")


@pytest.mark.parametrize(
    "extra",
    [["--attention", "cosine"], ["--attention", "contractive", "--invertible"], ["--norm", "post"]],
)
def test_a_trained_model_is_measured(tmp_path, text, extra, capsys):
    out = str(tmp_path / "model")
    assert main(["train", "--text", text, *SMALL, *extra, "--out", out]) == 0
    assert "test loss" in capsys.readouterr().out
    assert {"curves.csv", "curves.png", "config.json", "model.safetensors"} <= {
        p.name for p in Path(out).iterdir()
    }
    measure = f"measure {out} --text {text} --lengths 4,8 --samples 1 --scope attention"
    assert main(measure.split()) == 0
    assert "attention" in capsys.readouterr().out


@pytest.mark.wide
def test_training_needs_neither_transformers_nor_pydantic(tmp_path, text):
    code = (
        "import sys; from pathlib import Path; from lipscope.cli.training import train\n"
        "train([sys.argv[1]], depth=1, width=8, heads=1, context=8, steps=2, every=1, "
        "out=Path(sys.argv[2]))\n"
        "print({'transformers', 'pydantic'} & set(sys.modules))"
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


MISTAKES = {
    "--attention linear": "choose one of dot, l2, ball, contractive, contractive-ball, cosine",
    "--invertible": "choose attention contractive",
    "--attention contractive --constant 0": "constant must be a positive number, got 0.0",
    "--attention contractive --invertible --constant 1": "below 1",
    "--constant 0.5": "contractive or contractive-ball attention, l2 attention takes none",
    "--norm batch": "choose one of pre, post, none",
    "--attention contractive --invertible --norm post": "choose norm pre",
    "--width 9": "multiple of the number of heads",
    "--context 1000": "give more text, or a smaller context",
    "--steps 0": "steps must be a whole number",
    "--lr nan": "lr must be a positive number",
    "--warmup -1": "warmup must be a whole number from 0 to 9223372036854775807, got -1",
    "--weight-decay -1": "weight_decay must be 0 or a positive number",
    "--clip 0": "clip must be a positive number",
    f"--seed {'9' * 20}": "seed must be a whole number from 0 to 9223372036854775807, got 999",
    "--device nonsense": "cannot be used here",
    "--width 100000000": "try a smaller width (100000000)",
    "--batch 1000000000000": "batch (1000000000000)",
    "--text nowhere": "cannot read the text",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_mistakes_are_told_in_a_line_and_nothing_is_left(tmp_path, text, options, capsys):
    out = tmp_path / "model"
    assert main(["train", "--text", text, *SMALL, "--out", str(out), *options.split()]) == 2
    told = capsys.readouterr().err
    assert MISTAKES[options] in told and told.count("\n") == 1
    assert not out.exists()


def test_every_option_of_the_optimiser_arrives(tmp_path, text):
    out = tmp_path / "model"
    given = {"steps": 4, "batch": 3, "lr": 0.02, "warmup": 5, "weight_decay": 0.06, "clip": 0.7}
    given |= {"seed": 8, "every": 2, "depth": 1, "width": 6, "heads": 3, "context": 9}
    given |= {"norm": "none", "constant": 0.4}
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    command = f"train --text {text} --attention contractive --invertible {options} --out {out}"
    assert main(command.split()) == 0
    found = read_checkpoint(out)
    assert found is not None
    settings = found[1]["settings"]
    assert {name: settings[name] for name in given} == given
    assert (settings["attention"], settings["invertible"]) == ("contractive", True)


def test_a_text_on_stdin_is_the_text_in_the_file(tmp_path, text, monkeypatch, capsys):
    command = ["train", *SMALL, "--out", str(tmp_path / "model"), "--text"]
    (tmp_path / "text").write_text(PROSE.replace(". ", ".\n"))
    assert main([*command, text]) == 0
    for words, code in ((PROSE.replace(". ", ".\r\n"), 0), (PROSE, 2)):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(words.encode())))
        assert main([*command, "-"]) == code
    assert "holds a training with another text" in capsys.readouterr().err


def test_the_bar_says_how_well_it_goes(tmp_path, text, monkeypatch):
    said: list[str] = []

    class Listener(Report):
        def __call__(self, done: float, total: float) -> None:
            super().__call__(done, total)
            said.append(self.doing)

    monkeypatch.setattr("lipscope.cli.terminal.Report", Listener)
    assert main(["train", "--text", text, *SMALL, "--out", str(tmp_path / "model")]) == 0
    found = read_checkpoint(tmp_path / "model")
    assert found is not None
    first, second, _ = found[1]["curve"]
    assert said == [f"training, test loss {r['test']:.3f}" for r in [first] * 11 + [second] * 10]


PLACES = {  # under lipscope.papers.charlm
    "training.read_characters": ("what was saved is kept. Run the same command again", []),
    "training.Training.read": ("nothing is saved in {}. Run the same command to resume", []),
    "files.write_json": ("step 0 of 20 is saved in {}. Run the same command to resume", []),
    "files.draw_curves": ("step 20 of 20 is saved in {}. Run the", ["model.safetensors"]),
    "files.curve_table": ("what was saved is kept", ["curves.png"]),
}


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_says_what_is_kept_wherever_it_comes(tmp_path, text, place, monkeypatch, capsys):
    def stop(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    words, there = PLACES[place]
    out = tmp_path / "model"
    command = ["train", "--text", text, *SMALL, "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(f"lipscope.papers.charlm.{place}", stop)
        assert main(command) == 130
    said = capsys.readouterr()
    assert said.err.startswith(f"lipscope: Stopped; {words.format(out)}")
    assert said.err.count("\n") == 1 and said.out == ""
    assert all((out / name).exists() for name in there) and not list(out.glob(".*"))
    assert main(command) == 0


def test_a_full_disk_leaves_no_draft_and_is_told_as_it_is(tmp_path, text):
    """A limit on file size stands for a full disk: the first checkpoint is too large."""
    out = tmp_path / "model"
    code = (
        "import resource, signal, sys; from lipscope.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "train", "--text", text, *SMALL, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert (
        done.stderr == f"lipscope: cannot write {out / FILE}: File too large; no file was written\n"
    )
    assert {path.name for path in out.iterdir()} <= {LOCK}  # older filelock removes it


@pytest.mark.slow
def test_kills_of_the_whole_command_change_no_bit(tmp_path, text):
    train = ["train", "--text", text, *SMALL, "--steps", "300", "--out"]
    command = [sys.executable, "-m", "lipscope", *train]
    torn = tmp_path / "torn"
    for _ in range(5):
        before = (torn / FILE).stat().st_mtime_ns if (torn / FILE).exists() else 0
        child = subprocess.Popen([*command, str(torn)], stdout=subprocess.DEVNULL)
        while child.poll() is None and (
            not (torn / FILE).exists() or (torn / FILE).stat().st_mtime_ns == before
        ):
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    subprocess.run([*command, str(torn)], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*command, str(tmp_path / "calm")], check=True, stdout=subprocess.DEVNULL)
    for name in ("model.safetensors", "curves.csv"):
        assert (torn / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path, text, capsys):
    assert main(["train", "--text", text, *SMALL, "--out", str(tmp_path)]) == 2
    assert "neither a training nor empty (it contains text)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_text_in_another_encoding_is_refused(tmp_path, capsys):
    (tmp_path / "latin").write_bytes("né à Rouen".encode("latin-1") * 50)
    assert (
        main(["train", "--text", str(tmp_path / "latin"), *SMALL, "--out", str(tmp_path / "model")])
        == 2
    )
    assert "is not UTF-8 text (byte 1)" in capsys.readouterr().err
