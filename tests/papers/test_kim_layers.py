"""Inverses and outputs at far tokens, and errors that turn the verdicts."""

from copy import deepcopy

import pytest
import torch

from lipscope.papers import kim_layers
from lipscope.papers.claims import QUOTED, Kind
from lipscope.papers.kim_layers import (
    blow_up_inputs,
    inverse_error,
    judge_inversion,
    judge_output_range,
    largest_sigma,
    plot_inversion,
    plot_output_range,
    run_inversion,
    run_output_range,
)
from lipscope.papers.setting import Setting


def test_the_error_of_a_linear_map_shrinks_by_its_factor():
    X = blow_up_inputs(2, 4, 3, 5.0, seed=0)
    assert X[:, 0].abs().max() == 0 and 3 < X[:, 1:].std() < 7
    for steps in (1, 3):
        # x_0 - X = c X, and each step multiplies what is left by -c.
        assert inverse_error(lambda x: -0.5 * x, X, steps) == pytest.approx(0.5 ** (steps + 1))
    assert inverse_error(lambda x: 2.0 * x, X, 3) == pytest.approx(2.0**4)


def test_the_largest_constant_of_a_batch():
    scale = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    X = torch.ones(3, 2, 2, dtype=torch.float64) * scale[:, None, None]
    assert largest_sigma(lambda x: x.square() / 2, X) == pytest.approx(3.0)


@pytest.fixture(scope="module")
def inversion():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kim_layers, "CONSTANTS", (0.9,))
        patch.setattr(kim_layers, "SIZES", (1.0, 0.0, 16.0))
        return run_inversion(Setting(quick=True))


def test_contractive_attention_is_inverted_and_dot_product_is_not(inversion):
    verdict = judge_inversion(inversion, QUOTED["K3"])
    assert verdict.kind is Kind.REPRODUCED
    near, far = inversion["rows"]
    assert near["dot sigma"] == pytest.approx(0.9, rel=0.2) and far["dot sigma"] > 20
    assert all(row["contractive sigma"] <= 0.9 for row in inversion["rows"])
    assert len(plot_inversion(inversion).lines) == 2


@pytest.mark.parametrize(("kind", "error"), [("contractive", 1e-3), ("dot", 1e-12)])
def test_another_error_turns_the_verdict(inversion, kind, error):
    planted = deepcopy(inversion)
    planted["rows"][-1][kind] = error
    assert judge_inversion(planted, QUOTED["K3"]).kind is Kind.DIFFERS


def test_the_range_of_outputs_follows_the_values(monkeypatch):
    plan = kim_layers.QUICK_PLAN
    monkeypatch.setattr(
        kim_layers, "QUICK_PLAN", type(plan)(**{**plan.__dict__, "steps": 3, "depths": (1,)})
    )
    monkeypatch.setattr(kim_layers, "SIZES", (1.0, 0.0, 64.0))
    setting = Setting(quick=True)
    numbers = run_output_range(setting)
    assert set(setting.used) == {"ptb_train", "ptb_test"}
    assert len(numbers["rows"]) == 2 * 2
    for row in numbers["rows"]:
        assert row["deviation"] <= row["values"]
    assert judge_output_range(numbers, QUOTED["K6"]).kind is Kind.DIFFERS
    assert len(plot_output_range(numbers).lines) == 2


def test_outputs_as_the_paper_has_them_are_accepted():
    def row(variant, spread):
        shared = {"size": 64.0, "layer": 0, "loss": 2.0, "sigma": 1.0, "values": 1.0}
        return {**shared, "variant": variant, "range": spread, "deviation": spread}

    numbers = {"rows": [row("dot", 5.0), row("L2 tied", 1.1)], "unigram": 3.0}
    verdict = judge_output_range(numbers, QUOTED["K6"])
    assert verdict.kind is Kind.REPRODUCED and "1.1 to 5 times ||O V||" in verdict.reason
    assert judge_output_range({**numbers, "unigram": 1.9}, QUOTED["K6"]).kind is Kind.DIFFERS
