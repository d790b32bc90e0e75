"""One function for tokens and measures, with and without splitting."""

import pytest
import torch

import lipscope as ls
from lipscope.mean_field.local import local_lipschitz
from lipscope.mean_field.measures import DiscreteMeasure
from tests.cases import problem
from tests.mean_field.weighted import dense_derivative, line, norm, one_head, random_case


@pytest.mark.parametrize("kind", ["gaussian", "causal", "biases", "L2"])
def test_tokens_and_their_uniform_measure_have_one_constant(kind):
    f, X = problem(kind, 2)
    truth = ls.local_lipschitz(f, X).value
    assert local_lipschitz(f, X).value == pytest.approx(truth, rel=1e-9)
    assert local_lipschitz(f, DiscreteMeasure.uniform(X, f.causal)).value == pytest.approx(
        truth, rel=1e-9
    )
    assert local_lipschitz(f, X, splitting=True).value >= truth * (1 - 1e-9)


def test_any_map_and_batches_are_passed_on():
    X = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert local_lipschitz(lambda Z: 2 * Z, X).value.tolist() == pytest.approx([2.0] * 3)


def test_weights_and_splitting_are_certified():
    f, mu = random_case(7)
    e = local_lipschitz(f, mu, gap=1e-4, solver=ls.Solver(seed=0))
    assert (
        e.lower <= norm(dense_derivative(f, mu)) <= e.upper <= 1.0001 * e.lower
        and e.confidence > 0.999
    )
    e = local_lipschitz(one_head(-1.0), line([0.0, 4.0]), splitting=True, solver=ls.Solver(seed=0))
    assert (
        e.value == pytest.approx(4.0, abs=1e-9)
        and e.lower <= 4.0 <= e.upper
        and e.confidence == pytest.approx(1 - 1e-9, abs=1e-15)
    )


def test_exact_precision_recomputes_in_float64():
    f, mu = random_case(3)
    small = ls.SelfAttention(f.Q.float(), f.K.float(), f.V.float(), kernel=f.kernel)
    coarse = DiscreteMeasure(mu.points.float(), mu.weights.float())
    truth = norm(dense_derivative(small.double(), coarse.double()))
    assert local_lipschitz(small, coarse, precision="exact").value == pytest.approx(truth, rel=1e-9)
    assert local_lipschitz(small, coarse).upper == float("inf")


def test_what_cannot_be_is_refused():
    f = one_head(1.0)
    with pytest.raises(ls.UserError, match="must be a SelfAttention"):
        local_lipschitz(torch.nn.Linear(1, 1), line([0.0]))
    with pytest.raises(ls.UserError, match="precision must be"):
        local_lipschitz(f, line([0.0]), precision="high")
    with pytest.raises(ls.UserError, match=r"points must be a tensor \[n, d\]"):
        local_lipschitz(f, torch.zeros(2, 3, 1, dtype=torch.float64), splitting=True)
