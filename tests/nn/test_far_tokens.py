"""Tokens far from the others: distances, the past, the constant and the inverse stay right."""

import mpmath
import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.attention.scores import common_centre

FAR = [1e3, 1e6, 1e10]
POSITIONS = [0, 5, 15]


def soft(layer: ls.nn.L2SelfAttention, size: float = 0.3) -> ls.nn.L2SelfAttention:
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
    layer = soft(ls.nn.L2SelfAttention(16, 1, causal=True)).to(dtype)
    X = 2 * torch.randn(16, 16).to(dtype)
    Z = X.clone()
    Z[position] = far
    near = [i for i in range(16) if i != position]
    exact = soft(ls.nn.L2SelfAttention(16, 1, causal=True).double())(Z.double())
    assert (layer(Z).double() - exact)[near].norm() < tol * exact[near].norm()
    if position:
        past = slice(0, position)
        assert (layer(Z) - layer(X))[past].norm() <= tol * layer(X)[past].norm()
        assert layer.weights(X)[0, past].double().amax(-1).min() < 0.9, (
            "tokens that see only themselves show nothing"
        )


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("causal", [False, True])
def test_the_constant_holds_beside_a_far_token(far, causal):
    torch.manual_seed(2)
    layer = soft(ls.nn.ContractiveL2Attention(4, 1, 0.9, causal=causal), 1.0)
    X = 10 * torch.randn(16, 4)
    X[-1] = far
    J = torch.autograd.functional.jacobian(layer, X).reshape(64, 64).double()
    exact = layer.double().as_map(16).jacobian(X.double()).to_dense()
    assert (J - exact).norm() < 1e-4 * exact.norm()
    closed = layer.float().as_map(16).jacobian(X).to_dense().double()
    assert (closed - exact).norm() < 1e-4 * exact.norm()


def test_the_centre_lies_amid_the_keys():
    """Fewer than half of the tokens cannot move it beyond the rest; it follows a common shift."""
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


def close_pairs(scale: float, gap: float, n: int, d: int) -> torch.Tensor:
    """Pairs of close tokens, far from other pairs: rounding decides whom they attend to."""
    x = scale * torch.randn(n, d).double()
    x[1 : n - n % 2 : 2] = x[0 : n - n % 2 : 2] + gap * torch.randn(n // 2, d).double()
    return x


def exactly(g: ls.nn.ContractiveL2Attention, X: mpmath.matrix) -> mpmath.matrix:
    """One head of L2 attention in 40 digits, X [n, d]."""
    n, d = X.rows, X.cols
    Q, O, M = (
        mpmath.matrix(W.detach().double().tolist())
        for W in (g.query.weight, g.out.weight, g.value_map(n)[0])
    )
    Y, out = X * Q.T, mpmath.matrix(n, d)
    for i in range(n):
        w = [
            mpmath.exp(-sum((Y[i, a] - Y[j, a]) ** 2 for a in range(d)) / mpmath.sqrt(d))
            for j in range(n)
        ]
        for a in range(d):
            out[i, a] = sum(w[j] * Y[j, a] for j in range(n)) / sum(w)
    return out * M.T * O.T


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_pairs_are_not_called_a_broken_promise_and_their_error_is_bounded(dtype):
    scales = (3e2, 3e3, 1e5) if dtype == torch.float32 else (1e5, 1e7, 1e9)
    noisy = 0
    with mpmath.workdps(40):
        for seed in range(3):
            torch.manual_seed(seed)
            g = ls.nn.ContractiveL2Attention(2, 1, 0.9).to(dtype)
            for scale in scales:
                y = ls.nn.InvertibleResidual(g)(close_pairs(scale, 0.7, 5, 2).to(dtype)).detach()
                found = ls.nn.InvertibleResidual(g).inverse(y)
                noisy += int(found.noisy)
                start, Y = (mpmath.matrix(t.double().tolist()) for t in (found.value, y))
                z = start
                for _ in range(15):  # attended pairs have a local rate far below 0.9
                    z, before = Y - exactly(g, z), z
                assert mpmath.norm(z - before) < 0.01 * found.error_bound.item()
                assert mpmath.norm(z - start) <= found.error_bound.item()
                assert found.error_bound <= 1e-3 * scale
    assert noisy > 0 or dtype == torch.float32


@pytest.mark.wide
def test_rounding_of_g_in_float64_is_inside_the_error_bound():
    """Rounding decides where the iteration ends, and the residual there rounds in the same way."""
    unseen = 0
    for seed in range(40):
        torch.manual_seed(seed)
        r = ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(1, 1, 0.5)).double()
        with torch.no_grad():
            for W in r.parameters():
                W.mul_(3)
        y = r(close_pairs(3e6 * 10 ** (seed / 20), 0.1, 5, 1)).detach()
        found = r.inverse(y)
        with mpmath.workdps(40):
            start, Y = (mpmath.matrix(t.tolist()) for t in (found.value, y))
            z = start
            for _ in range(12):
                z, before = Y - exactly(r.g, z), z
            error, left = mpmath.norm(z - start), mpmath.norm(z - before)
        assert left < 0.01 * found.error_bound.item() and error <= found.error_bound.item()
        residual, resolution = (
            (y - found.value - r.g(found.value)).norm(),
            2 * 64 * 2.0**-52 * y.norm(),
        )
        unseen += bool(error > (residual + resolution).item() / (1 - 0.5))
    assert unseen > 0


@pytest.mark.wide
def test_a_layer_with_a_proof_is_never_accused():
    """Not even where points next to x say nothing of how rounding moves g a step away from it."""
    for seed in range(4):
        torch.manual_seed(seed)
        r = ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(4, 1, 0.9)).double()
        with torch.no_grad():
            for W in r.parameters():
                W.mul_(3)
        x = torch.stack([close_pairs(1e8, 5.0, 8, 4) for _ in range(60)])
        assert (r.inverse(r(x)).error_bound < 1e-5 * 1e8).all()
    noisy = 0
    for seed in range(8):
        torch.manual_seed(seed)
        dtype, scale = ((torch.float32, 3e3), (torch.float64, 1e7))[seed % 2]
        r = ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(4, 1, 0.9).to(dtype))
        x = torch.stack([close_pairs(scale * 10 ** (i / 40), 0.7, 8, 4) for i in range(100)]).to(
            dtype
        )
        noisy += int(r.inverse(r(x)).noisy.sum())
    assert noisy > 10


class Steep(nn.Module):
    """-slope x, whatever it promises."""

    def __init__(self, slope: float, constant: float) -> None:
        super().__init__()
        self.slope, self.constant = slope, constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.slope * x


@pytest.mark.parametrize("slope", [0.6, 1.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_pairs_hide_no_broken_promise(slope, dtype):
    torch.manual_seed(0)
    for scale in (1.0, 1e5, 1e9):
        x = close_pairs(scale, 0.7, 6, 2).to(dtype)
        with pytest.raises(ls.UserError, match=r"not a contraction with constant 0\.5"):
            ls.nn.InvertibleResidual(Steep(slope, 0.5)).inverse(x)
        assert not ls.nn.InvertibleResidual(Steep(0.5, 0.5)).inverse(x).noisy
