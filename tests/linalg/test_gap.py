"""A requested gap: reached and true, or given up early with the reason, on hard spectra."""

from itertools import pairwise

import pytest
import torch

import lipscope as ls
from lipscope.linalg.certificate import (
    MEMORY,
    NOISE,
    SCORES,
    STEPS,
    UNCERTIFIED,
    bounded_by,
    check_gap,
    polynomial_bound,
    smallest_overlap,
)
from lipscope.linalg.golub_kahan import GolubKahan
from lipscope.linalg.operator import Rounding
from tests.checks import dense_operator

SIZE = 1200


def uniform(size: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SPECTRA = {
    "clustered": 1 - 1e-3 * uniform(SIZE),
    "close pair": torch.cat([torch.tensor([1.0, 0.999]).double(), 0.9 * uniform(SIZE - 2)]),
    "no outlier": torch.linspace(0, 1, SIZE, dtype=torch.float64),
    "geometric": 0.99 ** torch.arange(SIZE).double(),
    "rank one": torch.eye(SIZE, dtype=torch.float64)[0],
    "identity": torch.ones(SIZE, dtype=torch.float64),
}


def diagonal(spectrum: torch.Tensor, **claims: float) -> ls.LinearOperator:
    multiply = lambda x: x * spectrum  # noqa: E731
    shape = spectrum.shape[-1:]
    return ls.LinearOperator(multiply, multiply, shape, shape, rounding=Rounding(**claims))


def asked(
    J: ls.LinearOperator, gap: float, failure: float = 1e-9, **options: object
) -> ls.Estimate:
    return ls.spectral_norm(J, gap=gap, solver=ls.Solver(seed=1, failure=failure, **options))


@pytest.mark.parametrize("gap", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("name", SPECTRA)
def test_a_gap_that_is_reached_holds_the_truth(name, gap):
    top = SPECTRA[name].max().item()
    e = asked(diagonal(SPECTRA[name]), gap)
    assert (
        e.missed == ""
        and e.upper / e.lower <= 1 + gap
        and e.lower <= top <= e.upper
        and e.status.ok
    )


@pytest.mark.parametrize("name", ["close pair", "geometric", "rank one"])
def test_a_reached_gap_costs_one_pair_of_products_beyond_the_steps(name):
    """The pair that shows the rounding is the one that the value is evaluated with."""
    calls: list[str] = []

    def multiply(x: torch.Tensor, way: str) -> torch.Tensor:
        calls.append(way)
        return x * SPECTRA[name]

    J = ls.LinearOperator(lambda x: multiply(x, "J"), lambda x: multiply(x, "J'"), (SIZE,), (SIZE,))
    e = asked(J, 0.01)
    assert e.missed == "" and calls.count("J") == calls.count("J'") == e.steps + 1


@pytest.mark.parametrize("failure", [1e-11, 1e-12, 1e-14])
@pytest.mark.parametrize("name", SPECTRA)
def test_a_gap_below_the_noise_ends_early_and_says_so(name, failure):
    """At such confidence rounding hides the start's part along the top vector; hardly a step is
    taken for nothing.
    """
    J = diagonal(SPECTRA[name])
    free = ls.spectral_norm(J, solver=ls.Solver(seed=1, failure=failure))
    e = asked(J, 1e-9, failure)
    assert e.missed == NOISE and e.note.endswith(NOISE) and e.status.ok
    assert e.steps <= 40 + free.steps and e.lower <= 1 <= e.upper <= free.upper
    if failure == 1e-14:
        assert e.upper == float("inf") and e.steps == free.steps and "no upper bound" in e.note


@pytest.mark.parametrize("name", ["close pair", "geometric"])
def test_what_is_called_impossible_does_not_come_with_more_steps(name):
    """The floor, computed where the value has converged, against bounds up to 160 steps."""
    J, overlap = diagonal(SPECTRA[name]), smallest_overlap(SIZE, 1e-11)
    noise = torch.full((1,), 4 * 2.0**-52, dtype=torch.float64)
    e = asked(J, 1e-9, 1e-11)
    g = torch.Generator().manual_seed(1)
    basis = GolubKahan(J, torch.randn(1, SIZE, generator=g).double())
    floors, bounds = [], []
    for step in range(1, 161):
        basis.step()
        if step >= 40 and step % 20 == 0:
            a, b = (torch.stack(x, dim=1) for x in zip(*basis.coefficients, strict=True))
            floors.append(polynomial_bound(a, b, overlap, noise, decaying=False).item())
            bounds.append(polynomial_bound(a, b, overlap, noise).item())
    assert all(x <= y * (1 + 1e-12) for x, y in pairwise(floors))
    assert all(x <= y * (1 + 1e-12) for x, y in zip(floors, bounds, strict=True))
    # What the solver settled for is within a small factor of the best of 160 steps.
    assert e.upper - 1 <= 6 * (min(bounds) - 1)


def test_the_noise_of_every_member_grows_with_the_steps():
    """sum_m [(lambda - T_k)^-1]_{1m}, in dense algebra, never falls with k; it is what bounded_by
    compares.
    """
    a, b = uniform(12, seed=1) + 0.2, uniform(12, seed=2)
    M = torch.diag(a) + torch.diag(b[:-1], 1)
    T = M.T @ M
    lam = 1.05 * torch.linalg.eigvalsh(T)[-1]
    sums = [
        torch.linalg.inv(lam * torch.eye(k).double() - T[:k, :k])[0].sum().item()
        for k in range(1, 13)
    ]
    assert all(x <= y for x, y in pairwise(sums))
    e = torch.tensor([1e-9], dtype=torch.float64)
    term = 3 * e.item() * lam.item() * sums[-1]
    for overlap, above in ((1.001 * term, True), (0.999 * term, False)):
        assert bounded_by(lam.sqrt()[None], a[None], b[None], overlap, e)[1].item() is above


def test_a_candidate_is_a_bound_exactly_where_the_search_says():
    a, b = uniform(40, seed=3).reshape(2, 20) + 0.2, uniform(40, seed=4).reshape(2, 20)
    e = torch.full((2,), 1e-15, dtype=torch.float64)
    bound = polynomial_bound(a, b, 1e-11, e)
    assert bounded_by(bound * (1 + 1e-6), a, b, 1e-11, e)[0].all()
    assert not bounded_by(bound * (1 - 1e-4), a, b, 1e-11, e)[0].any()


def test_members_of_a_batch_answer_for_themselves():
    """The same gap is reached by a rank-one member and not by an identity, whose note says so."""
    both = torch.stack(
        [torch.diag(SPECTRA["identity"][:300]), torch.diag(SPECTRA["rank one"][:300])]
    )
    e = asked(dense_operator(both), 5e-6, 2e-9)
    assert e.missed[0] == NOISE and e.missed[1] == ""
    assert (
        e[0].note.endswith(NOISE)
        and NOISE not in e[1].note
        and (e.lower <= 1).all()
        and (e.upper >= 1).all()
    )


def test_the_reason_is_named():
    J = diagonal(SPECTRA["no outlier"])
    few = asked(J, 0.01, max_steps=20)
    assert few.missed == STEPS and few.status is ls.Status.MAX_STEPS
    small = asked(J, 1e-4, memory=40 * 2 * SIZE * 8)
    assert small.missed == MEMORY and small.upper / small.lower > 1.0001
    hot = asked(diagonal(SPECTRA["rank one"], condition=1e13), 0.01)
    assert hot.missed == SCORES
    for size in (1e-8, 1e8):  # rounding is relative, whatever the unit
        assert asked(diagonal(size * SPECTRA["rank one"], condition=1e13), 0.01).missed == SCORES
    warm = ls.spectral_norm(J, gap=0.01, start=torch.ones(SIZE).double())
    assert warm.missed == UNCERTIFIED and "start" in warm.note
    broken = ls.spectral_norm(diagonal(torch.full((5,), torch.nan).double()), gap=0.01)
    assert "no value" in broken.missed
    assert ls.spectral_norm(J).missed == ""


@pytest.mark.parametrize("gap", [0.01, 0.007])
def test_what_rounding_widens_at_the_end_is_left_out_of_the_aim(gap):
    """A map whose own rounding parts the bounds by 0.6 %: the solver has to do with the rest."""
    J = diagonal(SPECTRA["close pair"], condition=4.2e11)
    e = asked(J, gap)
    assert 1.0059 < (1 + J.stated_rounding) / (1 - J.stated_rounding) < 1.0061
    assert e.missed == "" and e.upper / e.lower <= 1 + gap


def test_a_zero_operator_has_reached_every_gap():
    e = asked(diagonal(torch.zeros(50, dtype=torch.float64)), 0.01)
    assert e.upper == e.lower == 0 and e.missed == ""


def test_products_noisier_than_ever_seen_are_measured():
    """Every product off by 1e-12, at random: a gap that this hides is not claimed, and a wider one
    is reached.
    """
    g = torch.Generator().manual_seed(0)
    spectrum = SPECTRA["close pair"]

    def shaken(x: torch.Tensor) -> torch.Tensor:
        return x * spectrum * (1 + 1e-12 * torch.randn(SIZE, generator=g, dtype=torch.float64))

    J = ls.LinearOperator(shaken, shaken, (SIZE,), (SIZE,))
    tight, wide = (asked(J, gap, 1e-8) for gap in (1e-4, 0.3))
    assert tight.missed == NOISE and tight.steps < 60 and tight.lower <= 1 <= tight.upper
    assert wide.missed == "" and wide.upper / wide.lower <= 1.3


def test_noise_that_is_seen_late_costs_steps_and_not_the_gap():
    """Without noise 30 steps would do; with the noise that the last products show, they do not."""
    g = torch.Generator().manual_seed(0)
    spectrum = SPECTRA["close pair"]

    def shaken(x: torch.Tensor) -> torch.Tensor:
        return x * spectrum * (1 + 1e-12 * torch.randn(SIZE, generator=g, dtype=torch.float64))

    J, solver = (
        ls.LinearOperator(shaken, shaken, (SIZE,), (SIZE,)),
        ls.Solver(seed=1, failure=1e-8),
    )
    few = ls.spectral_norm(J, tol=1e-2, gap=0.01, solver=ls.Solver(30, seed=1, failure=1e-8))
    enough = ls.spectral_norm(J, tol=1e-2, gap=0.01, solver=solver)
    assert few.missed == STEPS and enough.missed == "" and enough.steps == 32


@pytest.mark.parametrize("gap", ["0.1", True, [0.1]])
def test_what_is_no_number_is_told(gap):
    with pytest.raises(ls.UserError, match="must be a number"):
        check_gap(gap)
