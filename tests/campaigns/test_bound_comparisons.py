"""Bounds of a few layers hold, and bounds that are too small do not."""

from __future__ import annotations

import math

import pytest
import torch

from lipscope._types import Ball, Everywhere
from tests.campaigns import bound_comparisons
from tests.campaigns.bound_comparisons import (
    LAYERS,
    audit,
    audit_layer,
    audit_network,
    compare,
    factored,
    generations,
    jacobians,
    longer,
    naive_map,
    row_sum,
    spread,
    token_norm,
    two_norm,
    weighted_norm,
)
from tests.campaigns.runner import Result
from tests.cases import problem
from tests.enclosed import LONG, Interval
from tests.naive import dense_jacobian
from tests.test_certificates import Draw
from tests.theorems import soundness


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(bound_comparisons, "BATCH", 6)
    monkeypatch.setattr(bound_comparisons, "STEPS", (0.1,))


@pytest.mark.parametrize("make", dict.fromkeys(LAYERS), ids=lambda make: make.__name__)
def test_bounds_hold(make):
    result = Result()
    for seed in (0, 2):
        audit(*make(Draw(seed)), Draw(6), result, "")
    assert result.total()["comparisons"] > 5 and not result.faults, result.faults


@pytest.mark.parametrize("check", [audit_layer, audit_network])
def test_bounds_of_layers_and_networks_hold(check):
    result = Result()
    check(Draw(3), result, "")
    assert result.total()["comparisons"] > 10 and not result.faults, result.faults


@pytest.mark.wide
def test_bounds_that_are_too_small_are_found(monkeypatch):
    right = bound_comparisons.evaluate
    monkeypatch.setattr(bound_comparisons, "evaluate", lambda *x: 0.1 * right(*x))
    result = Result()
    audit(*longer(Draw(0)), Draw(1), result, "")
    audit(*factored(Draw(0)), Draw(1), result, "")
    wrong = {name for name, row in result.counts.items() if row.get("violations")}
    assert wrong >= {"certified (2)", "input-dependent (2)", "L2 attention (2)", "compact (2)"}
    assert len(result.faults) == result.total()["violations"] > 0


def test_lower_bounds_that_are_too_large_are_found(monkeypatch):
    right = bound_comparisons.evaluate

    def wrong(bound, *where):
        return (100 if bound.kind == "lower" else 1) * right(bound, *where)

    monkeypatch.setattr(bound_comparisons, "evaluate", wrong)
    result = Result()
    audit(*longer(Draw(0)), Draw(1), result, "")
    assert result.counts["tuned gap"]["violations"] > 0


def test_a_constant_that_overflows_is_not_passed_over():
    result = Result()
    found = torch.tensor([1.0, math.nan], dtype=torch.float64)
    compare("name", 2.0, found, result, "", lambda i: Interval(LONG(i + 2), LONG(9)))
    assert result.counts["name"] == {"comparisons": 2, "enclosed": 1, "violations": 1}


def test_constants_are_those_of_the_slow_way():
    f, X = problem("causal", 3)
    batch, draw = torch.stack([X, 2 * X]), Draw(0)
    J = jacobians(naive_map(f), batch)
    for i in range(2):
        slow = dense_jacobian(f, batch[i])
        assert torch.allclose(J[i], slow, rtol=1e-12)
        assert two_norm(J)[i] == pytest.approx(torch.linalg.matrix_norm(slow, 2).item())
        assert row_sum(J)[i] == pytest.approx(slow.abs().sum(dim=1).max().item())
        tokens = soundness.measured("inf2", f, X, slow, draw.g)
        assert token_norm(J, len(X))[i] == pytest.approx(tokens, rel=0.05)
    f, X = problem("one token", 0)
    alone = torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item()
    assert weighted_norm(f, X[None], draw).item() == pytest.approx(alone)


def test_inputs_lie_in_their_domains():
    f, X = problem("gaussian", 2)
    for domain in soundness.domains(X)[1:]:
        for batch in generations(f, X, domain, Draw(0), lambda Z: Z.flatten(1).norm(dim=1)):
            back = torch.stack([soundness.inside(Y, domain) for Y in batch])
            assert (back - batch).abs().max() <= 1e-12 * batch.abs().max()
    assert spread(X, Ball(2.0, len(X)), Draw(1)).norm(dim=2).max() == pytest.approx(2.0)
    sizes = spread(X, Everywhere(len(X)), Draw(1)).flatten(1).norm(dim=1)
    assert sizes.max() > 10 * sizes.min()
