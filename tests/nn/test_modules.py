"""Attention layers as modules: saving, copying, dtypes, compiling, checkpointing, gradients."""

import copy
import io
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lipscope as ls
from lipscope.nn import ATTENTIONS

LAYERS = {
    **ATTENTIONS,
    "qk_norm": lambda dim, heads, causal: ls.nn.DotSelfAttention(dim, heads, causal, qk_norm=True),
    "cool": lambda dim, heads, causal: ls.nn.DotSelfAttention(dim, heads, causal, temperature=3.0),
    "inf": lambda dim, heads, causal: ls.nn.ContractiveL2Attention(
        dim, heads, 0.9, math.inf, causal
    ),
    "learned ball": lambda dim, heads, causal: ls.nn.ContractiveL2Attention(
        dim, heads, 0.9, "2", causal, ball=0.5, learn_ball=True
    ),
    "residual": lambda dim, heads, causal: ls.nn.InvertibleResidual(
        ls.nn.ContractiveL2Attention(dim, heads, 0.9, 2, causal)
    ),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def layer(name: str, dim: int = 8, heads: int = 2, causal: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return LAYERS[name](dim, heads, causal)


def loss_and_gradients(module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    loss = module(*inputs).square().sum() + module(*inputs).sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters())]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor], tol: float) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x - y).abs().max() <= tol * (1 + y.abs().max())


@every_layer
def test_gradcheck(name):
    m, X = layer(name, 4).double(), torch.randn(2, 3, 4).double().requires_grad_(True)
    names = [key for key, _ in m.named_parameters()]
    state = [p.detach().clone().requires_grad_(True) for p in m.parameters()]

    def at(X, *values):
        return torch.func.functional_call(m, dict(zip(names, values, strict=True)), (X,))

    assert torch.autograd.gradcheck(at, (X, *state))


@every_layer
def test_second_derivatives(name):
    """What the measured constant's gradient needs."""
    m, X = layer(name, 4, causal=False).double(), torch.randn(3, 4).double().requires_grad_(True)
    assert torch.autograd.gradgradcheck(m, (X,))


@every_layer
def test_saving_copying_and_pickling_lose_nothing(name):
    m, X = layer(name), torch.randn(2, 6, 8)
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    loaded = layer(name, seed=1)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for twin in (loaded, copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(twin(X), m(X))
        assert repr(twin) == repr(m)
    assert not list(m.buffers()), "nothing that a checkpoint could lose"


@every_layer
def test_low_precision_is_the_same_map(name):
    X = torch.randn(2, 12, 8)
    m = layer(name)
    half = copy.deepcopy(m).bfloat16()
    truth = copy.deepcopy(half).double()
    out = half(X.bfloat16())
    assert out.dtype == torch.bfloat16
    exact = truth(X.bfloat16().double())
    assert (out.double() - exact).norm() < 0.03 * exact.norm()
    loss_and_gradients(half, X.bfloat16())
    assert all(
        p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in half.parameters()
    )
    with torch.autocast("cpu", torch.bfloat16):
        mixed = m(X)
    mixed.float().square().sum().backward()
    assert (mixed - m(X)).norm() < 0.03 * m(X).norm()


@every_layer
def test_a_float64_layer_is_the_float32_one(name):
    m, X = layer(name), torch.randn(2, 12, 8)
    assert (copy.deepcopy(m).double()(X.double()) - m(X)).abs().max() < 3e-6


@every_layer
def test_meta_device_and_back(name):
    with torch.device("meta"):
        ghost = LAYERS[name](8, 2, True)
    m, X = layer(name), torch.randn(2, 6, 8)
    real = ghost.to_empty(device="cpu")
    real.load_state_dict(m.state_dict())
    assert torch.equal(real(X), m(X))


@every_layer
def test_checkpointing_gives_the_same_gradients(name):
    m, X = layer(name), torch.randn(2, 6, 8)
    plain = [g.clone() for g in loss_and_gradients(m, X)]

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = m

        def forward(self, X):
            return checkpoint(self.inner, X, use_reentrant=False)

    assert_same(loss_and_gradients(Checkpointed(), X), plain, 0.0)


@every_layer
def test_vmap_over_weights_is_a_loop(name):
    """Seeds trained together in one batch."""
    layers = [layer(name, seed=s) for s in range(3)]
    state, _ = torch.func.stack_module_state(layers)
    X = torch.randn(3, 2, 6, 8)
    skeleton = copy.deepcopy(layers[0]).to("meta")
    together = torch.func.vmap(lambda s, x: torch.func.functional_call(skeleton, s, (x,)))(state, X)
    for one, x, y in zip(layers, X, together, strict=True):
        torch.testing.assert_close(one(x), y, rtol=1e-5, atol=1e-6)


@every_layer
def test_one_sequence_is_a_batch_of_one_and_the_past_does_not_see_the_future(name):
    m, X = layer(name), torch.randn(2, 6, 8)
    torch.testing.assert_close(m(X)[1], m(X[1]), rtol=1e-5, atol=1e-6)
    later = X.clone()
    later[:, 4:] += 1
    torch.testing.assert_close(m(later)[:, :4], m(X)[:, :4], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(m(later)[:, 4:], m(X)[:, 4:])


COMPILE = """
import copy, torch
torch.set_num_threads(1)
from tests.nn.test_modules import assert_same, layer, loss_and_gradients
for name in {names}:
    torch.compiler.reset()  # layers share code, and dynamo counts its recompilations by code
    m = layer(name).to({device!r})
    twin = copy.deepcopy(m)
    compiled = torch.compile(twin, fullgraph=True, backend={backend!r})
    for n in (6, 9, 17):
        X = torch.randn(2, n, 8, device={device!r})
        assert_same(loss_and_gradients(compiled, X), loss_and_gradients(m, X), 1e-5)
    if name != "residual":
        real = torch.rand(3, 17, device={device!r}) > 0.4
        real[2] = False
        padded = torch.randn(3, 17, 8, device={device!r}).masked_fill(~real[..., None], torch.nan)
        found = loss_and_gradients(compiled, padded, real)
        assert_same(found, loss_and_gradients(m, padded, real), 1e-5)
    optimisers = [torch.optim.Adam(x.parameters(), 1e-2) for x in (m, twin)]
    for _ in range(5):
        for optimiser, module in zip(optimisers, (m, compiled)):
            loss_and_gradients(module, X)
            optimiser.step()
    assert_same(list(m.parameters()), list(twin.parameters()), 1e-3)
print("compiled")
"""


def compiled(backend: str, names: list[str], device: str = "cpu") -> None:
    """In a fresh interpreter, without the shape checks that only tests have."""
    code = COMPILE.format(backend=backend, names=names, device=device)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=3000
    )
    assert done.stdout.strip() == "compiled", done.stderr


@pytest.mark.wide
def test_the_layers_compile_whole_in_training():
    compiled("aot_eager", ["contractive"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_compile_to_machine_code(name):
    """pytest -m slow tests/nn/test_modules.py; needs a C++ compiler"""
    compiled("inductor", [name])


@pytest.mark.wide
def test_nn_needs_torch_alone():
    code = (
        "import sys; from lipscope.nn import *; "
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert not loaded & {
        "scipy",
        "ot",
        "transformers",
        "pydantic",
        "rich",
        "typer",
        "pandas",
        "matplotlib",
        "triton",
    }
