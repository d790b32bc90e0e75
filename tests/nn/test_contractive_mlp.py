"""The feed-forward contraction keeps its constant, whatever its weights are."""

import pytest
import torch

from lipscope._types import UserError
from lipscope.nn.contractive_mlp import STEEPEST, ContractiveMLP
from lipscope.nn.matrix_norms import of_norm


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


@pytest.mark.parametrize("constant", [0.0, -1.0, float("inf"), float("nan"), True])
def test_a_constant_that_is_none_is_refused(constant):
    with pytest.raises(UserError, match="constant must be a positive number"):
        ContractiveMLP(4, 8, constant)
