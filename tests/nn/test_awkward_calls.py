"""Inverse, log-determinant and sigma under autocast, in inference mode, at any scale."""

import math

import pytest
import torch
from torch import Tensor, nn

import lipscope as ls


class Turn(nn.Module):
    """x -> c x turned by a right angle in every pair of coordinates."""

    constant = 0.9

    def __init__(self, norm: str = "2") -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.constant * torch.stack([-x[..., 1], x[..., 0]], dim=-1)


class Fixed(nn.Module):
    """Does not read its tokens; `learned` says whether it has weights."""

    constant = 0.5

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(4)) if learned else torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand_as(x)


def attention_residual() -> ls.nn.InvertibleResidual:
    torch.manual_seed(0)
    return ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(8, 2, 0.9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_neither_inverse_nor_determinant(dtype):
    """A linear map at its constant: rounding to bfloat16 would look like a broken promise."""
    g = nn.Linear(8, 8, bias=False)
    nn.init.orthogonal_(g.weight, 0.9)
    for r in (ls.nn.InvertibleResidual(g, 0.9 + 1e-6), attention_residual()):
        y = torch.randn(3, 6, 8).to(dtype)
        plain = r.inverse(y.float())
        with torch.autocast("cpu", torch.bfloat16):
            mixed = r.inverse(y)
        assert mixed.value.dtype == torch.float32
        assert torch.equal(mixed.value, plain.value) and torch.equal(
            mixed.error_bound, plain.error_bound
        )
        torch.manual_seed(1)
        value = r.log_det(y.float()).value
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(r.log_det(y).value, value)


@pytest.mark.parametrize("norm", ["2", "inf"])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float16, 1e3),
        (torch.float16, 1e-3),
        (torch.float32, 1e18),
        (torch.float32, 1e30),
        (torch.float32, 1e-30),
        (torch.float64, 1e200),
        (torch.float64, 1e-200),
    ],
)
def test_tokens_of_any_size_take_the_same_steps(dtype, size, norm):
    torch.manual_seed(0)
    r, y = ls.nn.InvertibleResidual(Turn(norm)), torch.randn(3, 5, 2).to(dtype)
    size = 2.0 ** round(math.log2(size))
    small, large = r.inverse(y), r.inverse(y * size)
    assert small.steps.min() > 20 and (large.steps - small.steps).abs().max() <= (
        5 if dtype == torch.float16 else 0
    )
    exact = (y.double() - Turn()(y.double())) / (1 + 0.9**2) * size
    error = (large.value.double() - exact).abs().flatten(1)
    length = error.amax(1) if norm == "inf" else (error / size).norm(dim=1) * size
    assert (length <= large.error_bound).all()
    assert (large.error_bound <= 3 * size * small.error_bound).all()


def test_the_determinant_in_inference_mode_is_the_usual_one():
    r = attention_residual()
    x = torch.randn(2, 5, 8)
    torch.manual_seed(1)
    usual = r.log_det(x, probes=3)
    torch.manual_seed(1)
    with torch.inference_mode():
        found = r.log_det(2 * x / 2, probes=3)
    assert torch.equal(found.value, usual.value) and not found.value.requires_grad


@pytest.mark.parametrize("learned", [False, True])
def test_a_map_that_ignores_its_tokens_has_derivative_zero(learned):
    f, X = Fixed(learned), torch.randn(2, 3, 4, requires_grad=True)
    found = ls.nn.InvertibleResidual(f).log_det(X, terms=3, probes=2)
    assert (found.value == 0).all()
    sigma = ls.nn.measured_sigma(f, X)
    assert (sigma == 0).all()
    sigma.sum().backward()
    assert X.grad is None or not X.grad.any()


def test_a_map_without_numbers_is_refused():
    f = ls.nn.DotSelfAttention(4, 1)
    nn.init.constant_(f.out.weight, math.nan)
    with pytest.raises(ls.UserError, match="look for NaN in its weights"):
        ls.nn.measured_sigma(f, torch.randn(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_moves_no_statistics(dtype):
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(x))

    torch.manual_seed(0)
    f = Normed().to(dtype)
    before = [b.clone() for b in f.buffers()]
    sigma = ls.nn.measured_sigma(f, torch.randn(6, 4).to(dtype))
    sigma.backward()
    assert f.training and f.out.weight.grad.abs().max() > 0
    assert all(torch.equal(a, b) for a, b in zip(before, f.buffers(), strict=True))
