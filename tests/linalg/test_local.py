"""local_lipschitz: one function for tokens and measures, with and without splitting."""

import pytest
import torch

import lipscope as ls
from lipscope.linalg.local import local_lipschitz, too_large
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


def test_exact_precision_on_a_measure_recomputes_in_float64():
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
    # While tests run, a checker of types speaks first.
    with pytest.raises(ls.UserError, match=r"X must be a tensor of tokens|X must be a Tensor or a"):
        local_lipschitz(f, torch.zeros(2, 3).numpy())


def test_exact_precision_at_tokens_recomputes_in_float64():
    f, X = problem("multi-head, projected", 2)
    single = ls.local_lipschitz(f.to(torch.float32), X.float())
    exact = ls.local_lipschitz(f.to(torch.float32), X.float(), precision="exact", gap=1e-3)
    assert single.confidence == 0 and exact.confidence > 0.99 and exact.upper / exact.lower <= 1.001
    assert (
        single.value == pytest.approx(exact.value, rel=1e-4) and exact.right.dtype == torch.float64
    )


def test_exact_precision_of_a_module_leaves_it_alone():
    model = torch.nn.Linear(4, 4)
    e = ls.local_lipschitz(model, torch.randn(3, 4), precision="exact")
    assert e.value == pytest.approx(
        torch.linalg.matrix_norm(model.weight.detach().double(), 2).item(), rel=1e-12
    )
    assert model.weight.dtype == torch.float32


def test_exact_precision_of_a_lambda_is_refused_with_the_remedy():
    with pytest.raises(ls.UserError, match="convert its tensors and X to float64"):
        ls.local_lipschitz(lambda X: X, torch.randn(3, 4), precision="exact")


def test_unknown_precision():
    with pytest.raises(ls.UserError, match="'native'"):
        ls.local_lipschitz(torch.sin, torch.zeros(3, 4), precision="high")


def test_estimates_print_their_certificate():
    text = repr(ls.local_lipschitz(*problem("gaussian", 0)))
    assert "confidence 0.999999999" in text and ("converged" in text or "breakdown" in text)


def test_infinity_norm_is_the_largest_row_sum():
    f, X = problem("multi-head, projected", 2)
    dense = ls.jacobian(f, X).to_dense()
    e = ls.local_lipschitz(f, X, norm="inf")
    assert e.value == pytest.approx(dense.abs().sum(dim=1).max().item(), rel=1e-12)
    with pytest.raises(ls.UserError, match="norm must be '2' or 'inf'"):
        ls.local_lipschitz(f, X, norm="1")


def test_too_many_tokens_are_told_how_many_could_fit():
    """30 GiB held and 20 more asked for, of 40: of 1000 tokens no more than 800 have a chance."""
    X = torch.zeros(2, 500, 8)
    said = too_large(
        X, "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has", 30 << 30, 40 << 30
    )
    assert said.startswith(
        "1000 tokens of size 8 need more than the 40 GiB of cpu: fewer than 801 could fit"
    )
    assert "basis='host'" in said
    assert "could fit" not in too_large(X, "no number here", 30 << 30, 40 << 30)
