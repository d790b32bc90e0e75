"""The page on dynamics: its example runs, and its pictures are there and small."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "dynamics.md").read_text()


@pytest.mark.wide
def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    exec(compile(example, "dynamics.md", "exec"), {})
    said = capsys.readouterr().out
    assert "reached the requested time" in said and "the covariance is infinite at t = 2" in said


@pytest.mark.parametrize("picture", re.findall(r"\((gallery/[^)]*)\)", PAGE))
def test_a_picture_is_there_and_small(picture):
    assert (
        10_000 < (DOCS / picture).stat().st_size < (500_000 if picture.endswith("gif") else 300_000)
    )


def test_every_command_has_its_preset():
    from lipscope.dynamics.simulation import PRESETS

    assert set(re.findall(r"lipscope simulate --preset (\w+)", PAGE)) == set(PRESETS)
