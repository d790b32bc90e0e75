"""The Python on the page about monitoring and conversion runs as it stands."""

import re
import warnings
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "monitor.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", [*BLOCKS[:-1], pytest.param(BLOCKS[-1], marks=pytest.mark.slow)])
def test_the_page_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers|accelerate|torch|pytorch_lightning|lightning")
        exec(compile(block, PAGE.name, "exec"), {})
