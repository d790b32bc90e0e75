"""A few random problems of each kind, and a judge that sees what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lipscope as ls
from tests.campaigns import random_problems
from tests.campaigns.random_problems import OWN, Problem, chunk, judged
from tests.campaigns.runner import Result
from tests.test_certificates import Draw


@pytest.mark.parametrize("kind", dict.fromkeys(OWN), ids=lambda kind: kind.__name__)
def test_a_few_of_each(kind):
    result = Result()
    for seed in range(3):
        judged("", kind(Draw(seed)), result, kind.__name__)
    assert result.total()["problems"] == 3
    assert not result.faults, result.faults


def test_coarse_products_do_not_end_a_solve_early():
    """Scores so large that a residual of 0.1 was accepted: the value was 1.5 % off, status ok."""
    result = Result()
    judged("", random_problems.single_precision(Draw(32940)), result, "32940")
    assert not result.faults, result.faults


def estimate(**changes) -> ls.Estimate:
    f = ls.SelfAttention(*torch.eye(2).double().expand(3, 2, 2))
    e = ls.local_lipschitz(f, torch.zeros(3, 2).double())
    return replace(e, **{"value": 1.0, "lower": 1.0, "upper": 1.1} | changes)


WRONG = {
    "lower bound": ({"lower": 1 + 1e-12}, "outside"),
    "upper bound": ({"upper": 1 - 1e-12}, "outside"),
    "NaN for a bound": ({"upper": float("nan")}, "outside"),
    "value": ({"value": 1 - 1e-6, "lower": 1 - 1e-6}, "missed"),
    "NaN": ({"value": float("nan")}, "missed"),
    "status": ({"status": ls.Status.IMPRECISE}, "missed"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_a_fault(wrong: str):
    changes, outcome = WRONG[wrong]
    result = Result()
    judged("", Problem(lambda: estimate(**changes), 1.0, 1.0, ordinary=True), result, "here")
    assert result.total()[outcome] == 1 and len(result.faults) == 1


def test_what_is_right_is_not():
    result = Result()
    judged("", Problem(estimate, 1.0, 1.0, ordinary=True), result, "here")
    assert result.total() == {"problems": 1} and not result.faults


def test_an_exception_is_a_fault(monkeypatch):
    monkeypatch.setattr(random_problems, "SCHEDULE", [("kind", lambda draw: 1 / 0)])
    monkeypatch.setattr(random_problems, "CHUNK", 2)
    result = chunk(0)
    assert result.total() == {"exceptions": 2}
    assert "ZeroDivisionError" in result.faults[0]
