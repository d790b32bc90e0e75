"""Low-precision products against float64: all rows of short sequences, some of long ones."""

import pytest
import torch

import lipscope as ls
from lipscope.attention.float64_check import ROWS, _rows, compare
from tests.cases import KINDS, problem

ORDINARY = [kind for kind in KINDS if "huge" not in kind and "tiny" not in kind]


def exact_product(f: ls.SelfAttention, X: torch.Tensor, E: torch.Tensor) -> torch.Tensor:
    return ls.jacobian(f.double(), X.double()).mv(E.double())


@pytest.mark.parametrize("kind", ORDINARY)
def test_every_row_of_a_short_sequence_is_that_of_float64(kind):
    f, X = problem(kind, 0)
    f, X = f.to(torch.float32), X.float()
    E = torch.randn(X.shape, generator=torch.Generator().manual_seed(1))
    exact = exact_product(f, X, E)
    off = 1e-3 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(2)).double()
    seen = compare(f, X[None], apart=False, basis=None)(E, exact + off, 0)
    assert seen.item() == pytest.approx(off.norm().item(), rel=1e-6, abs=1e-9 * exact.norm().item())


def test_each_head_alone():
    f, X = problem("grouped keys", 0)
    f, X = f.to(torch.float32), torch.stack([X, X.flip(0)]).float()
    J = ls.jacobian(f.heads_apart(), X)
    E = torch.randn(J.batch, *J.in_shape, generator=torch.Generator().manual_seed(1))
    exact = ls.jacobian(f.double().heads_apart(), X.double()).mv(E.double())
    off = torch.arange(1.0, J.batch + 1)[:, None, None] * torch.ones_like(exact)
    seen = compare(f, X, apart=True, basis=None)(E, exact + off, 0)
    assert torch.allclose(seen, off.flatten(1).norm(dim=1).double())


def test_rows_of_a_long_sequence_stand_for_the_others():
    g = torch.Generator().manual_seed(0)
    f = ls.SelfAttention(
        *(torch.randn(4, 4, generator=g) for _ in range(3)), causal=True, window=50
    )
    X, E = (torch.randn(10 * ROWS, 4, generator=g) for _ in range(2))
    exact = exact_product(f, X, E)
    off = 1e-3 * torch.randn(exact.shape, generator=g).double()
    seen = compare(f, X[None], apart=False, basis=None)(E, exact + off, 0)
    assert seen.item() == pytest.approx(off.norm().item(), rel=0.3)
    # The largest rows are always among those compared.
    spike = torch.zeros_like(exact)
    spike[exact.norm(dim=1).argmax()] = 1.0
    seen = compare(f, X[None], apart=False, basis=None)(E, exact + spike, 0)
    assert seen.item() == pytest.approx(spike.norm().item())


@pytest.mark.parametrize("apart", [False, True])
def test_each_member_and_head_has_rows_of_its_own(apart):
    """Errors in the largest rows of a quiet member or head, none of which is large in the other."""
    g = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(4, 2, generator=g) for _ in range(3))
    V[2:] *= 1e-3
    f = ls.SelfAttention(Q, K, V, heads=2)
    X = torch.randn(2, 10 * ROWS, 2, generator=g)
    X[0] *= 10
    J = ls.jacobian((f.heads_apart() if apart else f).double(), X.double())
    E = torch.randn(J.batch, *J.in_shape, generator=g)
    exact = J.mv(E.double())
    off = torch.zeros_like(exact)
    quiet = J.batch - 1  # the last head of the last member
    top = exact[quiet].norm(dim=1).topk(10).indices
    off[quiet, top] = 1e-3 * exact[quiet, top]
    seen = compare(f, X, apart=apart, basis=None)(E, exact + off, 0)
    assert seen[quiet].item() == pytest.approx(off.norm().item(), rel=1e-6)


def test_rows_are_drawn_again_in_every_call():
    size = torch.rand(3, 10 * ROWS, generator=torch.Generator().manual_seed(0)).double()
    (one, _), (same, _), (other, _) = (_rows(size, seed) for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one[:, ROWS // 2 :], other[:, ROWS // 2 :])
    assert torch.equal(one[:, : ROWS // 2], size.topk(ROWS // 2).indices)
    assert all(len(set(rows.tolist())) == ROWS for rows in one)


def cancelling() -> tuple[ls.SelfAttention, torch.Tensor]:
    """Two float32 heads of which one part in 1e6 is left."""
    g = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(3, 3, generator=g) for _ in range(3))
    turn = torch.linalg.qr(torch.randn(3, 3, generator=g))[0]
    O = torch.cat([torch.eye(3), -(1 - 1e-6) * torch.eye(3)], dim=1)
    heads = torch.cat([Q, turn @ Q]), torch.cat([K, turn @ K]), torch.cat([V, V])
    return ls.SelfAttention(*heads, O, heads=2), torch.randn(5, 3, generator=g)


def test_two_heads_that_cancel_in_float32():
    """The sum of two cancelling heads is rounding error: it must not give a lower bound."""
    f, X = cancelling()
    e, exact = ls.local_lipschitz(f, X), ls.local_lipschitz(f, X, precision="exact")
    assert e.lower <= exact.upper and e.value - e.lower > 1e-3 * e.value


@pytest.mark.parametrize(("dtype", "ok"), [(torch.float32, True), (torch.bfloat16, False)])
def test_half_precision_does_not_pass_for_converged(dtype, ok):
    """Eight significant bits resolve no singular value to 1 %, and the status says so."""
    f, X = problem("gaussian", 0)
    f, X = f.to(dtype), X.to(dtype)
    e, exact = ls.local_lipschitz(f, X), ls.local_lipschitz(f, X, precision="exact")
    assert e.status.ok == ok and e.lower <= exact.value * (1 + 1e-9)


@pytest.mark.parametrize("factor", [1.0, -3.0])
def test_a_scaled_operator_is_compared_as_well(factor):
    f, X = cancelling()
    e = ls.spectral_norm(factor * ls.jacobian(f, X), solver=ls.Solver(seed=0))
    exact = ls.jacobian(f.double(), X.double()).to_dense()
    assert e.lower <= abs(factor) * torch.linalg.matrix_norm(exact, 2) and not e.status.ok
    assert e.value - e.lower > 1e-3 * e.value  # relative to the norm it would be 1e-4


@pytest.mark.parametrize(
    "change",
    [lambda J: J.T, lambda J: J @ J, lambda J: J + J],
    ids=["transposed", "squared", "doubled"],
)
def test_what_was_not_compared_is_not_claimed(change):
    e = ls.spectral_norm(change(ls.jacobian(*cancelling())))
    assert e.value > 0 and e.lower == 0 and not e.status.ok and "no bounds" in e.note


def test_operators_around_attention_are_not_compared_with_attention():
    """I + h J and W^(1/2) J W^(-1/2) in float32 keep lower bounds close to their values."""
    f, X = problem("gaussian", 0)
    f, X = f.to(torch.float32), X.float()
    weights = torch.linspace(1, 2, len(X))
    mu = ls.mean_field.DiscreteMeasure(X, weights / weights.sum())
    e = ls.local_lipschitz(f, mu)
    assert e.status.ok and e.lower > 0.99 * e.value
    g = ls.SelfAttention(*(torch.eye(3) for _ in range(3)))
    grown = ls.dynamics.growth_along_depth(g, 0.3 * X[:, :3], 0.5, layers=4)
    assert all(status.ok for status in grown.statuses)
