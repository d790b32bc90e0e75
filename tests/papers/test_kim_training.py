"""Character models by depth: what separates them, what is close, and what needs a GPU."""

from dataclasses import replace

import pytest

from lipscope.papers import kim_training
from lipscope.papers.claims import QUOTED, Kind, NotAvailable
from lipscope.papers.kim_training import (
    CLAIMS,
    COMPARED,
    judge_best_fixed,
    judge_close,
    judge_order,
    judge_stability,
    plot_curves,
    plot_stability,
    run_fixed,
    run_usual,
    separating_rates,
)
from lipscope.papers.setting import Setting

UNIGRAM = 3.0
GOOD, BAD = 2.0, None


def fixed(losses, depths=(10, 18), rates=(0.001, 0.01)):
    """Results at fixed rates: losses by variant, depth and rate; None for a training that broke."""
    plan = {
        "variants": list(COMPARED),
        "depths": list(depths),
        "rates": list(rates),
        "width": 8,
        "steps": 3,
        "batch": 2,
        "context": 8,
    }
    cells = {
        f"fixed rate/{variant}/{depth}": {
            "members": [[rate, 0] for rate in rates],
            "final": list(row),
            "curve": [{"step": 3, "test": list(row)}],
        }
        for (variant, depth), row in losses.items()
    }
    return {"settings": {"unigram_loss": UNIGRAM, "plans": {"fixed rate": plan}}, "cells": cells}


def as_in_the_paper():
    losses = {(v, d): [GOOD, GOOD] for v in COMPARED for d in (10, 18)}
    losses["dot", 18] = [GOOD, BAD]
    return losses


def test_a_rate_separates_if_dot_product_alone_fails_beyond_ten():
    losses = as_in_the_paper()
    assert separating_rates(fixed(losses), "fixed rate", 10, 18) == [0.01]
    assert judge_stability(fixed(losses), QUOTED["K7"]).kind is Kind.REPRODUCED


@pytest.mark.parametrize(
    ("place", "row"),
    [
        (("L2 tied", 18), [GOOD, BAD]),
        (("contractive", 18), [GOOD, 2.95]),
        (("dot", 10), [GOOD, BAD]),
        (("dot", 18), [GOOD, GOOD]),
    ],
)
def test_otherwise_it_does_not(place, row):
    losses = {**as_in_the_paper(), place: row}
    verdict = judge_stability(fixed(losses), QUOTED["K7"])
    assert verdict.kind is Kind.DIFFERS and "at none of the rates 0.001, 0.01" in verdict.reason


def test_best_losses_at_a_fixed_rate_are_compared():
    losses = {(v, d): [2.0 + 0.01 * d, BAD] for v in COMPARED for d in (10, 18)}
    assert judge_best_fixed(fixed(losses), QUOTED["K8"]).kind is Kind.REPRODUCED
    far = {**losses, ("contractive", 10): [2.5, BAD], ("contractive", 18): [2.6, BAD]}
    verdict = judge_best_fixed(fixed(far), QUOTED["K8"])
    assert verdict.kind is Kind.DIFFERS and "contractive 2.500 at depth 10" in verdict.reason
    lost = {**losses, ("dot", 10): [BAD, BAD], ("dot", 18): [BAD, BAD]}
    assert "every seed of dot" in judge_best_fixed(fixed(lost), QUOTED["K8"]).reason


def usual(losses):
    """Results with the usual schedule: two seeds, losses by variant at depths 2 and 6."""
    plan = {"variants": list(losses), "depths": [2, 6], "width": 8}
    plan |= {"steps": 3, "batch": 2, "context": 8}
    cells = {
        f"usual/{variant}/{depth}": {
            "members": [[0.001, 0], [0.001, 1]],
            # Learned by heart in the end: the lowest loss along training counts.
            "final": [9.0, 9.0],
            "curve": [{"test": [None, 9.0]}, {"test": [loss, loss + 0.01]}, {"test": [9.0, 9.0]}],
        }
        for variant, row in losses.items()
        for depth, loss in zip((2, 6), row, strict=True)
    }
    return {"settings": {"unigram_loss": UNIGRAM, "plans": {"usual": plan}}, "cells": cells}


AS_STATED = {
    "dot": (2.1, 2.0),
    "L2 untied": (2.1, 2.01),
    "L2 tied": (2.2, 2.05),
    "contractive": (2.6, 2.4),
}


@pytest.mark.parametrize(
    ("changed", "order", "close"),
    [
        ({}, Kind.REPRODUCED, Kind.REPRODUCED),
        ({"L2 tied": (2.3, 2.2)}, Kind.REPRODUCED, Kind.DIFFERS),
        ({"contractive": (2.3, 2.4)}, Kind.DIFFERS, Kind.REPRODUCED),
        ({"dot": (2.5, 2.2)}, Kind.DIFFERS, Kind.REPRODUCED),
    ],
)
def test_order_and_closeness(changed, order, close):
    numbers = usual({**AS_STATED, **changed})
    assert judge_order(numbers, QUOTED["K4"]).kind is order
    assert judge_close(numbers, QUOTED["K5"]).kind is close


def test_a_model_that_never_learned_has_no_curve():
    numbers = usual(AS_STATED)
    for cell in numbers["cells"].values():
        cell["curve"] = [{"step": 1, "test": point["test"]} for point in cell["curve"]]
    numbers["cells"]["usual/L2 tied/6"]["curve"] = [{"step": 1, "test": [None, None]}]
    picture = plot_curves(numbers)
    assert [line.name for line in picture.lines] == [
        "dot",
        "L2 untied (not Lipschitz)",
        "contractive",
    ]
    assert picture.rows[2] == ["L2 tied", "2.205", "inf"]
    verdict = judge_order(numbers, QUOTED["K4"])
    assert verdict.kind is Kind.DIFFERS and "contractive is ahead of L2 tied" in verdict.reason


def test_a_full_run_needs_a_gpu():
    with pytest.raises(NotAvailable, match="--device cuda"):
        run_usual(Setting(quick=False))


def test_every_variant_is_trained_once_and_drawn(monkeypatch):
    tiny = {"width": 8, "context": 8, "batch": 2, "steps": 2, "every": 1, "tested": 2}
    plans = {
        name: replace(plan, **tiny, depths=plan.depths[:1], rates=plan.rates[:1])
        for name, plan in kim_training.QUICK_PLANS.items()
    }
    monkeypatch.setattr(kim_training, "QUICK_PLANS", plans)
    setting, shares = Setting(quick=True), []
    setting.progress = lambda done, total: shares.append(done / total)
    numbers = {run: run(setting) for run in (run_usual, run_fixed)}
    assert shares[-1] == 1.0 and set(setting.used) == {"ptb_train", "ptb_test"}
    # Trained under this setting already: the cells of the table are those of the figure.
    monkeypatch.setattr(kim_training, "train_cell", None)
    for claim in CLAIMS:
        run = claim.run(setting)
        assert run["cells"] == numbers[claim.run]["cells"]
        verdict = claim.judge(run, QUOTED[claim.id])
        assert verdict.kind in (Kind.REPRODUCED, Kind.DIFFERS) and verdict.reason
        assert claim.plot(run).rows
    assert "L2 untied (not Lipschitz)" in [
        row[0] for row in CLAIMS[0].plot(run_usual(setting)).rows
    ]
    assert plot_stability(numbers[run_fixed]).columns[1:] == ["rate 0.003"]
