"""Two-Dirac measures attain their bound, and n tokens turn into a measure where predicted."""

import math

import pytest
import torch
from torch import Generator

import lipscope as ls
from lipscope.linalg.spectral import spectral_norm
from lipscope.mean_field.dirac_families import _repeated, transition, two_diracs
from lipscope.mean_field.measures import derivative
from lipscope.mean_field.upper_bounds import w2_bound, w2_bound_geshkovski2023
from tests.mean_field.weighted import one_head, randn
from tests.naive import dense_jacobian


@pytest.mark.parametrize("R", [0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
@pytest.mark.parametrize(
    ("A", "family", "gamma"), [(-1.0, "opposite", 1.0), (1.0, "same side", 1 / 8)]
)
def test_both_families_reach_what_is_proved_and_stay_below_the_bounds(R, A, family, gamma):
    f = one_head(A)
    worst = two_diracs(f, R, family)
    assert worst.gamma == pytest.approx(gamma) and worst.p == pytest.approx(
        math.exp(-2 * gamma * R * R)
    )
    assert worst.measure.weights[0].item() == pytest.approx(worst.p)
    sigma = spectral_norm(derivative(f, worst.measure), 1e-9).value
    assert worst.guaranteed == pytest.approx(gamma / 2 * R * R * math.exp(gamma * R * R))
    assert worst.guaranteed <= sigma <= w2_bound(f, R) <= w2_bound_geshkovski2023(f, R)
    if gamma * R * R > 4:
        assert sigma == pytest.approx((1 + gamma * R * R) / 2 * math.exp(gamma * R * R), rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_the_guarantee_holds_for_any_matrix_with_a_real_eigenvalue(seed):
    g = Generator().manual_seed(seed)
    A, V = randn(g, 3, 3), randn(g, 2, 3)  # of odd size: there is one
    f = one_head(A, V)
    worst = two_diracs(f, 1.5)
    real = torch.linalg.eigvals(A)
    real = real.real[real.imag.abs() < 1e-12]
    assert worst.gamma == pytest.approx(max(-real.min(), real.max() / 8).item())
    assert worst.measure.radius <= 1.5 * (1 + 1e-12)
    assert (
        worst.guaranteed
        <= spectral_norm(derivative(f, worst.measure), 1e-9).value
        <= w2_bound(f, 1.5)
    )


def test_the_transition_is_that_of_real_tokens():
    """Every n up to 31 against attention on n tokens, where e^{2 gamma R^2} = e^2 = 7.4."""
    f, R = one_head(-1.0), 1.0
    found = transition(f, R, 31, per_decade=20)
    for n, sigma in zip(found.n, found.sigma.tolist(), strict=True):
        few = max(1, round(n * math.exp(-2.0)))
        X = torch.tensor([[R]] * few + [[-R]] * (n - few), dtype=torch.float64)
        assert sigma == pytest.approx(
            torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item(), rel=1e-10
        )


def test_copies_that_move_apart_are_counted():
    """0 and 4, each up to three times: with two copies of 0 the constant is that with splitting."""
    f, atoms = one_head(-1.0), torch.tensor([[0.0], [4.0]], dtype=torch.float64)
    pairs = [(2, 1), (4, 2), (3, 2), (3, 1), (6, 3)]
    for (n, few), sigma in zip(
        pairs, _repeated(f, atoms, *map(list, zip(*pairs, strict=True))), strict=True
    ):
        X = torch.cat([atoms[:1].expand(few, 1), atoms[1:].expand(n - few, 1)])
        assert sigma.item() == pytest.approx(
            torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item(), rel=1e-10
        )


def test_from_sqrt_n_to_the_plateau():
    f, R = one_head(-1.0), 3.0
    found = transition(f, R, 1e30)
    assert found.n[0] == 2 and found.n[-1] == int(1e30)
    assert found.predicted == pytest.approx(math.exp(18))
    n, sigma = torch.tensor([float(x) for x in found.n], dtype=torch.float64), found.sigma
    early = n < 1e-4 * found.predicted
    assert (sigma[early] / (n[early] - 1).sqrt()).sub(1).abs().max() < 0.01
    late = n > 1e4 * found.predicted
    assert (sigma[late] / found.plateau).sub(1).abs().max() < 1e-3
    assert found.plateau == pytest.approx(
        5 * math.exp(9), rel=1e-3
    )  # (1 + gamma R^2)/2 e^{gamma R^2}


def test_what_has_no_family_is_refused():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    for bad, says in (
        (lambda: two_diracs(one_head(turn, turn), 1.0), "no real eigenvalue"),
        (lambda: two_diracs(one_head(1.0), 1.0, "opposite"), "no negative real eigenvalue"),
        (lambda: two_diracs(one_head(-1.0), 1.0, "same side"), "no positive real eigenvalue"),
        (lambda: two_diracs(one_head(1.0), 1.0, "left"), "family must be"),
        (lambda: two_diracs(one_head(1.0), 0.0), "positive radius"),
        (lambda: two_diracs(one_head(-1.0), 30.0), "reduce R"),
        (lambda: two_diracs(one_head(-1.0, causal=True), 1.0), "one head without mask"),
        (lambda: transition(one_head(-1.0), 1.0, 1), "at least 2"),
        (lambda: transition(one_head(-1.0), 1.0, 10, per_decade=0), "per_decade"),
    ):
        with pytest.raises(ls.UserError, match=says):
            bad()
