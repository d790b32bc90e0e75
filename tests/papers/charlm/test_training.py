"""A training learns, resumes after a kill bit by bit, and never overwrites what it should not."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from lipscope._types import UserError
from lipscope.papers.charlm.characters import CharacterText
from lipscope.papers.charlm.files import FILE, read_checkpoint, write_tensors
from lipscope.papers.charlm.language_model import Architecture
from lipscope.papers.charlm.training import Recipe, Training, train

ROOT = Path(__file__).resolve().parents[3]
PROSE = "she sells sea shells by the sea shore, and he sells none of them. " * 12


def begin(
    steps: int = 8, attention: str = "l2", seed: int = 0, lr: float = 1e-2, every: int = 2
) -> Training:
    text = CharacterText.of(PROSE, 8)
    architecture = Architecture(len(text.alphabet), attention, 2, 8, 2, 8)
    return Training(
        text, architecture, Recipe(steps, 4, lr, 2, seed=seed, every=every), torch.device("cpu")
    )


def kept(directory: Path) -> tuple[dict[str, torch.Tensor], dict]:
    found = read_checkpoint(directory)
    assert found is not None
    return found


def assert_equal(one: Path, other: Path) -> None:
    """Bit by bit: model, optimiser, randomness, step, curve."""
    (tensors, facts), (expected, expected_facts) = kept(one), kept(other)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert repr(facts) == repr(expected_facts)


def calm(directory: Path, steps: int = 8) -> Path:
    directory.mkdir()
    train(begin(steps), directory)
    return directory


def test_a_training_learns(tmp_path):
    training = begin(60, every=30)
    train(training, tmp_path)
    assert training.curve[-1].step == 60
    assert training.curve[-1].test < training.text.unigram_loss - 0.5 < training.curve[0].test
    assert all(len(point.constants) == 2 and min(point.constants) > 0 for point in training.curve)


class _DeathError(Exception):
    """Stands for whatever ends a process."""


@pytest.mark.parametrize("last", [1, 2, 5, 7])
def test_an_interrupted_training_goes_on_to_the_same_end(tmp_path, last):
    def stop(done: float, total: float) -> None:
        if done == last:
            raise _DeathError

    (tmp_path / "torn").mkdir()
    with pytest.raises(_DeathError):
        train(begin(), tmp_path / "torn", stop)
    assert kept(tmp_path / "torn")[1]["step"] == (last - 1) // 2 * 2
    train(begin(), tmp_path / "torn")
    assert_equal(tmp_path / "torn", calm(tmp_path / "calm"))


def test_a_checkpoint_that_says_whether_there_are_norms_is_gone_on_with(tmp_path):
    calm(tmp_path / "old")
    tensors, facts = kept(tmp_path / "old")
    assert facts["settings"]["norm"] == "pre"
    for written, complaint in ((True, None), (False, "holds a training with norm none, not pre")):
        facts["settings"]["norm"] = written
        write_tensors(tmp_path / "old" / FILE, tensors, facts)
        with nullcontext() if complaint is None else pytest.raises(UserError, match=complaint):
            assert begin().restore(tmp_path / "old")


def test_reading_the_curve_leaves_no_trace():
    watched, blind = begin(), begin()
    for _ in range(4):
        watched.advance()
        watched.read()
        blind.advance()
    for a, b in zip(watched.model.parameters(), blind.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.wide
def test_a_real_kill_changes_no_bit(tmp_path):
    code = (
        "import sys, torch; torch.set_num_threads(1); from pathlib import Path\n"
        "from tests.papers.charlm.test_training import begin\n"
        "from lipscope.papers.charlm.training import train\n"
        "train(begin(60), Path(sys.argv[1]), kept=lambda t: print(t.step, flush=True))"
    )
    torn = tmp_path / "torn"
    torn.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(torn)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    while int(child.stdout.readline()) < 10:
        pass
    os.kill(child.pid, signal.SIGKILL)
    told = [int(line) for line in child.stdout.read().split()]
    assert child.wait() == -signal.SIGKILL
    assert max([10, *told]) <= kept(torn)[1]["step"] < 60
    train(begin(60), torn)
    assert_equal(torn, calm(tmp_path / "calm", 60))


@pytest.mark.gpu
def test_a_gpu_learns_what_a_cpu_learns(tmp_path):
    here, there = begin(), begin()
    there.device = torch.device("cuda")
    there.model.to("cuda")
    for training, place in ((here, "cpu"), (there, "cuda")):
        (tmp_path / place).mkdir()
        train(training, tmp_path / place)
    for a, b in zip(here.curve, there.curve, strict=True):
        assert b.test == pytest.approx(a.test, rel=1e-3) and b.constants == pytest.approx(
            a.constants, rel=1e-2
        )
    again = begin()
    again.device = torch.device("cuda")
    again.model.to("cuda")
    assert again.restore(tmp_path / "cuda") and again.step == 8
    again.advance()


def test_ctrl_c_says_what_is_kept(tmp_path):
    def stop(done: float, total: float) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        train(begin(), tmp_path, stop)
    assert f"step 4 of 8 is saved in {tmp_path}" in stopped.value.__notes__[0]


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, step, monkeypatch):
    def fail(words: str) -> None:
        with (
            monkeypatch.context() as patch,
            pytest.raises(UserError, match=f"No space left on device; {words}"),
        ):
            patch.setattr(os, step, full)
            write_tensors(tmp_path / FILE, {"x": torch.zeros(2)}, {"step": 2})

    fail("no file was written")
    assert not list(tmp_path.iterdir())
    write_tensors(tmp_path / FILE, {"x": torch.ones(2)}, {"step": 1})
    fail("the previous file is unchanged")
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    tensors, facts = kept(tmp_path)
    assert torch.equal(tensors["x"], torch.ones(2)) and facts == {"step": 1}


def test_other_settings_do_not_touch_a_training(tmp_path):
    calm(tmp_path / "mine")
    before = (tmp_path / "mine" / FILE).read_bytes()
    for other, complaint in (
        (begin(seed=1), "seed 0, not 1"),
        (begin(attention="dot"), "attention l2, not dot"),
    ):
        with pytest.raises(UserError, match=complaint):
            train(other, tmp_path / "mine")
    elsewhere = begin()
    elsewhere.text = CharacterText.of(PROSE.replace("sea", "tea"), 8)
    with pytest.raises(UserError, match="a training with another text"):
        train(elsewhere, tmp_path / "mine")
    assert (tmp_path / "mine" / FILE).read_bytes() == before


def test_a_finished_training_is_not_trained_again(tmp_path):
    calm(tmp_path / "done")
    before = (tmp_path / "done" / FILE).stat().st_mtime_ns
    again = begin()
    train(again, tmp_path / "done")
    assert again.step == 8 and len(again.curve) == 5
    assert (tmp_path / "done" / FILE).stat().st_mtime_ns == before


def test_a_file_that_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / FILE).write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="is not a checkpoint of lipscope train"):
        begin().restore(tmp_path)


def test_a_training_that_diverges_says_so():
    training = begin(lr=1e30)
    with pytest.raises(
        UserError, match=r"training has diverged. Try lr below 1e\+30 or warmup above 2, in another"
    ):
        for _ in range(8):
            training.advance()
        training.read()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"steps": 0}, "steps must be a whole number"),
        ({"batch": -1}, "batch must be"),
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"lr": float("nan")}, "lr must be a positive number"),
        ({"seed": -1}, "seed must be a whole number from 0 to"),
        ({"seed": 2**63}, f"from 0 to {2**63 - 1}, got {2**63}"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
    ],
)
def test_recipes_that_cannot_be_are_refused(options, complaint):
    with pytest.raises(UserError, match=complaint):
        Recipe(**options)


def test_a_last_step_that_diverges_is_no_success(tmp_path):
    training = begin(lr=1e30, steps=1, every=1)
    with pytest.raises(UserError, match="training has diverged"):
        train(training, tmp_path)
