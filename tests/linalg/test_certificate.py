"""The probabilistic upper bound: coverage, sharpness, rounding that would break the plain form."""

import math
from dataclasses import replace

import mpmath
import pytest
import torch

import lipscope as ls
from lipscope.linalg.certificate import polynomial_bound, smallest_overlap
from lipscope.linalg.spectral import Run
from tests.checks import dense_operator


@pytest.mark.parametrize("size", [2, 3, 4, 50, 10_000])
@pytest.mark.parametrize("failure", [0.3, 1e-3, 1e-9])
def test_overlap_is_below_the_exact_quantile_and_close(size, failure):
    """P(<v, y>^2 <= c^2) for Beta(1/2, (size-1)/2), in 40 digits."""
    c = smallest_overlap(size, failure)
    with mpmath.workdps(40):
        probability = mpmath.betainc(0.5, (size - 1) / 2, 0, mpmath.mpf(c) ** 2, regularized=True)
    assert probability <= failure * (1 + 1e-12)
    assert probability >= 0.85 * failure


def diagonal(spectrum: torch.Tensor) -> ls.LinearOperator:
    return ls.LinearOperator(
        mv=lambda x: x * spectrum,
        rmv=lambda x: x * spectrum,
        in_shape=spectrum.shape,
        out_shape=spectrum.shape,
    )


SPECTRA = {
    "two levels": torch.cat([torch.ones(1), torch.full((30,), 0.5)]),
    "close pair": torch.cat([torch.tensor([1.0, 0.999]), torch.linspace(0, 0.9, 40)]),
    "cluster": 1 - 1e-3 * torch.rand(50, generator=torch.Generator().manual_seed(0)),
    "triple": torch.cat([torch.ones(3), torch.linspace(0, 0.97, 40)]),
    "geometric": 0.97 ** torch.arange(80.0),
    "bulk and outlier": torch.cat(
        [torch.ones(1), 0.7 * torch.rand(100, generator=torch.Generator().manual_seed(1))]
    ),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", SPECTRA)
def test_coverage_at_a_failure_probability_one_can_see(name):
    """With failure 0.2 and few steps the bound fails at most that often (240 starts, 3 sigma)."""
    spectrum = SPECTRA[name].double()
    misses, runs = 0, 240
    for seed in range(runs):
        solver = ls.Solver(max_steps=4, failure=0.2, seed=seed)
        misses += ls.spectral_norm(diagonal(spectrum), tol=1e-12, solver=solver).upper < 1
    assert misses <= runs * 0.2 + 3 * math.sqrt(runs * 0.2 * 0.8)


BANDS = {
    "narrow band": torch.cat(
        [torch.ones(1), 0.55 + 0.1 * torch.rand(60, generator=torch.Generator().manual_seed(2))]
    ),
    "three levels": torch.cat([torch.ones(1), torch.full((30,), 0.5), torch.full((30,), 0.1)]),
}


def miss_rate(spectrum: torch.Tensor, gap: float, overlap: float, members: int = 2500) -> float:
    """How often a requested gap is closed below the truth, which is 1."""
    J = replace(diagonal(spectrum), batch=members)
    run = Run(J, 0.3, gap, ls.Solver(max_steps=30), random=True)
    run.overlap = overlap
    g = torch.Generator().manual_seed(1)
    run.solve(torch.randn(members, len(spectrum), generator=g, dtype=torch.float64))
    return (run.evaluate("").upper < 1).double().mean().item()


@pytest.mark.wide
@pytest.mark.parametrize("name", BANDS)
def test_a_solve_that_stops_at_its_gap_fails_as_often_as_stated(name):
    """2500 starts, a failure probability of 5 %, a rule that stops on what it sees: at most 5 %
    fail, up to 3 sigma, and nearly that many; a start believed twice as lucky is caught.
    """
    spectrum, failure = BANDS[name].double(), 0.05
    overlap = smallest_overlap(len(spectrum), failure)
    limit = failure + 3 * math.sqrt(failure * (1 - failure) / 2500)
    assert 0.6 * failure <= miss_rate(spectrum, 0.9, overlap) <= limit
    assert miss_rate(spectrum, 0.9, 2 * overlap) > limit


@pytest.mark.parametrize("name", SPECTRA)
def test_never_below_at_the_default_confidence(name):
    spectrum = SPECTRA[name].double()
    for seed in range(20):
        e = ls.spectral_norm(diagonal(spectrum), solver=ls.Solver(seed=seed))
        assert e.lower <= spectrum.max() <= e.upper
        assert e.confidence == 1 - 1e-9


def test_the_rounding_term_covers_errors_that_hide_the_top_vector():
    """Perturb every product until the top component vanishes: the plain bound falls below 1, not
    the corrected one.
    """
    size, failure = 2000, 1e-6
    overlap = smallest_overlap(size, failure)
    g = torch.Generator().manual_seed(1)
    lam = torch.cat([torch.ones(1), 0.9 * torch.rand(size - 1, generator=g)]).double()
    v = torch.randn(size, generator=g, dtype=torch.float64)
    v[0] = 0
    v = v / v.norm() * math.sqrt(1 - (1.02 * overlap) ** 2)
    v[0] = 1.02 * overlap
    sigma, previous, b_last, a, b, hidden = lam.sqrt(), torch.zeros(size).double(), 0.0, [], [], 0.0
    for _ in range(30):
        u = sigma * v - b_last * previous
        a.append(u.norm().item())
        u = u / u.norm()
        z = sigma * u - a[-1] * v
        hidden = max(hidden, z[0].abs().item())
        z[0] = 0
        b.append(z.norm().item())
        v, previous, b_last = z / z.norm(), u, b[-1]
    coefficients = (torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64))
    plain = polynomial_bound(*coefficients, overlap, torch.zeros(1, dtype=torch.float64))
    corrected = polynomial_bound(
        *coefficients, overlap, torch.tensor([hidden], dtype=torch.float64)
    )
    assert plain < 1 <= corrected


def test_members_of_a_batch_share_the_failure_probability():
    """The same matrix eight times over: each member's bound is computed at an eighth of the failure
    probability.
    """
    M = torch.randn(1, 60, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    solver = ls.Solver(max_steps=12, seed=3)
    alone = ls.spectral_norm(dense_operator(M), tol=1e-12, solver=solver)
    many = ls.spectral_norm(dense_operator(M.repeat(8, 1, 1)), tol=1e-12, solver=solver)
    assert many.upper[0] > alone.upper[0] and many.confidence == alone.confidence


def test_a_member_that_stopped_earlier_has_the_bound_of_its_own_steps():
    a = torch.tensor([[1.0, 0.8, 0.7]], dtype=torch.float64).repeat(2, 1)
    b = torch.tensor([[0.5, 0.4, 0.3]], dtype=torch.float64).repeat(2, 1)
    a[0, 2] = b[0, 2] = torch.nan
    rounding = torch.full((2,), 1e-16, dtype=torch.float64)
    early, late = polynomial_bound(a, b, 1e-3, rounding).tolist()
    (alone,) = polynomial_bound(a[:1, :2], b[:1, :2], 1e-3, rounding[:1]).tolist()
    assert early == pytest.approx(alone, rel=1e-12) and late < early < math.inf
