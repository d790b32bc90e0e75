"""Ascent follows the true gradient, stays in its domain, and ends above all it is compared with."""

import pytest
import torch

import lipscope as ls
from lipscope._types import Around, Ball, Everywhere, Point, UserError
from lipscope.attack.ascent import Climb, _climb, ascend, sigma_gradient
from lipscope.attack.constructions import explicit_inputs
from lipscope.attack.search import Normed, region_of
from tests.cases import KINDS, problem
from tests.naive import dense_jacobian

QUICK = Climb(steps=15, restarts=2)


def head(seed: int, d: int = 6, k: int = 3, **options) -> ls.SelfAttention:
    g = torch.Generator().manual_seed(seed)
    return ls.SelfAttention(
        *(torch.randn(k, d, generator=g, dtype=torch.float64) for _ in range(3)), **options
    )


def random_tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_sigma(f, X) -> float:
    return torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"kernel": ls.L2()}, {"kernel": ls.Dot(softcap=3.0)}]
)
def test_the_gradient_is_that_of_the_dense_norm(options):
    f, X, E = head(0, **options), random_tokens(1, 5, 6), random_tokens(2, 5, 6)
    J = dense_jacobian(f, X)
    U, S, Vh = torch.linalg.svd(J)
    assert S[0] > 1.01 * S[1]
    gradient = sigma_gradient(f, X, U[:, 0].reshape(5, -1), Vh[0].reshape(5, 6))
    h = 1e-5
    slope = (dense_sigma(f, X + h * E) - dense_sigma(f, X - h * E)) / (2 * h)
    assert (gradient * E).sum().item() == pytest.approx(slope, rel=1e-5)


def test_a_float32_module_is_searched_as_a_float64_copy():
    f = torch.nn.Linear(3, 4)
    found = ascend(f, Ball(1.0, 2), QUICK, dim=3)
    exact = torch.linalg.matrix_norm(f.weight.double(), 2).item()
    assert found.value == pytest.approx(exact, rel=1e-12)
    assert f.weight.dtype == torch.float32


@pytest.mark.parametrize("causal", [False, True])
def test_ascent_in_a_ball_ends_above_constructions_and_random_inputs(causal):
    f, R, n = head(3, causal=causal), 1.5, 8
    found = ascend(f, Ball(R, n), QUICK)
    assert found.X.norm(dim=1).max() <= R * (1 + 1e-12)
    assert found.value == pytest.approx(dense_sigma(f, found.X), rel=1e-6)
    assert found.value > explicit_inputs(f, Ball(R, n))[0].value
    X = random_tokens(4, 300, n, 6)
    assert (
        found.value > ls.local_lipschitz(f, R * X / X.norm(dim=-1, keepdim=True), 1e-3).value.max()
    )


def test_fewer_dimensions_find_the_same_and_hand_back_whole_tokens():
    f = head(5, d=24, k=2)
    found = ascend(f, Ball(2.0, 6), QUICK)
    assert found.X.shape == (6, 24) and found.X.norm(dim=1).max() <= 2 * (1 + 1e-12)
    assert found.value == pytest.approx(dense_sigma(f, found.X), rel=1e-6)
    assert found.value >= explicit_inputs(f, Ball(2.0, 6))[0].value


@pytest.mark.parametrize("r", [1e-3, 0.3])
def test_ascent_around_an_input_stays_near_and_rises(r):
    f, X = head(6), random_tokens(7, 5, 6)
    found = ascend(f, Around(X, r), QUICK)
    assert (found.X - X).norm() <= r * (1 + 1e-9)
    here = dense_sigma(f, X)
    steps = [X + r * E / E.norm() for E in random_tokens(8, 50, 5, 6)]
    assert found.value > max(here, *(dense_sigma(f, Y) for Y in steps))


@pytest.mark.wide
def test_ascent_over_what_a_layer_norm_can_give():
    f, n, d = head(9), 7, 6
    weight, bias = 0.5 + random_tokens(10, d).abs(), random_tokens(11, d)
    found = ascend(f, Normed(weight, n, bias), Climb(steps=40))
    Z = (found.X - bias) / weight
    assert Z.sum(dim=1).abs().max() < 1e-9 and Z.norm(dim=1).max() <= d**0.5 * (1 + 1e-12)
    tokens = torch.nn.functional.layer_norm(random_tokens(12, 300, n, d), (d,), weight, bias, 0.0)
    assert found.value > ls.local_lipschitz(f, tokens, 1e-3).value.max()


def test_any_map_of_a_batch_can_be_climbed():
    W = random_tokens(13, 4, 4)
    found = ascend(lambda X: torch.sin(2 * X @ W), Ball(1.0, 2), QUICK, dim=4)
    assert found.value == pytest.approx(
        2 * torch.linalg.matrix_norm(W, 2).item(), rel=1e-3
    )  # cos <= 1


def test_a_given_start_is_never_lost():
    f = head(14)
    best = ascend(f, Ball(1.0, 6), QUICK)
    again = ascend(f, Ball(1.0, 6), Climb(steps=0, restarts=1), starts=[best.X])
    assert again.value == pytest.approx(best.value, rel=1e-6)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_attention_can_be_climbed(kind):
    f, X = problem(kind, 0)
    before = ls.local_lipschitz(f, X, precision="exact").value
    found = ascend(f, Around(X, 0.1), Climb(steps=6, restarts=1))
    assert found.value >= before * (1 - 1e-6)


@pytest.mark.parametrize(
    ("domain", "says"),
    [
        (Everywhere(4), "not Everywhere"),
        (Point(torch.ones(4, 6)), "not Point"),
        (Around(torch.ones(4, 5), 1.0), "size 5"),
        (Normed(torch.ones(5), 4), "size 5"),
    ],
)
def test_a_domain_it_cannot_climb_in_is_refused(domain, says):
    with pytest.raises(UserError, match=says):
        ascend(head(0), domain)


def test_other_bad_input_is_refused():
    with pytest.raises(UserError, match="size of a token"):
        ascend(torch.sin, Ball(1.0, 2))
    with pytest.raises(UserError, match="restarts >= 1"):
        Climb(restarts=0)
    with pytest.raises(UserError, match=r"start must have shape \(4, 6\)"):
        ascend(head(0), Ball(1.0, 4), starts=[torch.zeros(3, 6)])
    with pytest.raises(UserError, match="weight"):
        Normed(torch.ones(2, 2), 3)


def test_a_step_follows_the_gradient_in_the_coordinates_of_a_layer_norm():
    """Tokens are weight * z + bias: the bias has no part in the slope, by central differences."""
    f, n, d = head(20), 4, 6
    weight, bias = 0.2 + random_tokens(21, d).abs(), 3 * random_tokens(22, d)
    region = region_of(Normed(weight, n, bias, centred=False), d, weight.device)
    Z, h = 0.1 * random_tokens(23, n, d), 1e-5
    slopes = torch.zeros_like(Z)
    for i in range(n):
        for j in range(d):
            E = torch.zeros_like(Z)
            E[i, j] = h
            high, low = (dense_sigma(f, region.tokens(Z + sign * E)) for sign in (1, -1))
            slopes[i, j] = (high - low) / (2 * h)
    moved, _ = _climb(f, region, Z[None], Climb(steps=1, restarts=1))
    step = moved[0] - Z
    assert step.norm() > 0.1
    assert (step * slopes).sum() / (step.norm() * slopes.norm()) > 0.999
