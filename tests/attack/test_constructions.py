"""The explicit inputs reach the rates their papers promise, on dense Jacobians too."""

import math

import pytest
import torch

import lipscope as ls
from lipscope._types import Around, Ball, Everywhere, UserError
from lipscope.attack.constructions import HALF_WAY, OPPOSITE, SPREAD, explicit_inputs, regime
from lipscope.study.growth import fit
from tests.naive import dense_jacobian

LENGTHS = (8, 16, 32, 64, 128, 256)


def head(seed: int, d: int = 4, k: int = 4, **options) -> ls.SelfAttention:
    g = torch.Generator().manual_seed(seed)
    return ls.SelfAttention(
        *(torch.randn(k, d, generator=g, dtype=torch.float64) for _ in range(3)), **options
    )


def by_name(f, R, n):
    return {one.name: one for one in explicit_inputs(f, Ball(R, n))}


def wide_enough(f, reach=14.0) -> float:
    """The radius at which 2 gamma R^2 = reach, past the logarithm of every length here."""
    return math.sqrt(reach / regime(f, 1.0).reach)


def exponent(values: dict[int, float]) -> float:
    return fit("heads", 0, list(values.items())).alpha


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_opposite_crowd_reaches_the_root_of_n(seed, causal):
    f = head(seed, causal=causal)
    R = wide_enough(f)
    assert math.log(255) <= regime(f, R).reach
    values = {n: by_name(f, R, n)[OPPOSITE].value for n in LENGTHS}
    assert abs(exponent(values) - 0.5) <= 0.03


@pytest.mark.wide
def test_the_tuned_gap_gains_the_logarithm():
    f = ls.SelfAttention(-torch.eye(3).double(), torch.eye(3).double(), torch.eye(3).double())
    gains = {
        n: (found := by_name(f, 4.0, n))[f"{OPPOSITE}, tuned"].value / found[OPPOSITE].value
        for n in LENGTHS
    }
    for n, gain in gains.items():
        assert gain >= 0.5 * (1 + 0.5 * math.log(n - 1))
    assert gains[256] > 1.2 * gains[16] > 1.2


def test_the_special_token_stands_first_under_a_causal_mask():
    f = head(0, causal=True)
    X = by_name(f, wide_enough(f), 64)[OPPOSITE].X
    assert not torch.equal(X[0], X[1]) and torch.equal(X[1], X[-1])
    last = ls.local_lipschitz(f, X.flip(0)).value
    assert last < 0.5 * ls.local_lipschitz(f, X).value


def test_both_cases_of_the_theorem_and_their_proofs():
    g = torch.Generator().manual_seed(0)
    V = torch.eye(3, dtype=torch.float64)
    for sign, name in ((-1.0, OPPOSITE), (1.0, HALF_WAY)):
        Q = sign * torch.diag(1 + torch.rand(3, generator=g, dtype=torch.float64))
        f, n = ls.SelfAttention(Q, V, V, kernel=ls.Dot(scale=1.0)), 12
        for R in (0.7, 2.0):
            bound = math.sqrt(n - 1) / (1 + (n - 1) * math.exp(-regime(f, R).reach))
            assert by_name(f, R, n)[name].value >= bound * (1 - 1e-9)


def test_a_token_at_zero_shows_the_square_of_the_radius():
    f, n = head(3), 9
    small, large = (by_name(f, R, n)[SPREAD] for R in (30.0, 60.0))
    assert large.value / small.value == pytest.approx(4, rel=1e-2)
    u = large.X[1] / large.X[1].norm()
    A = f.K.T @ f.Q / 2
    assert large.value / 60**2 == pytest.approx(
        (n - 1) / n * ((f.V @ u).norm() * (A.T @ u).norm()).item(), rel=1e-2
    )


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 4, "causal": True}])
def test_every_value_is_that_of_the_dense_jacobian_and_every_token_in_the_ball(options):
    bias = tuple(torch.linspace(-1, 1, 4, dtype=torch.float64) for _ in range(3))
    f = head(4, biases=bias, **options)
    found = explicit_inputs(f, Ball(1.5, 7))
    assert [one.value for one in found] == sorted((one.value for one in found), reverse=True)
    for one in found:
        assert one.X.norm(dim=1).max() <= 1.5 * (1 + 1e-12)
        assert one.value == pytest.approx(
            torch.linalg.matrix_norm(dense_jacobian(f, one.X), 2).item(), rel=1e-6
        )


def test_a_small_ball_is_in_the_mean_field_regime():
    f = head(0)
    assert regime(f, 1e-3).reach < math.log(63)
    assert regime(f, 2.0).reach == pytest.approx(4 * regime(f, 1.0).reach)


@pytest.mark.parametrize(
    ("f", "domain", "says"),
    [
        (head(0), Everywhere(4), "Ball"),
        (head(0), Around(torch.ones(4, 4), 1.0), "Ball"),
        (head(0), Ball(1.0, 1), "n >= 2"),
        (head(0, kernel=ls.L2()), Ball(1.0, 4), "L2"),
    ],
)
def test_what_they_were_not_made_for_is_refused(f, domain, says):
    with pytest.raises(UserError, match=says):
        explicit_inputs(f, domain)
