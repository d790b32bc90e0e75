"""The layers on a GPU: the same numbers as on a CPU, their guarantees, and a passive monitor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lipscope as ls
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.contractive import ATTENTIONS
from lipscope.nn.parametrize import sigma_reparametrise, spectrally_normalise
from lipscope.train.monitor import Reading
from tests.nn.test_modules import compiled
from tests.train.watched import trained

DIM, HEADS, TOKENS = 32, 4, 48

pytestmark = pytest.mark.gpu


def layer(name: str, dtype: torch.dtype = torch.float32, causal: bool = True) -> AttentionLayer:
    torch.manual_seed(0)
    return ATTENTIONS[name](DIM, HEADS, causal).to(dtype)


def tokens(dtype: torch.dtype = torch.float32, batch: int = 3) -> Tensor:
    return torch.randn(
        batch, TOKENS, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(dtype)


def gradients(f: nn.Module, X: Tensor) -> tuple[Tensor, list[Tensor]]:
    Y = f(X)
    (Y * torch.linspace(-1, 1, DIM, device=Y.device, dtype=Y.dtype)).sum().backward()
    return Y.detach(), [p.grad for p in f.parameters() if p.grad is not None]


def assert_near(found: Tensor, truth: Tensor, tol: float) -> None:
    assert (found.cpu().double() - truth.double()).norm() <= tol * truth.double().norm()


@pytest.mark.parametrize("name", list(ATTENTIONS))
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_outputs_and_gradients_are_those_of_the_cpu(name, dtype, tol):
    # The same rounded weights and tokens in float64 are the truth.
    fast = layer(name, dtype).cuda()
    true = layer(name, dtype).double()
    Y, grads = gradients(fast, tokens(dtype).cuda())
    truth, true_grads = gradients(true, tokens(dtype).double())
    assert_near(Y, truth, tol)
    assert len(grads) == len(true_grads) > 0
    for grad, exact in zip(grads, true_grads, strict=True):
        assert_near(grad, exact, 3 * tol)


@pytest.mark.parametrize("name", list(ATTENTIONS))
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_bounds_are_those_of_the_cpu(name, norm):
    here, there = layer(name), layer(name).cuda()
    bound = there.lipschitz_bound(TOKENS, norm)
    # On a GPU norms come from squarings, above the truth by up to 0.7 %.
    assert bound == pytest.approx(here.lipschitz_bound(TOKENS, norm), rel=0.02)


@pytest.mark.parametrize("norm", ["2", "inf"])
def test_an_inverse_is_found(norm):
    torch.manual_seed(0)
    block = ls.nn.InvertibleResidual(
        ls.nn.ContractiveL2Attention(DIM, HEADS, 0.9, norm=norm)
    ).cuda()
    X = tokens().cuda()
    found = block.inverse(block(X))
    assert found.value.is_cuda and (found.value - X).abs().max() < 1e-5
    few = X[0, :6]
    J = ls.jacobian(lambda X: block(X), few).to_dense().reshape(few.numel(), few.numel())
    found = block.log_det(few, terms=8, probes=64)
    exact = torch.linalg.slogdet(J.double()).logabsdet
    assert found.value.is_cuda and (found.value - exact).abs() <= 5 * found.standard_error + 1e-4


@pytest.mark.parametrize("name", ATTENTIONS)
def test_compiled_layers_train_alike(name):
    compiled("inductor", [name], "cuda")


@pytest.mark.parametrize("change", [sigma_reparametrise, lambda f: spectrally_normalise(f, 1.0)])
def test_parametrized_weights_have_their_norm(change):
    f = layer("dot").cuda()
    change(f)
    W = f.query.weight
    assert W.is_cuda
    assert 0.99 < torch.linalg.matrix_norm(W.detach().double(), 2).item() <= 1
    gradients(f, tokens().cuda())


def test_the_measured_sigma_has_its_gradient():
    f, X = layer("dot").cuda(), tokens()[0].cuda()
    sigma = ls.nn.measured_sigma(f, X)
    sigma.backward()
    true = layer("dot").double()
    exact = ls.nn.measured_sigma(true, tokens()[0].double())
    exact.backward()
    assert_near(sigma.detach(), exact.detach(), 1e-4)
    assert_near(f.query.weight.grad, true.query.weight.grad, 1e-2)


def run(watched: bool) -> tuple[list[float], dict[str, Tensor], Tensor, list[Reading]]:
    torch.manual_seed(0)
    model = nn.Sequential(layer("l2"), nn.Dropout(0.1), layer("dot")).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = ls.SmoothnessMonitor(model, every=2) if watched else None
    losses = trained(model, optimizer, tokens(batch=24).cuda().split(4), monitor)
    readings = [] if monitor is None else list(monitor.readings)
    return losses, model.state_dict(), torch.cuda.get_rng_state(), readings


def test_the_monitor_leaves_a_training_on_the_gpu_as_it_is():
    losses, state, random, _ = run(watched=False)
    losses_too, state_too, random_too, readings = run(watched=True)
    assert losses_too == losses and torch.equal(random, random_too)
    assert all(torch.equal(state[name], state_too[name]) for name in state)
    assert len(readings) == 6 and all(reading.sigma > 0 for reading in readings)
