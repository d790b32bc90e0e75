"""The Python in the README runs as it stands."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_is_something_to_run():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_python_in_the_readme_runs(block):
    exec(compile(block, "README.md", "exec"), {})
