"""Contractive attention and the feed-forward contraction keep their constants for any weights."""

import math

import pytest
import torch

import lipscope as ls
from lipscope.nn.contractive import STEEPEST, ContractiveL2Attention, ContractiveMLP, _blocks
from lipscope.nn.matrix_norms import of_norm
from tests.nn.climb import climbed


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_the_contractive_layer_keeps_its_promise(norm, causal):
    for seed, constant in enumerate((0.9, 3.0)):
        torch.manual_seed(seed)
        layer = ls.nn.ContractiveL2Attention(4, 2, constant, norm, causal).double()
        with torch.no_grad():
            layer.query.weight.mul_(5 * seed + 0.2)
            layer.out.weight.mul_(10)
        for n in (1, 12):
            assert layer.lipschitz_bound(n, norm) == constant
            f = layer.as_map(n)
            size = layer.query.weight.detach().norm()
            assert climbed(f, 2 * torch.randn(n, 4).double() / size, norm, 6) <= constant


def test_the_constant_can_almost_be_reached():
    """With one token the layer is linear; what is missing is the room for rounding to float32."""
    torch.manual_seed(0)
    layer = ls.nn.ContractiveL2Attention(1, 1, 0.9).double()
    reached = 0.9 / (1 + 2 * torch.finfo(torch.float32).eps)
    assert ls.local_lipschitz(layer.as_map(1), torch.ones(1, 1).double()).value == pytest.approx(
        reached, rel=1e-9
    )


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, True, "0.9"])
def test_a_constant_is_positive(bad):
    with pytest.raises(Exception, match=r"constant|violates type hint"):
        ls.nn.ContractiveL2Attention(8, 2, bad)


def test_a_norm_is_a_name_or_its_number():
    for norm, name in ((2, "2"), (math.inf, "inf"), ("inf", "inf")):
        assert ls.nn.ContractiveL2Attention(8, 2, 0.9, norm=norm).norm == name
    with pytest.raises(ls.UserError, match="norm must be '2' or 'inf', got 1"):
        ls.nn.ContractiveL2Attention(8, 2, 0.9, norm=1)


def test_steepest_is_the_largest_slope_of_gelu():
    x = torch.linspace(-6, 6, 200_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)
    assert slope.max().item() == pytest.approx(STEEPEST, rel=1e-9)
    assert slope.max().item() <= STEEPEST


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_jacobian_never_exceeds_the_constant_and_comes_near_it(scale):
    torch.manual_seed(0)
    f = ContractiveMLP(6, 24, 0.7).double()
    with torch.no_grad():
        for weight in f.parameters():
            weight.mul_(scale)
    largest = 0.0
    for size in (0.1, 1.0, 10.0):
        for x in size * torch.randn(20, 6, dtype=torch.float64):
            J = torch.autograd.functional.jacobian(f, x)
            largest = max(largest, torch.linalg.matrix_norm(J, 2).item())
    assert largest <= 0.7
    with torch.no_grad():  # one unit, held at the steepest point, uses the constant up
        f.up.weight.zero_()[0, 0], f.down.weight.zero_()[0, 0], f.up.bias[0] = 3.0, 5.0, 2**0.5
    J = torch.autograd.functional.jacobian(f, torch.zeros(6, dtype=torch.float64))
    assert torch.linalg.matrix_norm(J, 2).item() == pytest.approx(0.7, rel=1e-9)


def test_the_derivative_flows_through_the_norms():
    torch.manual_seed(1)
    f = ContractiveMLP(3, 5, 0.9).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def call(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(f, {"up.weight": up, "down.weight": down}, (x,))

    assert torch.autograd.gradcheck(call, (x, f.up.weight, f.down.weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounded_weights_keep_the_constant(dtype):
    """Equal entries all round the same way, up or down: the layer then attains its constant."""
    torch.manual_seed(0)
    for dim in range(2, 24):
        f = ContractiveMLP(dim, 4 * dim, 0.999).to(dtype)
        for fill in (lambda W: W.fill_(1.0), lambda W: W.normal_()):
            with torch.no_grad():
                fill(f.up.weight), fill(f.down.weight)
            up, down = (
                of_norm(1.0, f.up.weight).double(),
                of_norm(f.constant / STEEPEST, f.down.weight).double(),
            )
            product = torch.linalg.matrix_norm(up, 2) * torch.linalg.matrix_norm(down, 2) * STEEPEST
            assert 0.999 * (1 - 4 * torch.finfo(dtype).eps - 1e-6) <= product.item() <= 0.999


@pytest.mark.parametrize(("own", "other"), [("inf", "2"), ("2", "inf")])
@pytest.mark.parametrize(("size", "fill"), [(1, torch.eye), (8, torch.ones), (64, torch.eye)])
def test_the_bound_in_the_other_norm_holds_for_padded_sequences(own, other, size, fill):
    """A sequence is scaled for its real tokens, and fewer of them may react more in that norm."""
    layer = ContractiveL2Attention(size, 1, 0.9, own).double().requires_grad_(False)
    weight = fill(1, 1) if size == 1 else fill(size) if fill is torch.eye else fill(size, size)
    for parameter in layer.parameters():
        parameter.copy_(weight)
    X, padding = torch.ones(2, size).double(), torch.tensor([True, False])
    moved = X + padding[:, None]
    order = 2 if other == "2" else math.inf
    reacts, changes = layer(moved, padding) - layer(X, padding), moved - X
    ratio = (reacts.flatten().norm(order) / changes.flatten().norm(order)).item()
    assert ratio <= layer.lipschitz_bound(2, other) * (1 + 1e-9)
    bounds = [layer.lipschitz_bound(n, other) for n in (1, 2, 3, 8, 40, 100, 1000)]
    assert bounds == sorted(bounds)


def test_blocks_hold_every_length():
    for n in (1, 2, 31, 64, 1000):
        assert [m for first, last in _blocks(n) for m in range(first, last + 1)] == [
            *range(1, n + 1)
        ]


def cancelling(size: float, last: float, **given) -> ls.nn.ContractiveL2Attention:
    """Output weights of length `size` that cancel all but `last` of the values."""
    layer = ls.nn.ContractiveL2Attention(2, 1, 0.9, **given)
    with torch.no_grad():
        layer.query.weight.copy_(torch.eye(2))
        layer.value.weight.copy_(torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
        layer.out.weight.copy_(torch.tensor([[3 * size, -size], [last, 3 * last]]))
    return layer


@pytest.mark.parametrize("norm", ["2", "inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1e0, 1e2, 1e4, 1e6, 1e9])
def test_the_constant_holds_for_rounded_values_that_cancel(size, dtype, norm):
    for step in range(20):  # different roundings of the scale
        layer = cancelling(size, 1e-3 * (1 + step / 20), norm=norm).to(dtype)
        f = layer.as_map(1)
        J = f.O.double() @ f.M[0].double() @ f.Q.double()  # one token: the map is linear
        largest = torch.linalg.matrix_norm(J, 2 if norm == "2" else math.inf)
        assert largest <= 0.9 * (1 + 1e-15)


@pytest.mark.parametrize("size", [1e0, 1e2, 1e4, 1e6])
def test_values_that_cancel_are_scaled_alike_in_every_dtype(size):
    narrow, wide = cancelling(size, 1e-3), cancelling(size, 1e-3).double()
    torch.testing.assert_close(narrow.value_map(7), wide.value_map(7), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e0, 1e2, 1e4])
def test_errors_of_cancelling_values_in_16_bits_are_shares_of_what_cancels(size):
    layer = cancelling(size, 1e-3).bfloat16()
    f, x = layer.as_map(1), torch.tensor([[0.0, 1.0]])
    for scale in (0.3, 0.7, 1.1, 2.7):
        X = (scale * x).bfloat16()
        off = layer(X).double() - f(X.float()).double()
        share = off.norm() / (f.O.double().norm() * f.M.double().norm() * X.double().norm())
        assert share <= 3 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e0, 1e1, 1e2])
def test_error_bounds_of_inverses_include_what_cancels(size, dtype):
    residual = ls.nn.InvertibleResidual(cancelling(size, 1e-3).to(dtype))
    X = torch.linspace(-1, 1, 6).reshape(3, 2).to(dtype)
    with torch.no_grad():
        Y = residual(X)
    found = residual.inverse(Y)
    exact = ls.nn.InvertibleResidual(residual.g.double()).inverse(Y.double())
    off = (found.value.double() - exact.value).norm().item()
    assert off <= found.error_bound.item() + exact.error_bound.item()


@pytest.mark.parametrize("ball", [None, 0.5])
@pytest.mark.parametrize("norm", ["2", "inf"])
@pytest.mark.parametrize("own", ["2", "inf"])
def test_the_bound_as_a_tensor_is_that_of_the_scaled_layer(own, norm, ball):
    torch.manual_seed(0)
    layer = ls.nn.ContractiveL2Attention(4, 2, 0.9, own, ball=ball).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(0.1)
    found = layer.bound_tensor(5, norm)
    assert found.item() == pytest.approx(layer.lipschitz_bound(5, norm), rel=1e-10)
    if own != norm:
        weights = tuple(layer.parameters())
        assert torch.autograd.gradcheck(lambda *_: layer.bound_tensor(5, norm), weights, eps=1e-6)
