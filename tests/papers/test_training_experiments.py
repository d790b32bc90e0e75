"""The experiments on training run end to end, and their layers and records match their names."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.attention_hybrids import DotScoresL2Values, L2ScoresDotValues
from benchmarks.training_figures import draw_breaking, draw_grid
from benchmarks.training_grid import keep, run_cell, settings
from benchmarks.training_page import PAGE, RESULTS, filled
from benchmarks.training_plans import PLANS, VARIANTS
from lipscope.nn.attention_layer import DotSelfAttention
from lipscope.nn.l2_attention import L2SelfAttention
from lipscope.papers.charlm.characters import CharacterText

TEXT = CharacterText.of("to be, or not to be: that is the question. " * 9, 8)
QUICK = {
    "depths": (1,),
    "width": 8,
    "heads": 2,
    "context": 8,
    "batch": 2,
    "steps": 3,
    "seeds": 2,
    "every": 2,
}


@pytest.mark.wide
def test_every_plan_and_variant_reaches_the_page(tmp_path):
    plans = {
        name: replace(plan, **QUICK, rates=plan.rates[:2], tested=2) for name, plan in PLANS.items()
    }
    assert {variant for plan in plans.values() for variant in plan.variants} == set(VARIANTS)
    cells = {
        f"{name}/{variant}/1": run_cell(plan, VARIANTS[variant], 1, TEXT, "cpu")
        for name, plan in plans.items()
        for variant in plan.variants
    }
    keep(
        tmp_path / "results.json",
        {"settings": settings(TEXT, plans, "cpu"), "cells": cells, "bigram_loss": TEXT.bigram_loss},
    )
    results = json.loads((tmp_path / "results.json").read_text())
    page = filled(PAGE.read_text(), results)
    assert "not run" not in page.split("## Test loss")[1].split("## What is missing")[0]
    assert len(draw_breaking(results).axes) == sum(not plan.decay for plan in plans.values())
    draw_grid(results).savefig(tmp_path / "grid.png")
    assert results["cells"]["grid/invertible/1"]["inverse_error"]["0"] < 1e-5
    assert not results["cells"]["no norm/invertible/1"]["inverse_error"]


def test_the_results_kept_are_of_the_experiment_as_it_is_planned():
    found = json.loads(RESULTS.read_text())["settings"]["plans"]
    planned = json.loads(json.dumps({name: asdict(plan) for name, plan in PLANS.items()}))
    assert found and found.items() <= planned.items()


def twin(hybrid, layer):
    """The layer with the hybrid's weights, as far as it has them."""
    layer.load_state_dict({name: hybrid.state_dict()[name] for name in layer.state_dict()})
    return layer


@pytest.mark.parametrize(
    ("hybrid", "scores", "values"),
    [
        (DotScoresL2Values, DotSelfAttention, L2SelfAttention),
        (L2ScoresDotValues, L2SelfAttention, DotSelfAttention),
    ],
)
def test_a_hybrid_has_the_scores_of_one_and_the_values_of_the_other(hybrid, scores, values):
    torch.manual_seed(0)
    layer, X = hybrid(8, 2).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    P = twin(layer, scores(8, 2, True).double()).weights(X)
    other = values(8, 2, True).double()
    other.load_state_dict({**other.state_dict(), **layer.state_dict()}, strict=False)
    expected = layer.out((P @ other.project(X)[2]).transpose(-3, -2).flatten(-2))
    torch.testing.assert_close(layer(X), expected)
    assert math.isinf(layer.lipschitz_bound(5))
