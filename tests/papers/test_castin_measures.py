"""Measures, flows and open questions: each verdict by a run, and judges that can say no."""

import math

import pytest
import torch

from lipscope.mean_field.measures import DiscreteMeasure
from lipscope.papers import castin_measures
from lipscope.papers.castin_measures import (
    judge_clusters,
    judge_copies,
    judge_depth,
    judge_end_of_root,
    judge_features,
    judge_masked,
    judge_near_equality,
    judge_plans,
    judge_split_attack,
    judge_where_split,
    judge_which_split,
)
from lipscope.papers.claims import QUOTED, Quoted
from lipscope.papers.running import reproduce_papers

NOTHING = Quoted("")


@pytest.mark.parametrize("id", ["S6", "S8", "S9", "S10", "V1", "V2", "V4", "V5", "V6", "N3"])
def test_statements_that_hold(id):
    (outcome,) = reproduce_papers(only=[id], quick=True)
    assert outcome.word == "REPRODUCED", outcome.verdict or outcome.error
    plot = outcome.claim.plot
    assert plot is None or plot(outcome.record.numbers).lines


def test_the_bound_under_a_mask_differs_with_its_counterexample():
    (outcome,) = reproduce_papers(only=["S7"], quick=True)
    assert outcome.word == "DIFFERS" and "1.63" in outcome.verdict.reason
    hardy = torch.tril(torch.ones(100, 100)).double() / torch.arange(1, 101)[:, None]
    (row,) = [r for r in outcome.record.numbers["rows"] if (r["n"], r["p"]) == (100, 2)]
    assert row["constant"] == pytest.approx(torch.linalg.matrix_norm(hardy, 2).item(), rel=1e-9)
    assert "0 of the 9 violations are in d_∞" in outcome.verdict.reason
    assert "exceeded in 0 of 9 cases" in outcome.verdict.reason
    far = [r | {"constant": 1.4} if r["p"] == 4 else r for r in outcome.record.numbers["rows"]]
    reason = judge_masked(outcome.record.numbers | {"rows": far}, NOTHING).reason
    assert "exceeded in 3 of 9 cases" in reason  # 4 / 3 is the bound there
    fixed = {"rows": outcome.record.numbers["rows"], "claimed": 20.0}
    assert judge_masked(fixed, NOTHING).holds


def test_planted_a_distance_by_index_in_place_of_the_optimal_plan_turns_a_verdict(monkeypatch):
    def by_index(mu: DiscreteMeasure, nu: DiscreteMeasure) -> float:
        return math.sqrt((mu.points - nu.points).square().sum(1).mean().item())

    monkeypatch.setattr(castin_measures, "wasserstein", by_index)
    (outcome,) = reproduce_papers(only=["S6"], quick=True)
    assert outcome.word == "DIFFERS"


def test_judges_can_say_no():
    plan = {"optimal": 1.0, "brute force": 1.0, "by index": 2.0, "quotient": 1.0, "bound": 3.0}
    assert judge_plans({"rows": [plan]}, NOTHING).holds
    assert not judge_plans({"rows": [plan | {"quotient": 4.0}]}, NOTHING).holds
    slow = {"layers": [8, 16, 32, 64], "errors": [1.0, 0.7, 0.5, 0.36]}
    assert not judge_depth(slow, QUOTED["S8"]).holds
    row = {"tokens": 9, "clusters": 3, "clear": True, "vertices": 3, "spread": [2.0, 1.0]}
    assert judge_clusters({"rows": [row]}, NOTHING).holds
    assert not judge_clusters({"rows": [row | {"clear": False}]}, NOTHING).holds
    assert not judge_clusters({"rows": [row | {"spread": [1.0, 2.0]}]}, NOTHING).holds
    late = {"rows": [row], "blow-up": 1.9, "predicted blow-up": 2.0}
    assert not judge_clusters(late, NOTHING).holds
    far = {"R": [1.0, 2.0], "sigma": [4.0, 20.0], "formula": [1.0, 10.0]}
    assert not judge_near_equality(far, NOTHING).holds
    pair = {"whole": 3.0, "split": 4.0, "by transport": 4.0}
    assert judge_split_attack(pair, NOTHING).holds
    assert not judge_split_attack(pair | {"by transport": 3.5}, NOTHING).holds
    assert not judge_where_split({"shares": [0.08, 0.02], "largest": 2.0}, NOTHING).holds
    copies = {"1": 3.0, "2": 4.0, "3": 4.0, "8": 4.0, "theorem": 4.0}
    assert judge_copies({"rows": [copies]}, NOTHING).holds
    assert not judge_copies({"rows": [copies | {"8": 4.1}]}, NOTHING).holds
    maps = [{"map": "A = I", "equal": 1.0, "free": 1.2}, {"map": "L2", "equal": 1.0, "free": 1.0}]
    assert judge_which_split({"rows": maps}, NOTHING).holds
    assert not judge_which_split({"rows": [maps[0], maps[1] | {"free": 1.01}]}, NOTHING).holds
    words = {"rows": [{"guided": 1.2, "projected": 1.01, "random": 1.1}], "layer": 3}
    assert judge_features(words, NOTHING).holds
    words["rows"][0]["projected"] = 1.15
    carried = judge_features(words, NOTHING)
    assert not carried.holds and "by projection too" in carried.reason
    assert not judge_features(
        {"rows": [dict.fromkeys(words["rows"][0], 1.0)], "layer": 3}, NOTHING
    ).holds
    ends = [{"R": R, "predicted": 10.0**R, "reached": 10 ** (R / 2)} for R in (1, 2, 3)]
    assert not judge_end_of_root({"rows": ends}, NOTHING).holds
