"""L2 attention between its bound and the worst inputs; errors that turn the verdicts."""

import math
from copy import deepcopy

import pytest
import torch

from lipscope.papers import kim_bounds
from lipscope.papers.claims import QUOTED, Kind
from lipscope.papers.kim_bounds import (
    judge_looseness,
    judge_rates,
    judge_tightness,
    judge_unbounded,
    row_sum,
    run_looseness,
    run_rates,
    run_tightness,
    run_unbounded,
    second_power,
    two_sides,
    unit_layer,
)
from lipscope.papers.setting import Setting

QUICK = Setting(quick=True)


def attention(x):
    """L2 attention with unit weights, written out: x [N]."""
    P = (-(x[:, None] - x[None]).square()).softmax(dim=1)
    return P @ x


def dense(X):
    return torch.func.jacrev(attention)(X[:, 0])


def test_the_row_sum_of_the_ascent_is_that_of_the_jacobian():
    y = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for one, value in zip(y, row_sum(y), strict=True):
        J = dense(torch.cat([torch.zeros(1, dtype=torch.float64), one])[:, None])
        assert value.item() == pytest.approx(J[0].abs().sum().item())


@pytest.mark.parametrize("N", [3, 51, 201])
def test_the_closed_form_is_attained_on_two_sides(N):
    bound = unit_layer().lipschitz_bound(N, math.inf)
    x = kim_bounds.mean_distance(bound)
    assert x * math.exp(x + 1) == pytest.approx(N - 1, rel=1e-9)
    J = dense(two_sides(N, x))
    assert J.abs().sum(dim=1).max().item() == pytest.approx(4 * x + (1 - x) / (1 + x))


@pytest.fixture(scope="module")
def tightness():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kim_bounds, "QUICK_LENGTHS", (3, 31))
        return run_tightness(QUICK)


def test_the_bound_is_tight_for_the_largest_coordinate(tightness):
    verdict = judge_tightness(tightness, QUOTED["K1"])
    assert verdict.kind is Kind.REPRODUCED and verdict.interval[0] > 0.8
    # Nothing of a start is lost: the best is at least the fifth, and what was found by others.
    for row in tightness["rows"]:
        assert row["fifth"] <= row["best"] * (1 + 1e-9)
    assert tightness["rows"][0]["two sides"] == pytest.approx(0.804 * 3, rel=0.1)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_bound_off_by_two_turns_the_verdict(tightness, factor):
    planted = deepcopy(tightness)
    for row in planted["rows"]:
        row["bound"] *= factor
    assert judge_tightness(planted, QUOTED["K1"]).kind is Kind.DIFFERS


def test_the_second_power_is_too_small():
    found = second_power(3.0)
    # By a dense Jacobian of the layer as the paper writes it, and by its formula.
    assert found["sigma"] == pytest.approx(17.369, abs=1e-2)
    assert found["fourth"] == pytest.approx(44.462, abs=1e-2)
    assert found["second"] == pytest.approx(14.821, abs=1e-2)
    assert second_power(1.0)["sigma"] < second_power(1.0)["second"]


@pytest.mark.wide
def test_in_norm_2_the_bound_is_loose(monkeypatch):
    monkeypatch.setattr(kim_bounds, "STARTS", 6)
    monkeypatch.setattr(kim_bounds, "QUICK_LENGTHS", (3, 21))
    numbers = run_looseness(QUICK)
    assert judge_looseness(numbers, QUOTED["K2"]).kind is Kind.REPRODUCED
    for row in numbers["rows"]:
        assert max(row["best"], row["two sides"]) <= row["sharper"] <= row["bound"]
    planted = deepcopy(numbers)
    planted["rows"][-1]["bound"] = 0.9 * planted["rows"][-1]["best"]
    assert judge_looseness(planted, QUOTED["K2"]).kind is Kind.DIFFERS


@pytest.mark.wide
def test_dot_product_grows_like_the_square_of_the_radius():
    numbers = run_unbounded(QUICK)
    verdict = judge_unbounded(numbers, QUOTED["K9"])
    assert verdict.kind is Kind.REPRODUCED and verdict.interval[0] == pytest.approx(2, abs=0.05)
    for head in numbers["heads"]:
        for row in head["rows"]:
            assert row["entry"] <= min(row["1"], row["2"], row["inf"]) * (1 + 1e-9)
    planted = deepcopy(numbers)
    for row in planted["heads"][1]["rows"]:
        row["entry"] = 7.0 + row["R"]
    assert judge_unbounded(planted, QUOTED["K9"]).kind is Kind.DIFFERS


def test_untied_keys_have_no_constant():
    for row in kim_bounds.untied_rows():
        assert row["tied"] <= row["bound"]
    assert row["untied"] > 1e6 * row["bound"]


def test_the_rates_of_both_bounds():
    numbers = run_rates(QUICK)
    assert judge_rates(numbers, QUOTED["K10"]).kind is Kind.REPRODUCED
    for N in (16, 256):
        row = next(row for row in numbers["rows"] if row["N"] == N)
        assert row["bound"] == pytest.approx(math.sqrt(N) * row["inf"])
    planted = deepcopy(numbers)
    for row in planted["rows"]:
        row["bound"] *= row["N"] ** 0.25
    assert judge_rates(planted, QUOTED["K10"]).kind is Kind.DIFFERS


def test_every_claim_has_a_figure(tightness):
    picture = kim_bounds.plot_tightness(tightness)
    assert [len(line.x) for line in picture.lines] == [2] * 5
    rates = kim_bounds.plot_rates(run_rates(QUICK))
    assert {line.name for line in rates.lines} == {
        "paper, norm inf",
        "paper, norm 2",
        "lipscope, norm 2",
    }
