"""Compiled models under the monitor: measured, while their graphs and numbers stay the same."""

import subprocess
import sys

import pytest

WATCHED = """
import copy, warnings
import torch
from torch._dynamo.utils import counters
torch.set_num_threads(1)
import lipscope as ls
from lipscope.train.monitor import NOT_RUN, SmoothnessWarning
from tests.train.watched import Small, batches, dense_norm, trained


def whole(model):
    return torch.compile(model, backend="eager", fullgraph=True)


def in_place(model):
    model.compile(backend="eager", fullgraph=True)
    return model


def parts(model):
    model.dot = torch.compile(model.dot, backend="eager")
    model.cosine.compile(backend="eager")
    return model


def late(model):
    compiled = whole(model)
    compiled(batches(1)[0])
    return compiled


def train(wrap, watched, layers=None):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Small().train()
    called = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = ls.SmoothnessMonitor(called, layers, every=2, tol=1e-5) if watched else None
    losses = trained(called, optimizer, batches(3), monitor)
    graphs = counters["stats"]["unique_graphs"]
    return losses, model.state_dict(), torch.get_rng_state(), graphs, monitor, copy.deepcopy(model)


for wrap in (late, in_place, parts):
    layers = ["dot", "l2", "cosine", "encoder", "encoder.self_attn"]
    alone, seen = train(wrap, False), train(wrap, True, layers)
    assert alone[0] == seen[0] and alone[3] == seen[3], (wrap, alone[0], seen[0], alone[3], seen[3])
    assert all(torch.equal(alone[1][name], seen[1][name]) for name in alone[1])
    assert torch.equal(alone[2], seen[2])
    expected = [(s, name) for s in (0, 2) for name in layers]
    assert [(r.step, r.layer) for r in seen[4].readings] == expected
    assert all(r.sigma > 0 for r in seen[4].readings)

# The truth: the tokens that reach a layer in evaluation mode, at the weights after the step.
*_, monitor, model = train(whole, True)
exact = copy.deepcopy(model).double().eval()
entering = {}
for name in ("dot", "l2", "cosine"):
    getattr(exact, name).register_forward_pre_hook(
        lambda m, args, name=name: entering.update({name: args[0][0]})
    )
with torch.no_grad():
    exact(batches(3)[-1].double())
for reading in monitor.readings[-4:-1]:
    truth = dense_norm(getattr(exact, reading.layer), entering[reading.layer])
    assert abs(reading.sigma - truth) < 1e-5 * truth, (reading, truth)

# A compiler that the monitor does not know of: one letter a layer, and the training goes on.
torch._dynamo.reset()
torch.manual_seed(0)
model = Small()
monitor = ls.SmoothnessMonitor(model, ["l2"], every=1)
compiled = whole(model)
with warnings.catch_warnings(record=True) as letters:
    warnings.simplefilter("always")
    for X in batches(2):
        compiled(X).sum().backward()
        assert monitor.step() == []
told = [str(w.message) for w in letters if w.category is SmoothnessWarning]
assert told == [f"step 0: no readings of l2: {NOT_RUN}"], told
# A call that cannot be kept: the training's own goes through, and a warning is issued.
class Unkeepable(torch.Tensor):
    def clone(self):
        raise RuntimeError("no copy of this")


model = in_place(Small())
monitor = ls.SmoothnessMonitor(model, ["l2"], every=1)
(entry,) = monitor.watch._entries
entry._last(model, (batches(1)[0].as_subclass(Unkeepable),), {})
with warnings.catch_warnings(record=True) as letters:
    warnings.simplefilter("always")
    (reading,) = monitor.step()
assert reading.status == "no copy of this" and reading.sigma != reading.sigma, reading
assert [str(w.message) for w in letters] == ["step 0: no readings of l2: no copy of this"], letters

for wrapped in (compiled, parts(Small())):
    try:
        ls.convert_model(wrapped, "l2", batches(1)[0])
        raise AssertionError("converted under the compiler's feet")
    except ls.UserError as error:
        assert "wrapped in torch.compile" in str(error) and "then wrap it" in str(error), error
print("watched")
"""


@pytest.mark.wide
def test_compiled_models_are_measured_from_outside_and_notice_nothing():
    """In a fresh interpreter, without the shape checks that only tests have."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=280
    )
    assert done.stdout.strip() == "watched", done.stderr
