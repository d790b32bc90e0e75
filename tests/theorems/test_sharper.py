"""L2 attention, sharper: ascent never exceeds the bounds, whose order is optimal."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lipscope as ls
from benchmarks.l2_bounds import largest_found, promised, table
from lipscope._types import Everywhere
from lipscope.theorems.kim2021 import distance_upper, phi_inverse
from lipscope.theorems.sharper import (
    column_square,
    column_sum,
    distance_reaction,
    key_reaction,
    largest_share,
)
from lipscope.theorems.statement import visibility


def layer(
    causal: bool = False, window: int | None = None, mask: Tensor | None = None, k: int = 1
) -> ls.SelfAttention:
    one = torch.eye(k, dtype=torch.float64)
    return ls.SelfAttention(
        one, one, one, kernel=ls.L2(scale=1.0), causal=causal, window=window, mask=mask
    )


def columns(Y: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest column sums of P_ij, D_i P_ij t_i^2 and P_ij t_i^2 over keys and directions."""
    away = Y[:, None] - Y
    d = away.square().sum(-1)
    P = torch.where(seen, -d, -math.inf).softmax(dim=1)
    D = (P * d).sum(dim=1)
    spread, weighted = (
        torch.linalg.eigvalsh(torch.einsum("ij,ija,ijb->jab", W, away, away))[:, -1].amax()
        for W in (P, D[:, None] * P)
    )
    return P.sum(dim=0).amax(), weighted, spread


def climbed(value: Callable[[Tensor], Tensor], Y: Tensor, steps: int = 120) -> float:
    Y = Y.clone().requires_grad_()
    adam = torch.optim.Adam([Y], lr=0.05)
    best = 0.0
    for _ in range(steps):
        found = value(Y)
        best = max(best, found.item())
        adam.zero_grad()
        (-found).backward()
        adam.step()
    return best


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("others", [1, 2, 7, 127, 10**6])
def test_the_largest_share_is_a_maximum(others: int, power: float):
    a = torch.logspace(-8, math.log10(others), 200_001, dtype=torch.float64)
    on_grid = (a * (others / a).log() / (1 + a) ** power).max().item()
    assert on_grid <= largest_share(others, power) <= on_grid * (1 + 1e-6)
    if power == 1:
        assert largest_share(others, 1) == pytest.approx(phi_inverse(others + 1), rel=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [2, 3, 8, 24])
def test_climbing_finds_nothing_above(n: int, causal: bool):
    seen = torch.ones(n, n, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    sees = visibility(layer(causal), n)
    for k in sorted({1, 2, n}):
        limits = (column_sum(sees, k), key_reaction(sees, k), column_square(sees, k))
        g = torch.Generator().manual_seed(n + k)
        Y = torch.randn(n, k, generator=g, dtype=torch.float64) * math.sqrt(math.log(n + 1) / 2 / k)
        for part, limit in enumerate(limits):
            found = climbed(lambda Y, part=part: columns(Y, seen)[part], Y)
            assert found <= limit * (1 + 1e-12)
            # The bounds are not vacuous: ascent comes within a factor.
            assert found > (0.4, 0.12, 0.3)[part] * limit, (k, part)


def test_few_coordinates_are_sharp():
    """Tokens at the quantiles of N(0, 1/2): the column of the middle one tends to 2 / sqrt 3."""
    n = 1001
    levels = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    Y = torch.special.ndtri(levels)[:, None] / math.sqrt(2)
    column = torch.softmax(-torch.cdist(Y, Y).square(), dim=1)[:, n // 2].sum().item()
    assert 2 / math.sqrt(3) - 1e-6 < column < column_sum(visibility(layer(), n), 1)
    assert column_sum(visibility(layer(), n), 1) == pytest.approx(2 / math.sqrt(3), rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_the_integrals_behind_few_coordinates(k: int):
    """Every constant by numerical integration, coordinate by coordinate."""
    u = torch.linspace(-12, 12, 6_001, dtype=torch.float64)
    step = (u[1] - u[0]).item()

    def g(x: Tensor) -> Tensor:
        return (4 / math.pi) ** 0.25 * torch.exp(-2 * x.square())

    plain, tilted = torch.exp(-2 / 3 * u.square()), u * torch.exp(-2 / 3 * u.square())
    totals, logs = [], []
    for H, power in ((plain, 0), (tilted, 1)):
        # c(y)^2 must be a multiple of t^(2 power) e^(-t^2), the same for every y.
        c = [
            (H * g(y - u)).sum().item() * step / (y**power * math.exp(-y * y / 2))
            for y in (0.3, 1, 2)
        ]
        assert max(c) == pytest.approx(min(c), rel=1e-9)
        totals.append(H.square().sum().item() * step / c[0] ** 2)
        w = H.square() / H.square().sum()
        nearest = max(
            (w * torch.exp(-2 * (u - y).square())).sum().item()
            for y in (0.0, math.sqrt(5 / 6), *u[::10].tolist())
        )
        logs.append(2 * (w * u.square()).sum().item() + math.log(nearest))
    # With this many tokens, the form for few coordinates is the smallest.
    others, n = totals[0] ** (k - 1), 10**9
    for causal in (False, True):
        sees = visibility(layer(causal), n)
        past = [0.0, 0.0]
        if causal:
            past = [math.log(n) + first + (k - 1) * logs[0] for first in logs]
        assert column_sum(sees, k) == pytest.approx(totals[0] * others * (1 + past[0]), rel=1e-6)
        square = totals[1] * others * (1 + past[1])
        assert column_square(sees, k) == pytest.approx(square, rel=1e-6)
        assert key_reaction(sees, k) == pytest.approx(phi_inverse(n) * square, rel=1e-6)


@pytest.mark.parametrize("n", [20, 100])
def test_a_causal_column_on_the_line_counts_the_key_once(n: int):
    """2 / sqrt 3 (1 + ln n + 3/4 + ln sqrt(2/5)): N = n - 1 queries after the key, and itself."""
    truth = 2 / math.sqrt(3) * (1 + math.log(n) + 0.75 + math.log(0.4) / 2)
    assert column_sum(visibility(layer(True), n), 1) == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_any_number_of_coordinates(causal: bool):
    """The forms without k: Cauchy-Schwarz for many queries, single weights for few."""
    n, many = 500, 10**6
    a = torch.logspace(-6, 2.6, 100_001, dtype=torch.float64)
    D = a * ((n - 1) / a).log() / (1 + a)
    phi, rooted, divided = D.max(), (D / (1 + a).sqrt()).max(), (D / (1 + a)).max()
    alpha = (2 * phi * divided).sqrt() if causal else rooted
    sees, r = visibility(layer(causal), n), 2 if causal else 1
    assert column_sum(sees, many) == pytest.approx(math.sqrt(r * n), rel=1e-9)
    assert column_square(sees, many) == pytest.approx(math.sqrt(2 * r * 499) / math.e, rel=1e-9)
    assert key_reaction(sees, many) == pytest.approx(
        math.sqrt(2 * 499) / math.e * alpha.item(), rel=1e-6
    )
    # Few tokens, and masks under which queries need not see each other: P_ij d_ij <= omega alone.
    omega = phi_inverse(2)
    assert column_square(visibility(layer(causal), 3), many) == pytest.approx(2 * omega, rel=1e-12)
    strangers = torch.eye(n).bool()
    strangers[:, 0] = True
    assert column_square(visibility(layer(mask=strangers), n), 1) == pytest.approx(
        (n - 1) * omega, rel=1e-12
    )
    assert column_square(visibility(layer(), 1), 1) == key_reaction(visibility(layer(), 1), 1) == 0
    assert column_sum(visibility(layer(), 1), 1) == pytest.approx(1)


def test_queries_that_see_each_other_in_circles_have_no_order():
    """Three queries, each sees itself and the next: `overlap` is 2, and no one is last."""
    circle = torch.eye(3).bool() | torch.eye(3).bool().roll(1, dims=1)
    assert (
        visibility(layer(mask=circle), 3).overlap == 2
        and not visibility(layer(mask=circle), 3).ordered
    )
    for f in (layer(True), layer(True, window=2), layer(mask=torch.ones(3, 3).tril().bool())):
        assert visibility(f, 3).ordered
    assert not visibility(layer(), 3).ordered


def test_who_sees_whom_is_read_from_any_mask():
    n = 6
    low = torch.ones(n, n).tril().bool()
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool()
    star = torch.eye(n).bool()
    star[:, 0] = True
    cases = [
        (layer(), 1),
        (layer(True), 2),
        (layer(True, window=3), 2),
        (layer(mask=blocks), 1),
        (layer(mask=low), 2),
    ]
    for f, overlap in [*cases, (layer(mask=star), math.inf)]:
        assert visibility(f, n).overlap == overlap
    # A key that does not see itself is one that others see all the same.
    deaf = torch.ones(n, n).bool()
    deaf[0] = False
    assert visibility(layer(mask=deaf), n).others == n - 1


def test_a_star_of_strangers_reaches_what_the_general_bound_allows():
    """Queries that see only one key and themselves: column sums of order n/2 need `overlap`."""
    n = 64
    seen = torch.eye(n).bool()
    seen[:, 0] = True
    found = columns(torch.zeros(n, 1, dtype=torch.float64), seen)[0].item()
    assert math.sqrt(2 * n) < found <= column_sum(visibility(layer(mask=seen), n), 1)


def star(centres: int) -> Tensor:
    """m tokens at 0 and m^2 at sqrt(ln m) e_j, each by itself; the last coordinate is free."""
    m, t = centres, math.sqrt(math.log(centres))
    Y = torch.zeros(m + m * m, m * m + 1, dtype=torch.float64)
    Y[m:, :-1] = t * torch.eye(m * m, dtype=torch.float64)
    return Y


def test_the_fourth_root_is_needed():
    """m tokens at one point and m^2 around it: ||P|| >= sqrt(m) / 3 - O(1/m), n = m + m^2."""
    for m in (4, 16, 64):
        # On vectors constant on each class, P is the 2 x 2 matrix below in an orthonormal basis.
        x = 1 / m
        here, there = m + m * m * x, 1 + m * x + (m * m - 1) * x * x
        sizes = torch.tensor([m, m * m], dtype=torch.float64).sqrt()
        weights = torch.tensor(
            [[1 / here, x / here], [x / there, (1 + (m * m - 1) * x * x) / there / (m * m)]]
        )
        norm = torch.linalg.matrix_norm(sizes[:, None] * weights.double() * sizes, 2).item()
        n = m + m * m
        assert math.sqrt(m) / 3 * 0.95 < norm <= math.sqrt(column_sum(visibility(layer(), n), n))
        if m == 4:
            sigma = ls.local_lipschitz(layer(k=m * m + 1), star(m)).value
            assert norm * (1 - 1e-9) <= sigma <= distance_reaction(visibility(layer(), n), n)


def plain(n: int) -> float:
    """What P_ij <= 1/2 alone gives: sqrt(1 + N/2) + 2 phi + 2 sqrt(omega N phi)."""
    phi = phi_inverse(n)
    return math.sqrt(1 + (n - 1) / 2) + 2 * phi + 2 * math.sqrt(phi_inverse(2) * (n - 1) * phi)


@pytest.mark.wide
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_ascent_on_sigma_stays_below(k: int, causal: bool):
    """The whole constant; `python -m benchmarks.l2_bounds --ascend` goes to n = 512 and k = 64."""
    for n in (3, 12):
        found, stated = largest_found(n, k, causal, steps=30), promised(n, k, causal)
        assert 0.2 * stated < found <= stated


def test_the_table_of_the_page_is_this():
    """docs/theory/bounds.md prints the table of `python -m benchmarks.l2_bounds`."""
    page = Path(__file__).parents[2].joinpath("docs/theory/bounds.md").read_text()
    section = page.split("## L2 attention\n")[1].split("\n## ")[0]
    assert table() in section
    for n in (8, 128):
        kim = distance_upper(layer(), Everywhere(n))
        assert f"| {n} | {kim:.4g} | {plain(n):.4g} |" in table()
