"""The page on measures: its Python runs and gives the numbers it says, and its tables are what the code computes."""

import math
import re
from pathlib import Path

import pytest
import torch

from lipscope.linalg.spectral import spectral_norm
from lipscope.mean_field.attention_on_measures import derivative
from lipscope.mean_field.dirac_families import transition, two_diracs
from lipscope.mean_field.upper_bounds import w2_bound, w2_bound_geshkovski2023
from tests.mean_field.weighted import one_head

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "theory" / "mean_field.md").read_text()


def table(heading: str) -> list[list[str]]:
    """The rows of the table whose first line starts so, headings and rule first."""
    block = PAGE[PAGE.index(heading) :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]


def test_the_python_of_the_page_runs():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict = {}
    exec(compile(block, "mean_field.md", "exec"), names)
    assert names["e"].value == pytest.approx(3.6717, abs=5e-5)
    lines = [line for line in block.splitlines() if re.search(r"#\s+\d\.\d+", line)]
    for line in lines:
        value = eval(line.split(" = ", 1)[-1] if line.startswith("e =") else line, names)
        value = getattr(value, "value", value)
        assert value == pytest.approx(float(re.search(r"#\s+(\d\.\d+)", line)[1]), abs=5e-5), line
    assert len(lines) == 3


def test_the_table_of_two_diracs():
    for row in table("| R (A = -1, V = 1)")[2:]:
        R, f = float(row[0]), one_head(-1.0)
        worst = two_diracs(f, R)
        sigma = spectral_norm(derivative(f, worst.measure)).value
        computed = [worst.guaranteed, sigma, w2_bound(f, R), w2_bound_geshkovski2023(f, R)]
        assert [float(cell) for cell in row[1:]] == pytest.approx(computed, rel=2e-3)


def test_the_table_of_the_transition():
    heading, _, row = table("| n (A = -1, R = 3;")
    found = transition(one_head(-1.0), 3.0, 1e30)
    counts = torch.tensor([float(n) for n in found.n], dtype=torch.float64)
    for n, sigma in zip(heading[1:], row[1:], strict=True):
        nearest = (counts / float(n)).log().abs().argmin()
        assert abs(math.log(counts[nearest].item() / float(n))) < 0.02
        assert float(sigma) == pytest.approx(found.sigma[nearest].item(), rel=1e-3)
