"""The tables of the pages on measures are what the code gives."""

import math
from pathlib import Path

import pytest
import torch

from examples import mean_field as example
from lipscope.linalg.spectral import spectral_norm
from lipscope.mean_field.dirac_families import transition, two_diracs
from lipscope.mean_field.duplication import jump_ratio, splitting, splitting_map, splitting_table
from lipscope.mean_field.measures import DiscreteMeasure, derivative
from lipscope.mean_field.upper_bounds import averaging, d_p_bound, w2_bound, w2_bound_geshkovski2023
from lipscope.theorems.geshkovski2023 import masked_wasserstein_upper
from tests.mean_field.weighted import line, one_head

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    name: (DOCS / f"{name}.md").read_text()
    for name in ("mean_field", "masked_mean_field", "mass_splitting")
}


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the table whose first line starts like this, heading and rule first."""
    text = PAGES[page]
    block = text[text.index(heading) :].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in block.splitlines()]


def test_the_table_of_two_diracs():
    for row in table("mean_field", "| R (A = -1, V = 1)")[2:]:
        R, f = float(row[0]), one_head(-1.0)
        worst = two_diracs(f, R)
        sigma = spectral_norm(derivative(f, worst.measure)).value
        computed = [worst.guaranteed, sigma, w2_bound(f, R), w2_bound_geshkovski2023(f, R)]
        assert [float(cell) for cell in row[1:]] == pytest.approx(computed, rel=2e-3)


def test_the_table_of_the_transition():
    heading, _, row = table("mean_field", "| n (A = -1, R = 3;")
    found = transition(one_head(-1.0), 3.0, 1e30)
    counts = torch.tensor([float(n) for n in found.n], dtype=torch.float64)
    for n, sigma in zip(heading[1:], row[1:], strict=True):
        nearest = (counts / float(n)).log().abs().argmin()
        assert abs(math.log(counts[nearest].item() / float(n))) < 0.02
        assert float(sigma) == pytest.approx(found.sigma[nearest].item(), rel=1e-3)


def test_the_table_of_averaging():
    _, _, *rows = table("masked_mean_field", "| d_p constant of n tokens")
    for p, row in zip((1, 2, 4, math.inf), rows, strict=True):
        computed = [averaging(n, p).constant for n in (2, 10, 100, 1000, 10**4, 10**5)]
        assert [float(cell) for cell in row[1:-1]] == pytest.approx(computed, abs=6e-4)


def test_the_table_of_masked_bounds():
    heading, _, without, corrected, sharper = table("masked_mean_field", "| in d_2, ‖V‖ = 1")
    for i, a in enumerate((0.05, 0.3, 1.0, 2.0, 4.0), start=1):
        f, free = one_head(-a, causal=True), one_head(-a)
        assert float(heading[i].removeprefix("a = ")) == a
        assert float(without[i]) == pytest.approx(w2_bound_geshkovski2023(free, 1.0), rel=1e-3)
        assert float(corrected[i]) == pytest.approx(
            masked_wasserstein_upper(f, example.ls.Ball(1.0, 1)), rel=1e-3
        )
        assert float(sharper[i]) == pytest.approx(d_p_bound(f, 1.0, 2), rel=1e-3)


def test_the_masked_page_puts_the_failures_where_they_are():
    assert (1 + 3 * 0.155) * math.exp(2 * 0.155) < 2 < (1 + 3 * 0.156) * math.exp(2 * 0.156)
    X = torch.tensor([1.0] + [-1.0] * 399, dtype=torch.float64)[:, None]
    for R, fails in ((0.355, True), (0.365, False)):
        sigma = spectral_norm(
            derivative(one_head(-1.0, causal=True), DiscreteMeasure.uniform(R * X, causal=True))
        ).value
        assert (sigma > w2_bound_geshkovski2023(one_head(-1.0), R)) == fails


def test_the_table_of_examples():
    *_, line_, three, cross, causal = table(
        "mass_splitting", "| measure (V = I, equal weights, A = -I)"
    )
    I = torch.eye(2, dtype=torch.float64)
    star = 4 * torch.cat([0 * I[:1], I, -I])
    plane = one_head(-I, I)
    for row, f, X in (
        (line_, one_head(-1.0), torch.tensor([[0.0], [4.0]], dtype=torch.float64)),
        (three, plane, star[[0, 1, 3]]),
        (cross, plane, star),
        (
            causal,
            one_head(-1.0, causal=True),
            torch.tensor([[4.0], [-4.0], [0.0]], dtype=torch.float64),
        ),
    ):
        found = splitting(f, X)
        assert [float(cell) for cell in row[1:]] == pytest.approx(
            [found.together.value, found.value], abs=6e-4
        )


def test_the_map_splits_where_the_page_says():
    at = torch.linspace(-6, 6, 241, dtype=torch.float64)
    i, j = (splitting_map(one_head(-1.0), at).gain > 1 + 1e-9).nonzero().T
    near, far = (pick(at[i].abs(), at[j].abs()) for pick in (torch.minimum, torch.maximum))
    assert 0.6 < near.max() < 0.7 and 2.3 < far.min() < 2.4


def test_the_table_of_jumps():
    heading, _, row = table("mass_splitting", "| mass that jumps")
    mu = line([1.0, -1.0], [math.exp(-6.0), 1 - math.exp(-6.0)])
    for mass, ratio in zip(heading[1:], row[1:], strict=True):
        found = jump_ratio(
            one_head(6.0), mu, 0, torch.tensor([0.338], dtype=torch.float64), float(mass)
        )
        assert float(ratio) == pytest.approx(found, abs=6e-5)


def test_the_page_shows_the_table_that_the_example_wrote():
    written = (DOCS / "gallery" / "splitting_table.md").read_text()
    assert written in PAGES["mass_splitting"]


@pytest.mark.slow
def test_the_table_of_maps_is_what_the_search_finds():
    """To 5 %: rounding that differs between machines can send a random search elsewhere."""
    found = example.table(splitting_table(2), splitting_table(3)).splitlines()
    for line_, row in zip(found[2:], table("mass_splitting", "| map |")[2:], strict=True):
        name, *gains = [cell.strip() for cell in line_.strip("|").split("|")]
        assert name == row[0] and ("L2" not in name or set(gains) == {"1.0000"})
        assert [float(gain) for gain in gains] == pytest.approx(
            [float(cell) for cell in row[1:]], rel=0.05
        )
