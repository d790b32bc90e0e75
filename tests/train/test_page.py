"""The page on the monitor shows what its Python prints; tests/test_docs.py runs it."""

from pathlib import Path

from tests.test_docs import blocks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "monitor.md").read_text()


def test_what_is_printed_stands_on_the_page():
    found = blocks(PAGE)
    assert len(found) == 3 and all(block.reason is None for block in found)
    assert [bool(block.output) for block in found] == ["print(" in block.code for block in found]
    assert PAGE.count("```text") == sum(bool(block.output) for block in found) == 1
