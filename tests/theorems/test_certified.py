"""The certificate on a ball around X: against ascent, second derivatives, and 50 digits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

import lipscope as ls
from lipscope._types import Around
from lipscope.linalg.spectral import spectral_norm
from lipscope.theorems.certified import (
    STEPS,
    AtRadius,
    Base,
    _keys_through_tokens,
    certified_upper,
    second_derivative,
    third_cumulant,
    weights_within,
)
from lipscope.theorems.rounding import gamma
from lipscope.theorems.statement import heads_of
from tests.cases import problem
from tests.naive import dense_jacobian, naive_layer
from tests.theorems.reference import certificate, second_derivative_bound


def head(kind: str, seed: int):
    """A single head of a case and its view, V scaled by a power of two."""
    f, X = problem(kind, seed)
    f = f.head(0)
    (view,) = heads_of(f, folded=True)
    return f, X, view


def drawn(n: int, causal: bool, seed: int = 1):
    """A head as in the theory: Gaussian weights, d = k = n, LayerNormed tokens."""
    g = torch.Generator().manual_seed(seed)
    X = torch.nn.functional.layer_norm(torch.randn(n, n, generator=g, dtype=torch.float64), (n,))
    Q, K, V = (torch.randn(n, n, generator=g, dtype=torch.float64) / math.sqrt(n) for _ in range(3))
    return ls.SelfAttention(Q, K, V, causal=causal), X


def attacked(f: ls.SelfAttention, X, r: float, steps: int) -> float:
    """||D_Y f|| at a Y on the sphere around X, by the gradient of <left, J right>."""
    Y, best = X, 0.0
    for _ in range(steps):
        e = ls.local_lipschitz(f, Y, tol=1e-4)
        best = max(best, e.value)
        Z = Y.clone().requires_grad_(True)
        _, pull = torch.func.vjp(lambda z: naive_layer(f, z), Z)
        (gradient,) = torch.autograd.grad((pull(e.left)[0] * e.right).sum(), Z)
        Y = X + r * gradient / gradient.norm()
    return max(best, ls.local_lipschitz(f, Y, tol=1e-6).value)


def test_it_is_close_to_what_ascent_finds():
    f, X = drawn(24, causal=False)
    found, certified = attacked(f, X, 1e-2, 6), certified_upper(f, Around(X, 1e-2))
    assert found <= certified <= 1.05 * found


@pytest.mark.parametrize(
    "kind", ["gaussian", "causal", "biases", "additive mask", "fully masked rows"]
)
def test_b_bounds_the_second_derivative(kind: str):
    """Finite differences of dense Jacobians, and weights, at random Z in the ball."""
    f, X, view = head(kind, 1)
    g = torch.Generator().manual_seed(0)
    x = Base(view, X)
    for rho in (1e-3, 0.3):
        B, most = second_derivative(x, rho) * view.factor, weights_within(x, rho)
        for _ in range(3):
            E, H = (torch.randn(X.shape, generator=g, dtype=torch.float64) for _ in range(2))
            Z, H = X + rho * E / E.norm(), H / H.norm()
            step = 1e-5
            slope = (dense_jacobian(f, Z + step * H) - dense_jacobian(f, Z - step * H)) / (2 * step)
            assert torch.linalg.matrix_norm(slope, 2).item() <= B * (1 + 1e-6)
            weights = torch.stack([weight_row(f, Z, i) for i in range(len(X))])
            assert (weights <= most + 1e-12).all()


def weight_row(f: ls.SelfAttention, Z, i: int):
    """Row i of P, read off by giving token j the value e_j."""
    values = torch.eye(len(Z), dtype=torch.float64)
    scores = f.project(Z)
    return ls.attend(
        scores[0],
        scores[1],
        values[None],
        causal=f.causal,
        window=f.window,
        mask=f.mask,
        padding=f.padding,
    )[0, i]


def test_it_grows_with_the_radius_and_starts_at_sigma():
    f, X = problem("gaussian", 2)
    values = [certified_upper(f, Around(X, r)) for r in (1e-9, 1e-3, 1e-2, 0.1, 1.0, 10.0)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(ls.local_lipschitz(f, X).value, rel=2e-4)


def test_the_sum_is_above_the_integral():
    f, X, view = head("gaussian", 3)
    r, fine = 0.5, 64
    x = Base(view, X)
    integral = (
        sum(second_derivative(x, r * (i + 0.5) / fine) for i in range(fine))
        * r
        / fine
        * view.factor
    )
    sigma = torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item()
    coarse = second_derivative(x, 0.0) * r * view.factor
    assert integral > 1.01 * coarse  # B grows: a left sum would be too small
    assert certified_upper(f, Around(X, r)) >= sigma + integral


def test_heads_and_projection_are_summed():
    f, X = problem("multi-head, projected", 0)
    whole = certified_upper(f, Around(X, 0.05))
    J = torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item()
    assert (
        J
        <= whole
        <= sum(
            certified_upper(replace(f.head(h), O=f.O[:, cut(f, h)]), Around(X, 0.05))
            for h in range(f.heads)
        )
        * (1 + 1e-3)
    )


def cut(f: ls.SelfAttention, h: int) -> slice:
    m = f.O.shape[1] // f.heads
    return slice(h * m, (h + 1) * m)


@dataclass(frozen=True)
class Drawn:
    """A small head and an input: tokens up to 10^2 apart, every third offset by up to 10^8."""

    f: ls.SelfAttention
    X: torch.Tensor
    rho: float
    offset: float


def small_head(seed: int) -> Drawn:
    g = torch.Generator().manual_seed(seed)
    n, d, m, k = (int(torch.randint(1, high + 1, (), generator=g)) for high in (5, 3, 3, 3))
    n = max(n, 2)
    offset = 10 ** float(torch.rand((), generator=g) * 8) if seed % 3 == 0 else 0.0
    spread, rho = (10 ** float(torch.rand((), generator=g) * 3 - p) for p in (1, 4))
    draw = {"generator": g, "dtype": torch.float64}
    X = offset + spread * torch.randn(n, d, **draw)
    small = 1 / max(1.0, offset)
    biases = (torch.randn(k, **draw), None, None) if seed % 2 else None
    f = ls.SelfAttention(
        small * torch.randn(k, d, **draw),
        torch.randn(k, d, **draw),
        torch.randn(m, d, **draw),
        biases=biases,
    )
    return Drawn(replace(f, causal=seed % 4 == 1), X, rho, offset)


def predicted_margin(x: Base, one: Drawn) -> float:
    """The margin of B that the theory predicts, relative to B, to first order.

    P is known up to e^(+-eta), so the points from which lengths are measured move by eta max|x|;
    B consists of lengths on a ball of radius rho, none of them below rho. Large scores make eta
    large, large tokens the quotient.
    """
    eta = x.seen.log_slack.max().item()
    return (eta + gamma(250)) * (1 + one.X.norm(dim=1).max().item() / one.rho)


def margin(seed: int) -> tuple[float, float, float]:
    """B in float64 with margin over B in 50 digits, minus 1; the predicted margin; the offset."""
    one = small_head(seed)
    (view,) = heads_of(one.f, folded=True)
    x = Base(view, one.X)
    exact = second_derivative_bound(one.f, one.X, one.rho) / view.factor
    return float(second_derivative(x, one.rho) / exact - 1), predicted_margin(x, one), one.offset


@pytest.mark.parametrize("seeds", [6, pytest.param(240, marks=pytest.mark.slow)])
def test_the_margin_covers_rounding_and_no_more(seeds: int):
    found = [margin(seed) for seed in range(seeds)]
    assert all(0 <= excess <= predicted for excess, predicted, _ in found)
    plain = sorted(excess for excess, _, offset in found if offset == 0)
    assert plain[len(plain) // 2] < 1e-11


@pytest.mark.slow
def test_two_hundred_certificates_against_fifty_digits(monkeypatch):
    """The certificate is never below its formula in 50 digits, ||D_X f|| included.

    It exceeds it by no more than the solver's upper bound of that norm, with a new random start
    each time, and the predicted margin.
    """
    uppers, excess = [], []

    def recorded(J, **options):
        uppers.append(spectral_norm(J, **options))
        return uppers[-1]

    monkeypatch.setattr("lipscope.theorems.certified.spectral_norm", recorded)
    for seed in range(200):
        one = small_head(seed)
        (view,) = heads_of(one.f, folded=True)
        norm, rise, interval = certificate(one.f, one.X, one.rho, STEPS)
        computed = certified_upper(one.f, Around(one.X, one.rho))
        at_X = uppers[-1].upper * (1 + gamma(200))
        # The first radius is r / STEPS.
        slack = 1 + STEPS * predicted_margin(Base(view, one.X), one)
        assert (
            min(norm + rise, interval) <= computed <= min(at_X + rise * slack, interval * slack)
        ), seed
        excess.append(float(computed / min(norm + rise, interval) - 1))
    print(
        f"certificates above their formula by: median {sorted(excess)[100]:.1e}, "
        f"largest {max(excess):.1e}"
    )


def test_long_sequences_take_the_smaller_bound_of_the_third_cumulant(monkeypatch):
    """Without Gram matrices and at X itself: the least of two products, either for some query."""
    monkeypatch.setattr("lipscope.theorems.certified.GRAM", 0)
    f, X, view = head("gaussian", 3)
    x = Base(view, X)
    A = f.K.T @ f.Q / math.sqrt(f.Q.shape[0])
    P = torch.softmax(X @ A.T @ X.T, dim=1)
    away = X[None] - (P @ X)[:, None]
    values, keys = away @ view.V.T, away @ A
    sizes = [torch.linalg.matrix_norm(P.sqrt()[..., None] * y, 2) for y in (values, keys)]
    longest = [y.norm(dim=2).amax(1) for y in (values, keys)]
    products = torch.stack([longest[0] * sizes[1], longest[1] * sizes[0]])
    assert set(products.argmin(0).tolist()) == {0, 1}
    found = third_cumulant(x, AtRadius(x, 0.0), 0.0)
    assert found.tolist() == pytest.approx(products.amin(0).tolist(), rel=1e-9)


def test_keys_through_tokens_where_no_token_has_much_weight():
    """Weights p on itself and the rest everywhere, the same b: 2 p b is less than sqrt(p) b."""
    n, p, size = 256, 1 / 16, 3.0
    P = p * torch.eye(n, dtype=torch.float64) + (1 - p) / n
    root, b = P.sqrt(), torch.full((n,), size, dtype=torch.float64)
    k_b = (root * b[:, None]).norm(dim=0).max()
    s = AtRadius.__new__(AtRadius)
    vars(s).update(P=P, root=root, pi=root.amax(1), b=b, k_b=k_b)
    # Rows and columns have one length, and a symmetric matrix with rows of sum 1 has norm 1.
    length = math.sqrt((p + (1 - p) / n) ** 2 + (n - 1) * ((1 - p) / n) ** 2)
    assert _keys_through_tokens(s).item() == pytest.approx(2 * size * length, rel=1e-9)
    assert 2 * length < 0.9 * root.max().item()
