"""Wrapped models: data parallelism changes nothing, sharded weights are named, not waited for."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm

import lipscope as ls
from lipscope.nn.wrapped import evaluating
from lipscope.train.monitor import SmoothnessMonitor, SmoothnessWarning
from tests.train.test_undisturbed import run
from tests.train.watched import DIM, HEADS, Kept, Small, batches, dense_norm

ONE_PROCESS = """
import warnings
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
torch.set_num_threads(1)
import lipscope as ls
from lipscope.nn.wrapped import SHARDED
from tests.train.watched import Small, batches, trained
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def train(wrap, watched):
    torch.manual_seed(0)
    model = Small()
    called = wrap(model)
    optimizer = torch.optim.Adam(called.parameters(), 0.01)
    layers = ["dot", "l2", "cosine", "encoder", "encoder.self_attn", called]
    monitor = ls.SmoothnessMonitor(called, layers, every=2) if watched else None
    losses = trained(called, optimizer, batches(3), monitor)
    readings = [(r.step, r.layer, r.sigma) for r in monitor.readings] if watched else None
    return losses, model.state_dict(), readings


def plain(model):
    return model


def parallel(model):
    return nn.parallel.DistributedDataParallel(model)


bare, alone, seen = train(plain, True), train(parallel, False), train(parallel, True)
assert alone[0] == seen[0] and all(torch.equal(alone[1][name], seen[1][name]) for name in alone[1])
assert len(seen[2]) == 12 and seen[2] == bare[2], (seen[2], bare[2])


def sharded(model):
    return fully_shard(model)


def flat(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


for wrap in (parallel, sharded, flat):
    try:
        ls.convert_model(wrap(Small()), "l2", batches(1)[0])
        raise AssertionError(f"converted: {wrap}")
    except ls.UserError as error:
        expected = "wrapped in DistributedDataParallel" if wrap is parallel else SHARDED
        assert expected in str(error), error
    if wrap is parallel:
        continue
    inner = Small()
    model = wrap(inner)
    for known in (model, inner):
        monitor = ls.SmoothnessMonitor(known, ["*l2", "*encoder"], every=1)
        model(batches(1)[0]).sum().backward()
        with warnings.catch_warnings(record=True) as letters:
            warnings.simplefilter("always")
            readings = monitor.step()
        assert [r.status for r in readings] == [SHARDED] * 2, readings
        assert sum(SHARDED in str(w.message) for w in letters) == 2
        monitor.close()
dist.destroy_process_group()
print("undisturbed")
"""


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore")
def test_distributed_data_parallel_changes_nothing_and_shards_are_named():
    done = subprocess.run(
        [sys.executable, "-c", ONE_PROCESS], capture_output=True, text=True, timeout=280
    )
    assert done.stdout.strip() == "undisturbed", done.stderr


TWO_PROCESSES = """
import os, sys, warnings
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
torch.set_num_threads(1)
import lipscope as ls
from lipscope.nn.wrapped import SHARDED
from tests.train.watched import Small, batches
warnings.simplefilter("ignore")
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
for wrap in (
    fully_shard,
    lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    ),
):
    inner = Small()
    model = wrap(inner)
    monitor = ls.SmoothnessMonitor(inner, every=1)
    for X in batches(2):
        model(X).sum().backward()
        if rank == 0:
            assert [r.status for r in monitor.step()] == [SHARDED] * 4, monitor.readings
    monitor.close()
dist.destroy_process_group()
print("together")
"""


@pytest.mark.slow
def test_a_process_that_measures_does_not_wait_for_the_others(tmp_path):
    """The first of two processes reads weights of which it has half; the training continues."""
    commands = [
        [sys.executable, "-c", TWO_PROCESSES, str(rank), str(tmp_path / "store")]
        for rank in range(2)
    ]
    both = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for c in commands
    ]
    try:
        for process in both:
            out, errors = process.communicate(timeout=200)
            assert out.strip() == "together", errors
    finally:
        for process in both:
            process.kill()


def test_weights_whose_storage_was_freed_are_not_touched():
    """As FSDP leaves them between steps."""
    layer = ls.nn.DotSelfAttention(DIM, HEADS)
    model = nn.Sequential(layer)
    monitor = SmoothnessMonitor(model, every=1)
    model(batches(1)[0])
    layer.key.weight.untyped_storage().resize_(0)
    with pytest.warns(
        SmoothnessWarning, match=r"no readings of 0: the weights are sharded among processes"
    ):
        monitor.step()
    with pytest.raises(ls.UserError, match="sharded"):
        ls.convert_model(model, "l2", batches(1)[0])


def test_layers_of_a_wrapped_model_go_by_their_own_names():
    torch.manual_seed(0)
    model = Small()
    wrapped = nn.DataParallel(model)
    for layers in (["l2"], [model.l2], ["l?"]):
        monitor = SmoothnessMonitor(wrapped, layers, every=1)
        wrapped(batches(1)[0])
        assert [r.layer for r in monitor.step()] == ["l2"]
        monitor.close()
    with pytest.raises(
        ls.UserError,
        match=r"wrapped in DataParallel, which would keep using the old layers; convert",
    ):
        ls.convert_model(wrapped, "l2", batches(1)[0])
    with pytest.raises(ls.UserError, match="Small has no layer 'cosin'; did you mean 'cosine'"):
        SmoothnessMonitor(wrapped, ["cosin"])


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
