"""One token far from the others: they keep their distances, the past its answer, and the layer its constant."""

import pytest
import torch

import lipscope as ls
from lipscope.attention.kernels import common_centre

FAR = [1e3, 1e6, 1e10]
POSITIONS = [0, 5, 15]


def soft(layer: ls.L2SelfAttention, size: float = 0.3) -> ls.L2SelfAttention:
    """Identity weights times size: tokens of length one attend to each other."""
    with torch.no_grad():
        for W in layer.parameters():
            W.copy_(size * torch.eye(layer.dim))
    return layer


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 3e-6), (torch.bfloat16, 0.03)])
def test_the_past_does_not_see_how_far_the_future_is(dtype, tol, far, position):
    torch.manual_seed(0)
    layer = soft(ls.L2SelfAttention(16, 1, causal=True)).to(dtype)
    X = 2 * torch.randn(16, 16).to(dtype)
    Z = X.clone()
    Z[position] = far
    near = [i for i in range(16) if i != position]
    exact = soft(ls.L2SelfAttention(16, 1, causal=True).double())(Z.double())
    assert (layer(Z).double() - exact)[near].norm() < tol * exact[near].norm()
    if position:
        past = slice(0, position)
        assert (layer(Z) - layer(X))[past].norm() <= tol * layer(X)[past].norm()
        assert layer.weights(X)[0, past].double().amax(-1).min() < 0.9, "tokens that see only themselves show nothing"


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("causal", [False, True])
def test_the_constant_holds_beside_a_far_token(far, causal):
    torch.manual_seed(2)
    layer = soft(ls.ContractiveL2Attention(4, 1, 0.9, causal=causal), 1.0)
    X = 10 * torch.randn(16, 4)
    X[-1] = far
    J = torch.autograd.functional.jacobian(layer, X).reshape(64, 64).double()
    exact = layer.double().as_map(16).linearize(X.double()).to_dense()
    assert (J - exact).norm() < 1e-4 * exact.norm()
    closed = layer.float().as_map(16).linearize(X).to_dense().double()
    assert (closed - exact).norm() < 1e-4 * exact.norm()


def test_the_centre_lies_amid_the_keys():
    """Less than half of the tokens cannot move it beyond the rest; far from the origin it goes along."""
    torch.manual_seed(0)
    for n in (1, 2, 3, 15, 16, 200):
        k = torch.randn(2, 3, n, 4)
        few = (n - 1) // 2 if n <= 15 else 1
        k[..., :few, :] = 1e9
        centre = common_centre(k)
        assert centre.shape == (2, 1, 1, 4) and centre.abs().max() < 5
        torch.testing.assert_close(
            common_centre(k[..., few:, :] + 1e4), torch.full((2, 1, 1, 4), 1e4), rtol=5e-4, atol=0
        )
