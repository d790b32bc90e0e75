"""L2 attention whose values factor through the queries exactly, nearly, or not at all."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import pytest
import torch
from torch import Generator

import lipscope as ls
from lipscope._types import Around, Ball, Everywhere, Point, UserError
from lipscope.theorems.factored_values import (
    FactoredAttention,
    _is_product,
    exact_split,
    near_split,
    whole_rest,
)
from lipscope.theorems.kim2021 import (
    distance_upper,
    largest_coordinate_upper,
    phi_inverse,
)
from lipscope.theorems.sharper import distance_reaction, tighter_distance_upper
from lipscope.theorems.statement import heads_of, visibility
from tests.naive import dense_jacobian
from tests.theorems.soundness import ascended

NAMES = {
    "2": {"Kim et al., L2 attention", "L2 attention"},
    "inf": {"Kim et al., L2 attention, largest coordinate"},
}
DIGITS = 60


def randn(g: Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def matrix(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def tied(Q, V, O=None, heads=1, **options) -> ls.SelfAttention:
    return ls.SelfAttention(
        Q, Q, V, O, heads=heads, kernel=options.pop("kernel", ls.L2()), **options
    )


def head_of(f: ls.SelfAttention):
    (h,) = heads_of(f, folded=False)
    return h


def uppers(f, domain, norm="2") -> dict[str, float]:
    rows = ls.bounds(f, domain, norm)
    return {row.name: row.value for row in rows if row.kind == "upper" and row.name in NAMES[norm]}


def test_a_residual_of_one_rounding_error_counts_at_tokens_of_any_size():
    """Q = (1, 0), V = (1, 1e-15): norms 1.93, 2.97, 1044 as the second coordinates grow."""
    f = tied(matrix([[1.0, 0]]), matrix([[1.0, 1e-15]]), kernel=ls.L2(scale=1.0))
    for z in (1.0, 1e15, 1e18):
        X = matrix([[0.0, 0], [1.3, z], [-1.3, -z]])
        J = dense_jacobian(f, X)
        exact = {"2": torch.linalg.matrix_norm(J, 2).item(), "inf": J.abs().sum(dim=1).max().item()}
        for domain in (Point(X), Around(X, 1e-3), Ball(1.01 * math.hypot(1.3, z), 3)):
            for norm, names in NAMES.items():
                found = uppers(f, domain, norm)
                assert set(found) == names
                assert exact[norm] <= min(found.values()) <= 60 * exact[norm]
    assert not uppers(f, Everywhere(3)) and not uppers(f, Everywhere(3), "inf")
    assert any(
        "factor through the queries exactly" in r.failed
        for r in ls.bounds(f, Everywhere(3)).not_offered
    )


@pytest.mark.parametrize("seed", range(24))
def test_no_input_of_a_ball_exceeds_the_rows_whatever_the_values_are(seed: int):
    """Heads, output, biases, masks, scales; residuals from 1e-3 to all of V; with ascent."""
    g = Generator().manual_seed(seed)
    heads, k, n = 1 + seed % 2, 1 + seed // 2 % 2, 5
    d, m = k + 2, 2
    Q, b = randn(g, heads * k, d), randn(g, heads * k)
    M = torch.block_diag(*(randn(g, m, k) for _ in range(heads)))
    rest = (0.0, 1e-3, 0.3)[seed % 3]
    V = (M @ Q if seed % 4 else 0) + rest * randn(g, heads * m, d)
    f = tied(
        Q,
        V,
        randn(g, 3, heads * m) if seed % 5 < 2 else None,
        heads=heads,
        biases=(b, b, randn(g, heads * m)) if seed % 3 else None,
        causal=seed % 4 == 1,
        kernel=ls.L2(scale=0.5 if seed % 2 else None),
    )
    R = 10.0 ** (seed % 5 - 1)
    ball = Ball(R, n)
    rows, largest = uppers(f, ball), uppers(f, ball, "inf")
    assert set(rows) == NAMES["2"] and set(largest) == NAMES["inf"]
    far = randn(g, n, d)
    far = R * far / far.norm(dim=1, keepdim=True)
    # Nearly equal queries at far tokens: scores stay moderate while the residual is largest.
    level = 0.9 * (far - far @ (torch.linalg.pinv(Q) @ Q).T) + 0.1 * far / R
    for X in (far, level, ascended(f, far, ball, 8), ascended(f, level, ball, 8)):
        J = dense_jacobian(f, X)
        assert torch.linalg.matrix_norm(J, 2).item() <= min(rows.values())
        assert J.abs().sum(dim=1).max().item() <= min(largest.values())


def test_the_residual_enters_with_these_constants():
    """One head of size one, E known to the last bit: the three formulas in mpmath."""
    n, s, R, e = 6, 0.7, 50.0, 2.0**-10
    f = tied(matrix([[2.0, 0]]), matrix([[1.0, e]]), kernel=ls.L2(scale=s))
    phi = float(mpmath.lambertw((n - 1) / mpmath.e).real)
    through, far = 1.0, math.sqrt(s) * 2 * R  # ||M|| ||Q|| with M = 1/2
    ball = Ball(R, n)
    row = through * (4 * phi + 1) + e * (1 + 4 * math.sqrt(phi) * far)
    assert distance_upper(f, ball) == pytest.approx(math.sqrt(n) * row, rel=1e-9)
    assert largest_coordinate_upper(f, ball) == pytest.approx(row, rel=1e-9)
    # In one coordinate a column of P sums to 2 / sqrt 3 at most, one of P t^2 to two thirds of it.
    column = 2 / math.sqrt(3)
    left = e * (math.sqrt(column) + 2 * (math.sqrt(phi) + math.sqrt(2 / 3 * column)) * far)
    stated = tighter_distance_upper(f, ball)
    assert stated == pytest.approx(
        through * distance_reaction(visibility(f, n), 1) + left, rel=1e-6
    )


def test_small_tokens_need_no_factor():
    """M = 0: near the origin attention is the mean of the values, and ||M|| ||Q|| plays no part."""
    Q = matrix([[1.0, 0, 0], [0, 1e-8, 0]])
    V = matrix([[0.0, 1, 0], [0, 0, 1.0]])
    f = tied(Q, V)
    assert tighter_distance_upper(f, Ball(1e-6, 4)) == pytest.approx(2 / math.sqrt(3), rel=1e-5)
    assert near_split(head_of(f)).M.abs().max() > 1e7


@pytest.mark.parametrize("seed", range(20))
def test_the_split_bounds_what_is_left_over(seed: int):
    """V - M Q in 60 digits, for values that factor, nearly factor and do not, at extreme scales."""
    g = Generator().manual_seed(seed)
    k, d, m = 2 + seed % 3, 4, 3
    scale = (
        10.0 ** (40 * torch.rand(k, 1, generator=g, dtype=torch.float64) - 20) if seed % 2 else 1.0
    )
    Q = scale * randn(g, k, d)
    V = randn(g, m, k) @ Q + (0.0, 1e-12, 1.0)[seed % 3] * randn(g, m, d)
    h = head_of(tied(Q, V))
    for split in (near_split(h), whole_rest(h)):
        with mpmath.workdps(DIGITS):
            exact = [mpmath.matrix(W.tolist()) for W in (h.V, split.M, Q)]
            E = exact[0] - exact[1] * exact[2]
            rows = [[abs(E[i, j]) for j in range(d)] for i in range(m)]
            assert max(mpmath.svd_r(E, compute_uv=False)) <= split.spectral
            assert max(mpmath.sqrt(sum(x * x for x in row)) for row in rows) <= split.row
            assert max(sum(row) for row in rows) <= split.row_sum


@pytest.mark.parametrize("seed", range(6))
def test_what_is_absorbed_where_q_is_invertible(seed: int):
    """The exact M = V Q^-1, in 60 digits, is within the drift of the computed one."""
    g = Generator().manual_seed(seed)
    Q, V = randn(g, 3, 3), randn(g, 2, 3)
    Q[:, 0] *= 10.0 ** -(2 * seed)
    split = exact_split(head_of(tied(Q, V)))
    with mpmath.workdps(DIGITS):
        V_exact = mpmath.matrix(head_of(tied(Q, V)).V.tolist())
        D = V_exact * mpmath.matrix(Q.tolist()) ** -1 - mpmath.matrix(split.M.tolist())
        assert max(mpmath.svd_r(D, compute_uv=False)) <= split.drift
        assert max(sum(abs(D[i, j]) for j in range(3)) for i in range(2)) <= split.drift


@pytest.mark.parametrize(
    ("Q", "V", "factors"),
    [
        ([[1.0, 0]], [[0.1, 0]], True),
        ([[1.0, 0]], [[0.1, 1e-300]], False),
        ([[1.0, 2, 3], [0, 1, 0]], [[3.0, 7, 9], [-0.5, 0.25, -1.5]], True),
        ([[1.0, 2, 3], [0, 1, 0]], [[3.0, 7, 9.000000000000002], [-0.5, 0.25, -1.5]], False),
        ([[2.0**700, 0]], [[3 * 2.0**-300, 0]], True),
        ([[0.0, 0]], [[0.0, 0]], True),
        ([[0.0, 0]], [[0.0, 1]], False),
        ([[1.0, 1], [1, 1]], [[2.0, 2]], True),
        ([[1.0, 1], [1, 1]], [[2.0, 2.0000000000000004]], False),
    ],
)
def test_values_factor_on_all_inputs_only_to_the_last_bit(Q, V, factors):
    f = tied(matrix(Q), matrix(V))
    assert bool(uppers(f, Everywhere(3))) == factors
    assert set(uppers(f, Ball(1.0, 3))) == NAMES["2"]


def factored(g: Generator, heads: int = 2, d: int = 6, dtype=torch.float32) -> FactoredAttention:
    """A layer with values M_h Q_h by definition: V is the product, rounded to dtype."""
    k = d // heads
    Q, M, O = (W.to(dtype) for W in (randn(g, d, d), randn(g, heads, k, k), randn(g, d, d)))
    V = (M.double() @ Q.double().unflatten(0, (heads, k))).flatten(0, 1).to(dtype)
    return FactoredAttention(Q, Q, V, O, heads=heads, kernel=ls.L2(), M=M)


def plain(f: FactoredAttention) -> ls.SelfAttention:
    return ls.SelfAttention(f.Q, f.K, f.V, f.O, heads=f.heads, kernel=f.kernel)


def test_float32_layers_with_heads_have_their_rows_where_tokens_are_bounded():
    g = Generator().manual_seed(0)
    f = factored(g)
    X = randn(g, 5, 6).float()
    everywhere = uppers(f, Everywhere(5))
    for norm, names in NAMES.items():
        for domain in (Point(X), Around(X, 0.1), Ball(4.0, 5)):
            for layer in (f, plain(f)):
                assert set(uppers(layer, domain, norm)) == names
        # Stored values alone do not define M, and a rounding error is unbounded on all inputs.
        assert set(uppers(f, Everywhere(5), norm)) == names
        assert not uppers(plain(f), Everywhere(5), norm)
    rounded = uppers(plain(f), Ball(4.0, 5))
    for name, value in everywhere.items():
        assert rounded[name] <= value * (1 + 1e-4)


def test_values_defined_by_m_have_the_theorems_constant_on_all_inputs():
    """O = I, one head, Q = (I 0), M = 2 I: twice the reaction, even with V in float32."""
    I = torch.eye(2, dtype=torch.float32)
    Q = torch.cat([I, 0 * I], dim=1)
    f = FactoredAttention(Q, Q, (2 + 2**-20) * Q, kernel=ls.L2(), M=2 * I[None])
    assert uppers(f, Everywhere(9))["L2 attention"] == pytest.approx(
        2 * distance_reaction(visibility(f, 9), 2), rel=1e-9
    )
    phi = phi_inverse(9)
    coordinate = uppers(f, Everywhere(9), "inf")["Kim et al., L2 attention, largest coordinate"]
    assert coordinate == pytest.approx(2 * (4 * math.sqrt(2) * phi + 1), rel=1e-9)
    # On bounded tokens the bound covers V as stored: 2^-20 off, at tokens of size 2^40.
    assert uppers(f, Ball(2.0**40, 9))["L2 attention"] > 2**19


def test_the_factored_map_is_the_layer_it_stands_for():
    g = Generator().manual_seed(1)
    f = factored(g, dtype=torch.float64)
    X = randn(g, 4, 6)
    torch.testing.assert_close(f(X), plain(f)(X), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        f.jacobian(X).to_dense(), dense_jacobian(f, X), rtol=1e-11, atol=1e-11
    )
    parts = [f.head(h)(X) for h in range(f.heads)]
    torch.testing.assert_close(torch.cat(parts, dim=-1) @ f.O.T, f(X), rtol=1e-13, atol=1e-13)
    assert isinstance(f.to(torch.float32).double(), FactoredAttention)
    far = X + 1e12 * torch.linalg.svd(f.Q[:3])[2][-1]
    # Tokens that differ only where Q_1 vanishes have equal values of head 1, up to rounding of Q x.
    near, moved = f.head(0).project(X)[2], f.head(0).project(far)[2]
    assert (near - moved).norm() < 1e-2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: replace(f, V=f.V + 1), "V is not M Q"),
        (lambda f: replace(f, M=f.M[:1]), "M must have shape"),
        (lambda f: replace(f, M=f.M.double()), "dtype of Q"),
        (lambda f: replace(f, kernel=ls.Dot()), "L2 kernel"),
        (lambda f: replace(f, biases=(f.Q[0], f.Q[0], None)), "no biases"),
    ],
)
def test_what_is_not_m_q_is_refused(change, says):
    with pytest.raises(UserError, match=says):
        change(factored(Generator().manual_seed(2)))


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_no_product(which, bad):
    parts = [2 * torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)]
    parts.append(2 * torch.eye(2, dtype=torch.float64))
    assert _is_product(*parts, 0) and _is_product(4 * parts[0], *parts[1:], 2)
    parts[which][0, 1] = bad
    assert not _is_product(*parts, 0)
