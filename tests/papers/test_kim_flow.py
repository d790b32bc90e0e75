"""The residual flow on pairs: its density against dense determinants and integrals."""

import math

import pytest
import torch

from lipscope.nn import ContractiveL2Attention, DotSelfAttention
from lipscope.papers.claims import QUOTED, Kind
from lipscope.papers.kim_flow import (
    PairFlow,
    draw_pairs,
    gaussian_log_density,
    integral,
    judge_flow,
    layer_mass,
    plot_flow,
    run_flow,
    true_log_density,
)
from lipscope.papers.setting import Setting


def test_the_true_density_has_mass_one_and_the_drawn_moments():
    assert integral(lambda x: true_log_density(x).exp(), 401) == pytest.approx(1, abs=1e-9)
    x = draw_pairs(20_000, torch.Generator().manual_seed(0))[..., 0]
    h, m = (x[:, 0] - x[:, 1]) / 2, (x[:, 0] + x[:, 1]) / 2
    assert h.abs().mean().item() == pytest.approx(1, abs=0.01)
    assert m.std().item() == pytest.approx(0.5, abs=0.01)
    gaussian = gaussian_log_density(x[..., None], x[..., None])
    gain = (true_log_density(x[..., None]) - gaussian).mean().item()
    assert 0.6 < gain < 0.8


def test_the_log_density_is_that_of_the_whole_map():
    torch.manual_seed(0)
    flow = PairFlow(attention=True).double()
    torch.nn.init.normal_(flow.scale, std=0.2)

    def z(x):
        for scale, part in zip(flow.scale, flow.parts, strict=False):
            x = part(x[None] * scale.exp())[0]
        return x * flow.scale[-1].exp()

    for x in draw_pairs(4, torch.Generator().manual_seed(1)):
        J = torch.func.jacrev(z)(x).reshape(2, 2)
        expected = torch.linalg.slogdet(J).logabsdet - z(x).square().sum() / 2
        expected = expected - math.log(2 * math.pi)
        torch.testing.assert_close(flow.log_density(x[None])[0], expected)


def test_a_contraction_keeps_its_mass_and_dot_product_does_not():
    assert layer_mass(ContractiveL2Attention(1, 1, 0.5).double(), 2.0) == pytest.approx(1, abs=1e-6)
    assert layer_mass(DotSelfAttention(1, 1).double(), 2.0) > 1.4
    # With weights near 0 dot product averages, and x + g(x) is one-to-one.
    assert layer_mass(DotSelfAttention(1, 1).double(), 1e-3) == pytest.approx(1, abs=1e-3)


def measured():
    """Numbers as a run gives them."""
    gains = {"true density": 0.7, "Gaussian": 0.0, "no attention": 0.0, "contractive L2": 0.16}
    return {
        "rows": {name: {"gain": gain, "error": 0.01} for name, gain in gains.items()},
        "mass": 1.0,
        "layers": [{"weight": 2.0, "dot product": 1.4, "contractive L2": 1.0}],
        "inverse error": 1e-16,
        "log det off": 0.5,
    }


@pytest.mark.slow
def test_the_flow_is_a_density_that_learns():
    numbers = run_flow(Setting(quick=True))
    verdict = judge_flow(numbers, QUOTED["A1"])
    assert verdict.kind is Kind.REPRODUCED and verdict.interval[0] > 0.05
    assert (
        numbers.keys() == measured().keys() and numbers["rows"].keys() == measured()["rows"].keys()
    )


def test_the_verdict_and_the_figure_of_such_numbers():
    verdict = judge_flow(measured(), QUOTED["A1"])
    assert verdict.kind is Kind.REPRODUCED and verdict.interval == pytest.approx((0.14, 0.18))
    assert [line.name for line in plot_flow(measured()).lines] == ["dot product", "contractive L2"]


@pytest.mark.parametrize(
    ("name", "value"), [("mass", 1.1), ("inverse error", 0.1), ("log det off", 2.0)]
)
def test_a_wrong_density_turns_the_verdict(name, value):
    assert judge_flow({**measured(), name: value}, QUOTED["A1"]).kind is Kind.DIFFERS


def test_a_flow_better_than_the_truth_is_refused():
    planted = measured()
    planted["rows"]["contractive L2"]["gain"] = 0.9
    assert judge_flow(planted, QUOTED["A1"]).kind is Kind.DIFFERS
