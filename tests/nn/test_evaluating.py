"""Weights made by torch's older hooks: measured at their current values, and left unchanged."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm

import lipscope as ls
from lipscope.nn.evaluating import evaluating
from lipscope.train.monitor import SmoothnessMonitor
from tests.train.test_undisturbed import run
from tests.train.watched import DIM, HEADS, Kept, batches, dense_norm

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def hooked(kind=ls.nn.DotSelfAttention):
    layer = kind(DIM, HEADS)
    spectral_norm(layer.query)
    weight_norm(layer.out)
    return nn.Sequential(layer)


class Reading(nn.Module):
    """Reads the weight before the hook recomputes it, as a penalty may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = hooked()

    def forward(self, X):
        size = self.layer[0].query.weight.detach().sum()
        return self.layer(X) + size


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (hooked, None),
        (lambda: hooked(ls.nn.L2SelfAttention), None),
        (lambda: nn.Sequential(hooked()), ["0"]),
        (lambda: Kept(spectral_norm), None),
        (Reading, None),
        (Reading, ["layer"]),
    ],
    ids=["dot", "l2", "autograd", "torch", "closed form, weight read", "autograd, weight read"],
)
def test_the_training_is_bit_identical(make, layers):
    losses, state, random, _ = run(make, layers, watched=False)
    losses_too, state_too, random_too, readings = run(make, layers, watched=True)
    assert losses_too == losses and torch.equal(random, random_too)
    assert all(torch.equal(state[name], state_too[name]) for name in state)
    assert len(readings) == 4 and all(reading.sigma > 0 for reading in readings)


@pytest.mark.parametrize(
    "kind", [ls.nn.DotSelfAttention, ls.nn.L2SelfAttention, ls.nn.CosineSelfAttention, "torch"]
)
def test_they_are_measured_at_the_weights_after_the_step(kind):
    torch.manual_seed(0)

    def make():
        return Kept(spectral_norm) if kind == "torch" else hooked(kind)

    model, X = make().train(), batches(1)[0]
    monitor = SmoothnessMonitor(model, every=1, tol=1e-5)
    model(X)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    (reading,) = monitor.step()
    exact = make().double()
    exact.load_state_dict(model.state_dict())
    if kind == "torch":  # torch never calls out_proj: what it reads is what once was made
        exact.attention.out_proj.weight = model.attention.out_proj.weight.detach().double()
    exact.eval()(X.double())
    assert reading.sigma == pytest.approx(dense_norm(exact, X[0]), rel=3e-6)


def test_everything_is_put_back():
    model = nn.Sequential(hooked(), nn.Dropout()).train()
    model[1].eval()
    model(batches(1)[0])
    layer = model[0][0].query
    weight, state = layer.weight, copy.deepcopy(model.state_dict())
    with evaluating(model):
        assert layer.weight is not weight and not model[0].training
        model(batches(1)[0])
    assert layer.weight is weight and model.training and model[0].training and not model[1].training
    ls.nn.measured_sigma(model[0], batches(1)[0][0]).backward()
    assert layer.weight is weight and layer.weight_orig.grad.abs().max() > 0
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
