"""local_lipschitz at tokens and measures, and the infinity-norm against dense Jacobians."""

import math

import pytest
import torch

import lipscope as ls
from lipscope.linalg import local
from lipscope.linalg.local import infinity_norm, local_lipschitz, too_large
from lipscope.mean_field.measures import DiscreteMeasure
from tests.cases import KINDS, problem
from tests.checks import dense_operator
from tests.mean_field.weighted import dense_derivative, line, norm, one_head, random_case
from tests.naive import dense_jacobian


@pytest.mark.parametrize("kind", ["gaussian", "causal", "biases", "L2"])
def test_tokens_and_their_uniform_measure_have_one_constant(kind):
    f, X = problem(kind, 2)
    truth = ls.local_lipschitz(f, X).value
    assert local_lipschitz(f, X).value == pytest.approx(truth, rel=1e-9)
    assert local_lipschitz(f, DiscreteMeasure.uniform(X, f.causal)).value == pytest.approx(
        truth, rel=1e-9
    )
    assert local_lipschitz(f, X, splitting=True).value >= truth * (1 - 1e-9)


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
    with pytest.raises(ls.UserError, match="norm must be '2' or 'inf'"):
        local_lipschitz(f, line([0.0]), norm="1")
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


def test_estimates_print_their_certificate():
    text = repr(ls.local_lipschitz(*problem("gaussian", 0)))
    assert "confidence 0.999999999" in text and ("converged" in text or "breakdown" in text)


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


@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_dense_jacobian(kind: str):
    f, X = problem(kind, 3)
    J = dense_jacobian(f, X)
    exact = J.abs().sum(dim=1).max().item()
    e = infinity_norm(ls.jacobian(f, X))
    assert e.status is ls.Status.CONVERGED and e.confidence == 1.0
    assert e.lower <= exact <= e.upper
    assert abs(e.value - exact) <= 1e-9 * exact
    assert e.right.abs().eq(1).all() and e.left.sum() == 1
    assert (ls.jacobian(f, X).mv(e.right) * e.left).sum().item() == pytest.approx(exact, rel=1e-9)


def test_members_of_a_batch_are_apart(monkeypatch):
    monkeypatch.setattr(local, "BLOCK", 100)  # several blocks of rows
    f, X = problem("causal", 1)
    batch = torch.stack([X, 2 * X, X.flip(0)])
    e = infinity_norm(ls.jacobian(f, batch))
    alone = [infinity_norm(ls.jacobian(f, x)).value for x in batch]
    assert e.value.tolist() == pytest.approx(alone, rel=1e-12)


def test_a_map_without_closed_form():
    torch.manual_seed(0)
    W = torch.randn(5, 3, dtype=torch.float64)
    X = torch.randn(2, 3, dtype=torch.float64)
    e = infinity_norm(ls.jacobian(lambda x: torch.tanh(x @ W.T), X))
    J = torch.autograd.functional.jacobian(lambda x: torch.tanh(x @ W.T), X).reshape(10, 6)
    assert e.value == pytest.approx(J.abs().sum(1).max().item(), rel=1e-12)


def test_a_derivative_that_is_not_finite_is_said_so():
    M = torch.eye(3, dtype=torch.float64)
    M[1, 2] = math.nan
    e = infinity_norm(dense_operator(M))
    assert e.status is ls.Status.NON_FINITE and e.upper == math.inf and e.lower == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cancelling_heads_in_low_precision_are_taken_in_float64(dtype):
    g = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(3, 3, generator=g).to(dtype) for _ in range(3))
    near = (Q + 1e-2 * torch.randn(3, 3, generator=g)).to(dtype)
    O = torch.cat([torch.eye(3), -torch.eye(3)], dim=1).to(dtype)
    f = ls.SelfAttention(torch.cat([Q, near]), torch.cat([K, K]), torch.cat([V, V]), O, heads=2)
    X = torch.randn(5, 3, generator=g).to(dtype)
    truth = dense_jacobian(f.double(), X.double()).abs().sum(dim=1).max().item()
    e = ls.local_lipschitz(f, X, norm="inf")
    assert e.lower <= truth <= e.upper <= e.lower * (1 + 1e-8) and e.right.dtype == dtype
    # An operator in low precision alone has no statement about its rounding.
    e = infinity_norm(ls.jacobian(f, X))
    assert e.lower == 0 and e.upper == math.inf and e.confidence == 0 and "float64" in e.note


def test_every_row_near_the_top_is_measured():
    """The second row is the largest, and loses more by rounding than the first one leads by."""
    y = torch.tensor([[1.2345678]], dtype=torch.float64)
    below = y.item() * (1 - 2e-9)

    def f(x):
        return torch.cat([2 * below * x, ((x + 1e9) - 1e9) ** 2], dim=1)

    e = ls.local_lipschitz(f, y, norm="inf")
    assert e.lower <= 2 * y.item() <= e.upper
