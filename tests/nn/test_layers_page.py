"""The Python on the page about Lipschitz layers runs and gives what its comments say."""

import re
from pathlib import Path
from typing import Any

from lipscope import nn

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "lipschitz_layers.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_the_page_runs():
    assert len(BLOCKS) == 1
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[0], PAGE.name, "exec"), names)
    found, X = names["found"], names["X"]
    assert (found.value - X).norm() <= found.error_bound + 1e-5
    assert found.steps >= 1


def test_every_name_of_the_table_is_public():
    table = re.findall(r"^\| `(\w+)\(", PAGE.read_text(), flags=re.MULTILINE)
    assert len(table) == 11 and set(table) <= set(nn.__all__)
