"""Products that use few digits of attention, and leave everything else as it is."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import lipscope as ls
from lipscope.fused.primitive import attend, graph_of_any_digits


def layer(x: torch.Tensor) -> torch.Tensor:
    q, k, v = x.unflatten(-1, (2, 8)).transpose(-3, -2), x.sin()[None], x.cos()[None]
    return x + attend(q, k[..., :8], v[..., :8], causal=True).transpose(-3, -2).flatten(-2)


def operator(dtype: torch.dtype) -> tuple[ls.LinearOperator, ls.LinearOperator, torch.Tensor]:
    X = torch.randn(40, 16, generator=torch.Generator().manual_seed(0), dtype=dtype)
    with graph_of_any_digits() as digits:
        J = ls.jacobian(layer, X)
    exact = replace(J, mv=digits.exact(J.mv), rmv=digits.exact(J.rmv))
    return (
        exact,
        replace(J, mv=digits.in_low_precision(J.mv), rmv=digits.in_low_precision(J.rmv)),
        X,
    )


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("product", ["mv", "rmv"])
def test_rough_products_are_rough_and_exact_ones_stay_exact(product):
    exact, rough, X = operator(torch.float32)
    truth, E = ls.jacobian(layer, X.double()), torch.randn_like(X)
    expected = getattr(truth, product)(E.double())
    assert 1e-4 < distance(getattr(rough, product)(E).double(), expected) < 1e-2
    assert distance(getattr(exact, product)(E).double(), expected) < 1e-6
    assert getattr(rough, product)(E).dtype == torch.float32


def test_float64_has_no_rough_products():
    exact, rough, X = operator(torch.float64)
    E = torch.randn_like(X)
    assert torch.equal(rough.mv(E), exact.mv(E)) and torch.equal(rough.rmv(E), exact.rmv(E))


def test_threads_that_share_a_graph_get_the_digits_they_ask_for():
    exact, rough, X = operator(torch.float32)
    E = torch.randn_like(X)
    few, all_ = rough.mv(E), exact.mv(E)
    with ThreadPoolExecutor(4) as pool:
        for i, y in enumerate(pool.map(lambda i: (exact, rough)[i % 2].mv(E), range(200))):
            assert distance(y, (all_, few)[i % 2]) < 1e-6


def test_the_value_is_that_of_the_exact_operator():
    exact, rough, X = operator(torch.float32)
    e = ls.spectral_norm(replace(exact, low_precision=rough), tol=1e-3, solver=ls.Solver(seed=0))
    truth = torch.linalg.svdvals(ls.jacobian(layer, X.double()).to_dense())[0]
    assert e.value == pytest.approx(float(truth), rel=1e-5) and e.status.ok


def test_a_graph_is_exact_between_its_products():
    """Whoever holds part of it, after a rough product and after one that failed."""
    X, kept = torch.randn(40, 16), []

    def keeping(x: torch.Tensor) -> torch.Tensor:
        kept.append((x, layer(x)))
        return kept[-1][1]

    with graph_of_any_digits() as digits:
        J = ls.jacobian(keeping, X)
    assert digits.used
    (x, y), truth = kept[0], ls.jacobian(layer, X.double()).rmv(X.double())
    rough = digits.in_low_precision(J.rmv)
    for E in (X, X[:3]):
        with nullcontext() if E is X else pytest.raises(ls.UserError, match="shape"):
            rough(E)
        (back,) = torch.autograd.grad(y, x, X, retain_graph=True)
        assert distance(back.double(), truth) < 1e-6


def test_products_inside_products_have_the_digits_they_ask_for():
    exact, rough, X = operator(torch.float32)
    expected, inner = exact.mv(X), []
    with graph_of_any_digits() as digits:
        J = ls.jacobian(layer, X)

    def outer(E: torch.Tensor) -> torch.Tensor:
        inner.append(digits.exact(J.mv)(E))
        return J.mv(E)

    assert distance(digits.in_low_precision(outer)(X), rough.mv(X)) < 1e-6
    assert distance(inner[0], expected) < 1e-6


def test_a_graph_without_attention_has_nothing_to_choose():
    with graph_of_any_digits() as digits:
        ls.jacobian(torch.sin, torch.randn(4, 3))
    assert not digits.used
