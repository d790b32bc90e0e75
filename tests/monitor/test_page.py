"""The Python on the page about monitoring and conversion runs as it stands, and prints what stands below it."""

import re
import warnings
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "monitor.md"
BLOCKS = re.findall(
    r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", PAGE.read_text(), flags=re.DOTALL
)
NUMBER = r"\d+(?:\.\d+)?"


def assert_same_output(found: str, expected: str) -> None:
    """The same words, and numbers that differ by one in the last digit shown at most."""
    assert re.sub(NUMBER, "#", found).split() == re.sub(NUMBER, "#", expected).split()
    for x, y in zip(re.findall(NUMBER, found), re.findall(NUMBER, expected), strict=True):
        digits = max(len(z.partition(".")[2]) for z in (x, y))
        assert abs(float(x) - float(y)) <= 1.01 * 10**-digits * (digits > 0), (x, y)


@pytest.mark.parametrize(
    ("block", "printed"), BLOCKS, ids=["loop", "trainer", "lightning", "convert"]
)
def test_the_page_runs_and_prints_what_it_says(block, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", module="transformers|accelerate|torch|pytorch_lightning|lightning"
        )
        exec(compile(block, PAGE.name, "exec"), {})
    assert bool(printed) == ("print(" in block), "what is printed stands on the page"
    if printed:
        assert_same_output(capsys.readouterr().out, printed)


def test_every_output_on_the_page_is_compared():
    assert PAGE.read_text().count("```text") == sum(bool(printed) for _, printed in BLOCKS) == 2


@pytest.mark.parametrize(
    "stale", ["layer 0 52.92", "layer 0 53.0", "layer 1 52.90", "layer 0 -52.90", "head 0 52.90"]
)
def test_a_stale_number_is_seen(stale):
    assert_same_output("layer 0 52.9\n", "layer  0  52.91")
    with pytest.raises(AssertionError):
        assert_same_output("layer 0 52.90", stale)
