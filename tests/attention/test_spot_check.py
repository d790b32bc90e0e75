"""Low-precision products against float64: all rows of short sequences, some of long ones."""

import pytest
import torch

import lipscope as ls
from lipscope.attention.spot_check import ROWS, compare
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
    seen = compare(f, X[None], apart=False, basis=None)(E, exact + off)
    assert seen.item() == pytest.approx(off.norm().item(), rel=1e-6, abs=1e-9 * exact.norm().item())


def test_each_head_alone():
    f, X = problem("grouped keys", 0)
    f, X = f.to(torch.float32), torch.stack([X, X.flip(0)]).float()
    J = ls.jacobian(f.heads_apart(), X)
    E = torch.randn(J.batch, *J.in_shape, generator=torch.Generator().manual_seed(1))
    exact = ls.jacobian(f.double().heads_apart(), X.double()).mv(E.double())
    off = torch.arange(1.0, J.batch + 1)[:, None, None] * torch.ones_like(exact)
    seen = compare(f, X, apart=True, basis=None)(E, exact + off)
    assert torch.allclose(seen, off.flatten(1).norm(dim=1).double())


def test_rows_of_a_long_sequence_stand_for_the_others():
    g = torch.Generator().manual_seed(0)
    f = ls.SelfAttention(
        *(torch.randn(4, 4, generator=g) for _ in range(3)), causal=True, window=50
    )
    X, E = (torch.randn(10 * ROWS, 4, generator=g) for _ in range(2))
    exact = exact_product(f, X, E)
    off = 1e-3 * torch.randn(exact.shape, generator=g).double()
    seen = compare(f, X[None], apart=False, basis=None)(E, exact + off)
    assert seen.item() == pytest.approx(off.norm().item(), rel=0.3)
    # The largest rows are always among those compared.
    spike = torch.zeros_like(exact)
    spike[exact.norm(dim=1).argmax()] = 1.0
    seen = compare(f, X[None], apart=False, basis=None)(E, exact + spike)
    assert seen.item() == pytest.approx(spike.norm().item())


def test_two_heads_that_cancel_in_float32():
    """What remains of two heads is their rounding: it must not become a lower bound."""
    g = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(3, 3, generator=g) for _ in range(3))
    turn = torch.linalg.qr(torch.randn(3, 3, generator=g))[0]
    O = torch.cat([torch.eye(3), -(1 - 1e-6) * torch.eye(3)], dim=1)
    heads = torch.cat([Q, turn @ Q]), torch.cat([K, turn @ K]), torch.cat([V, V])
    f, X = ls.SelfAttention(*heads, O, heads=2), torch.randn(5, 3, generator=g)
    e, exact = ls.local_lipschitz(f, X), ls.local_lipschitz(f, X, precision="exact")
    assert e.lower <= exact.upper and e.value - e.lower > 1e-3 * e.value


@pytest.mark.parametrize(("dtype", "ok"), [(torch.float32, True), (torch.bfloat16, False)])
def test_half_precision_does_not_pass_for_converged(dtype, ok):
    """Eight significant bits resolve no singular value to 1 %, and the status says so."""
    f, X = problem("gaussian", 0)
    f, X = f.to(dtype), X.to(dtype)
    e, exact = ls.local_lipschitz(f, X), ls.local_lipschitz(f, X, precision="exact")
    assert e.status.ok == ok and e.lower <= exact.value * (1 + 1e-9)
