"""Zero, tiny or huge weights, in every dtype: scaled layers stay finite and contractive."""

import copy
import math

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.nn.contractive import ContractiveMLP
from lipscope.nn.matrix_norms import FLOOR
from lipscope.nn.parametrize import sigma_reparametrise, spectrally_normalise

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

SCALED = {
    "contractive": lambda: ls.nn.ContractiveL2Attention(16, 2, 0.9),
    "contractive, inf": lambda: ls.nn.ContractiveL2Attention(16, 2, 0.9, math.inf, causal=True),
    "mlp": lambda: ContractiveMLP(16, 32, 0.9),
    "spectral": lambda: spectrally_normalise(nn.Linear(16, 16, bias=False), 0.9),
    "sigma": lambda: sigma_reparametrise(nn.Linear(16, 16, bias=False)),
}


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim == 2]


def gradients(module: nn.Module, X: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    module(X).float().sum().backward()
    return [p.grad for p in matrices(module)]


@every_dtype
@pytest.mark.parametrize("name", SCALED)
def test_zero_weights_give_zero_and_a_slope_to_leave_it(name, dtype):
    """One matrix after the other is zero, then all; the slope stays below 1 / FLOOR a token."""
    torch.manual_seed(0)
    X = torch.randn(2, 8, 16).to(dtype)
    for zero in (*range(len(matrices(SCALED[name]()))), slice(None)):
        module = SCALED[name]().to(dtype)
        chosen = matrices(module)[zero]
        for W in chosen if isinstance(chosen, list) else [chosen]:
            nn.init.zeros_(W)
        assert module(X).isfinite().all()
        found = gradients(module, X)
        assert all(
            g.isfinite().all() and g.abs().max() <= X.shape[:2].numel() / FLOOR for g in found
        )
        # With a zero query the values are zero in two ways; any other zero matrix can move at once.
        if isinstance(zero, int) and not (name.startswith("contractive") and zero == 0):
            assert found[zero].abs().max() > 1
    assert (module(X) == 0).all()


@every_dtype
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("size", [1e-2, 1.0, 30.0, 1e10])
def test_the_scale_is_taken_before_it_is_rounded(name, dtype, size):
    """Against the same weights in float64: nothing overflows or vanishes but by final rounding."""
    if size * 16 > torch.finfo(dtype).max:
        pytest.skip(f"weights of size {size:g} are not numbers of {dtype}")
    torch.manual_seed(0)
    module, X = SCALED[name]().double(), torch.randn(2, 8, 16)
    with torch.no_grad():
        for W in matrices(module):
            W.mul_(size)
    module, X = module.to(dtype), X.to(dtype)
    exact = copy.deepcopy(module).double()(X.double())
    left_for_rounding = {"mlp": 2, "spectral": 1, "sigma": 1}.get(name, 0)
    assert (module(X).double() - exact).norm() < (2 + left_for_rounding) * torch.finfo(
        dtype
    ).eps * exact.norm() + 5e-6
    assert exact.norm() > 1e-2
    assert all(g.isfinite().all() for g in gradients(module, X))


@every_dtype
@pytest.mark.parametrize("dim", [1, 4])
def test_the_closed_form_is_below_the_constant_where_the_bound_is_attained(dim, dtype):
    """One token makes a linear map, and identity weights up to a factor attain its bound."""
    for factor in torch.linspace(0.3, 3, 40).tolist():
        layer = ls.nn.ContractiveL2Attention(dim, 1, 0.9).to(dtype)
        with torch.no_grad():
            for W in layer.parameters():
                W.copy_(factor * torch.eye(dim))
        f = layer.as_map(1)
        assert f.Q.dtype == torch.promote_types(dtype, torch.float32)
        norm = torch.linalg.matrix_norm(f.O.double() @ f.V.double(), 2).item()
        assert 0.9 * (1 - 2e-5) <= norm <= 0.9
        assert ls.local_lipschitz(f, torch.ones(1, dim, dtype=f.Q.dtype)).value <= 0.9


@pytest.mark.parametrize("norm", ["2", "inf"])
def test_a_bound_of_huge_weights_is_a_bound(norm):
    """It is of degree two in Q and one in V and O, until float64 ends: then it is infinite."""
    torch.manual_seed(0)
    layer = ls.nn.L2SelfAttention(6, 2).double()
    start = layer.lipschitz_bound(5, norm)
    for size in (1e-9, 1e60):
        grown = copy.deepcopy(layer)
        for W in grown.parameters():
            W.data.mul_(size)
        assert grown.lipschitz_bound(5, norm) == pytest.approx(start * size**4, rel=1e-9)
        scaled = ls.nn.ContractiveL2Attention(6, 2, 0.9).double()
        scaled.load_state_dict(grown.state_dict())
        assert math.isfinite(scaled.lipschitz_bound(5, math.inf))
    for W in grown.parameters():
        W.data.mul_(1e60)
    assert grown.lipschitz_bound(5, norm) == math.inf
    X = torch.randn(5, 6).double()
    assert scaled(X).isfinite().all() and scaled(X).abs().max() > 1e-3
