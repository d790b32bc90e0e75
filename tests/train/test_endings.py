"""A monitor ends with its last reference or its model, and copies of the model lack it."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from lipscope.train.monitor import SmoothnessMonitor, SmoothnessWarning
from lipscope.train.watched_models import watch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 8)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.last(self.attention(X, X, X)[0])


def plain() -> tuple[nn.Module, SmoothnessMonitor, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    return model, SmoothnessMonitor(model, ["attention", "last"], every=1), torch.randn(2, 4, 8)


def compiled() -> tuple[nn.Module, SmoothnessMonitor, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.compile(Net(), backend="eager")
    return model, SmoothnessMonitor(model, ["attention"], every=1), torch.randn(2, 4, 8)


def compiled_in_place() -> tuple[nn.Module, SmoothnessMonitor, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    model.compile(backend="eager")
    return model, SmoothnessMonitor(model, ["attention"], every=1), torch.randn(2, 4, 8)


def llama() -> tuple[nn.Module, SmoothnessMonitor, torch.Tensor]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaModel(config)
    return model, SmoothnessMonitor(watch(model), every=1), torch.arange(8)[None]


def traces(model: nn.Module) -> list[str]:
    """What a hook leaves on a module, by torch's own tables and anything new among attributes."""
    usual = set(vars(nn.Linear(1, 1))) | set(vars(type(model)))
    return [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if ("hook" in attribute and value)
        or (attribute.startswith("__") and attribute not in usual)
    ]


@pytest.mark.parametrize("build", [plain, llama, compiled])
def test_nothing_is_left_after_del(build):
    model, monitor, X = build()
    model(X)
    assert traces(model)
    del monitor
    assert traces(model) == []


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("build", [plain, llama, compiled, compiled_in_place])
def test_a_deleted_model_is_freed(build, steps):
    model, monitor, X = build()
    for _ in range(steps):
        model(X)
        assert monitor.step()
    model(X)  # recorded, not measured
    gone = [weakref.ref(module) for module in model.modules()]
    gone += [weakref.ref(weight) for weight in model.parameters()]
    del model
    torch.compiler.reset()  # the compiler keeps the models it has compiled
    gc.collect()
    assert not any(reference() is not None for reference in gone)
    with pytest.warns(SmoothnessWarning, match="deleted layers: the model was deleted") as caught:
        assert monitor.step() == []
    assert len(caught) == 1
    again = copy.deepcopy(monitor)
    monitor.before(9)
    assert monitor.step() == [] and again.step() == []  # without a second warning
    monitor.close()


def test_a_replaced_layer_is_freed_and_the_others_are_measured():
    model, monitor, X = plain()
    gone = weakref.ref(model.last)
    model.last = nn.Linear(8, 8)
    assert gone() is None
    model(X)
    with pytest.warns(SmoothnessWarning, match="layers of it were replaced"):
        assert [reading.layer for reading in monitor.step()] == ["attention"]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("build", [plain, llama, compiled, compiled_in_place])
def test_two_monitors_end_in_any_order(build, first):
    model, monitor, X = build()
    call = vars(model).get("_compiled_call_impl")
    if build is llama:
        monitors = [monitor, SmoothnessMonitor(watch(model), every=1)]
    else:
        monitors = [monitor, SmoothnessMonitor(model, ["attention"], every=1)]
    monitor.close()
    monitor.before(0)
    del monitor
    del monitors[first]
    model(X)
    assert len(monitors[0].step()) == len(monitors[0].watch.names)
    monitors.clear()
    assert traces(model) == []
    after = vars(model).get("_compiled_call_impl")
    assert after is call or after is getattr(call, "inner", None)


@pytest.mark.parametrize("build", [plain, llama, compiled])
def test_copies_of_the_model_are_free_of_the_monitor(build):
    model, monitor, X = build()
    model(X)
    before = traces(model)
    twin = copy.deepcopy(model)
    assert traces(twin) == []
    assert traces(model) == before and len(monitor.step()) == len(monitor.watch.names)
    torch.testing.assert_close(
        dict(twin.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0
    )


@pytest.mark.parametrize("build", [plain, llama])
def test_pickles_of_the_model_are_free_of_the_monitor(build):
    model, _monitor, X = build()
    model(X)
    saved = io.BytesIO()
    torch.save(model, saved)
    assert b"lipscope" not in saved.getvalue()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert traces(pickle.loads(pickle.dumps(model, protocol))) == []


def test_hooks_of_the_user_travel_as_ever():
    model, monitor, X = plain()
    handle = model.attention.register_forward_pre_hook(seen)
    twin = copy.deepcopy(model)
    assert list(twin.attention._forward_pre_hooks.values()) == [seen]
    assert list(pickle.loads(pickle.dumps(model)).attention._forward_pre_hooks.values()) == [seen]
    second = SmoothnessMonitor(model, ["attention"], every=1)
    del monitor
    assert list(copy.deepcopy(model).attention._forward_pre_hooks.values()) == [seen]
    model(X)
    assert len(second.step()) == 1
    handle.remove()
    del second
    assert traces(model) == []


def seen(module: nn.Module, args: object) -> None:
    """A hook of the user."""


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("build", [plain, llama])
def test_a_copied_monitor_measures_the_copied_model(build, again):
    model, monitor, X = build()
    model(X)
    first = monitor.step()
    model.monitor = monitor
    twin = again(model)
    assert twin.monitor.readings == first and twin.monitor.watch.called is twin
    twin.monitor.before(1)
    twin(X)
    measured = twin.monitor.step()
    # The same weights at the same tokens, from the same remembered vectors.
    model(X)
    assert [r.sigma for r in measured] == [r.sigma for r in monitor.step()]
