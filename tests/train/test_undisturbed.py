"""Layers that change when they are read: the monitor leaves weights and random numbers alone."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from lipscope.nn.attention_layer import DotSelfAttention
from lipscope.train.monitor import SmoothnessMonitor, SmoothnessWarning
from tests.train.watched import DIM, HEADS, Kept, batches, dense_norm, trained


def run(make, layers, watched):
    """Losses, weights with buffers, random state and readings of a short training."""
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = SmoothnessMonitor(model, layers, every=1) if watched else None
    losses = trained(model, optimizer, batches(4), monitor)
    readings = [] if monitor is None else monitor.readings
    return losses, model.state_dict(), torch.get_rng_state(), readings


def normalized():
    layer = DotSelfAttention(DIM, HEADS)
    spectral_norm(layer.query)
    return nn.Sequential(layer)


class Random(nn.Module):
    """Draws in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(DIM, DIM)

    def forward(self, X):
        return functional.dropout(self.map(X), 0.5) + 0.1 * torch.rand(DIM)


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (normalized, None),
        (lambda: nn.Sequential(normalized()), ["0"]),
        (lambda: Kept(spectral_norm), None),
    ],
    ids=["closed form", "autograd", "torch"],
)
def test_the_training_is_bit_identical(make, layers):
    losses, state, random, _ = run(make, layers, watched=False)
    losses_too, state_too, random_too, readings = run(make, layers, watched=True)
    assert losses_too == losses
    assert all(torch.equal(state[name], state_too[name]) for name in state)
    assert torch.equal(random, random_too)
    assert len(readings) == 4 and all(reading.sigma > 0 for reading in readings)


def test_a_random_layer_is_named_and_the_random_numbers_of_the_training_stay():
    losses, _, random, _ = run(Random, [""], watched=False)
    with pytest.warns(SmoothnessWarning, match="f is random"):
        losses_too, _, random_too, readings = run(Random, [""], watched=True)
    assert losses_too == losses and torch.equal(random, random_too)
    assert len(readings) == 4


def test_normalized_weights_are_measured_as_they_stand():
    torch.manual_seed(0)
    model = normalized().train()
    monitor = SmoothnessMonitor(model, every=1, tol=1e-5)
    X = batches(1)[0]
    model(X)
    (reading,) = monitor.step()
    assert reading.sigma == pytest.approx(
        dense_norm(copy.deepcopy(model).double().eval(), X[0]), rel=2e-6
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = DotSelfAttention(DIM, HEADS)

    def forward(self, X):
        # What the layer inside reads depends on the mode: in training one more term.
        return X + self.inner(3 * X + 1 if self.training else X)


def test_a_layer_inside_a_measured_block_is_measured_at_the_tokens_of_the_training():
    torch.manual_seed(0)
    model, X = nn.Sequential(Block()).train(), batches(1)[0]
    monitor = SmoothnessMonitor(model, ["0", "0.inner"], every=1, tol=1e-5)
    model(X)
    block, inner = monitor.step()
    exact = copy.deepcopy(model[0]).double().eval()
    assert block.sigma == pytest.approx(dense_norm(exact, X[0]), rel=2e-6)
    assert inner.sigma == pytest.approx(dense_norm(exact.inner, 3 * X[0] + 1), rel=2e-6)
    model(X)
    assert monitor.step()[1].sigma == pytest.approx(inner.sigma, rel=1e-5)
