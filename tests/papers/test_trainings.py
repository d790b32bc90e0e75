"""Models trained together learn what each learns alone; experiments on them run end to end."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.attention_hybrids import DotScoresL2Values, L2ScoresDotValues
from benchmarks.training_figures import draw_breaking, draw_grid
from benchmarks.training_grid import keep, run_cell, settings
from benchmarks.training_page import PAGE, RESULTS, filled
from benchmarks.training_plans import PLANS, VARIANTS
from lipscope.nn.attention_layer import DotSelfAttention
from lipscope.nn.l2_attention import L2SelfAttention
from lipscope.papers.charlm.characters import CharacterText
from lipscope.papers.charlm.language_model import Architecture, CharacterLSTM, CharacterTransformer
from lipscope.papers.trainings import Plan, Stack, broke, outcomes

TEXT = CharacterText.of("to be, or not to be: that is the question. " * 9, 8)
STEPS, BATCH = 4, 3
FIXED = Plan((), (), (), steps=STEPS, batch=BATCH, warmup=0, decay=False, clip=None, every=STEPS)


def architecture(attention: str, invertible: bool = False) -> Architecture:
    return Architecture(len(TEXT.alphabet), attention, 2, 8, 2, 8, invertible)


def alone(a: Architecture, seed: int, rate: float, build=CharacterTransformer):
    """The same training spelled out, one model, torch's own Adam."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(a)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    starts = torch.randint(
        len(TEXT.learned) - a.context, (STEPS, BATCH), generator=torch.Generator().manual_seed(seed)
    )
    for row in starts:
        places = row[:, None] + torch.arange(a.context)
        loss = cross_entropy(
            model(TEXT.learned[places]).flatten(0, 1), TEXT.learned[places + 1].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("attention", "invertible", "norm"),
    [
        ("dot", False, "post"),
        ("l2", False, "none"),
        ("cosine", False, "pre"),
        ("contractive", True, "pre"),
        ("contractive-ball", True, "none"),
    ],
)
def test_a_stack_trains_each_member_as_if_it_were_alone(attention, invertible, norm):
    check_members(replace(architecture(attention, invertible), norm=norm))


def test_a_stack_trains_other_models_too():
    check_members(architecture("dot"), CharacterLSTM)


def check_members(a: Architecture, build=CharacterTransformer):
    stack = Stack(a, [3, 4], [1e-2, 1e-3], "cpu", build)
    stack.train(TEXT, replace(FIXED, clip=0.5))
    for member, (seed, rate) in enumerate(((3, 1e-2), (4, 1e-3))):
        expected = alone(a, seed, rate, build).state_dict()
        for name, weight in stack.model(member).state_dict().items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=2e-5, msg=name)


def test_the_history_is_what_each_step_saw():
    a = architecture("dot")
    stack = Stack(a, [3, 4], [1e-2, 1e-3], "cpu")
    before = stack.theta.detach().clone()
    history = stack.train(TEXT, FIXED)
    assert history.losses.shape == history.gradients.shape == history.weights.shape == (STEPS, 2)
    torch.testing.assert_close(history.weights[0], before.norm(dim=1))
    starts = torch.randint(
        len(TEXT.learned) - 8, (STEPS, BATCH), generator=torch.Generator().manual_seed(4)
    )[0]
    places = starts[:, None] + torch.arange(8)
    model = Stack(a, [4], [1e-3], "cpu").model(0)
    loss = cross_entropy(
        model(TEXT.learned[places]).flatten(0, 1), TEXT.learned[places + 1].flatten()
    )
    loss.backward()
    length = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(history.losses[0, 1], loss.detach())
    torch.testing.assert_close(history.gradients[0, 1], length)


def test_a_member_that_diverges_leaves_the_others_alone():
    a = architecture("dot")
    pair = Stack(a, [0, 1], [float("inf"), 1e-3], "cpu")
    pair.train(TEXT, FIXED)
    single = Stack(a, [1], [1e-3], "cpu")
    single.train(TEXT, FIXED)
    assert not pair.theta[0].isfinite().any()
    torch.testing.assert_close(pair.theta[1], single.theta[0], rtol=1e-3, atol=2e-5)


def test_losses_are_those_of_the_members():
    a = architecture("l2")
    stack = Stack(a, [0, 1, 2], [1e-3] * 3, "cpu")
    inputs, targets = TEXT.test_windows(4, a.context)
    together = stack.losses(stack.theta, inputs, targets)
    for member in range(3):
        logits = stack.model(member)(inputs)
        torch.testing.assert_close(
            together[member], cross_entropy(logits.flatten(0, 1), targets.flatten())
        )


@pytest.mark.parametrize(
    ("final", "curve", "expected"),
    [
        (2.0, [3.0, 2.0], False),
        (None, [3.0, None], True),
        (3.4, [3.6, 3.4], True),
        (2.6, [2.05, 2.6], True),
        (2.5, [2.05, 2.5], False),
    ],
)
def test_breaking(final, curve, expected):
    assert broke(final, curve, unigram=3.3) is expected


CELL = {
    "members": [[0.001, 0], [0.001, 1], [0.01, 0], [0.01, 1], [0.1, 0], [0.1, 1]],
    "final": [2.0, 2.2, 2.1, None, 3.25, 3.29],
    "curve": [
        {"test": [2.1, 2.3, 2.5, 2.5, 3.28, 3.3]},
        {"test": [2.0, 2.2, 2.1, None, 3.25, 3.29]},
    ],
}


def test_outcomes_are_told_by_rate():
    assert [str(end) for end in outcomes(CELL, unigram=3.3).values()] == [
        "2.100",
        "2.100, 1 broke",
        "stuck",
    ]
    assert [str(end) for end in outcomes(CELL, unigram=3.27).values()][2] == "1 broke, 1 stuck"


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
