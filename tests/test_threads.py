"""One live model, several threads: the numbers of one thread, and the model as it was."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import lipscope as ls
from lipscope.study.probe import threads_for
from lipscope.train.watched_modules import ModuleWatch

CONFIG = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}

IDS = torch.tensor([[(7 * i * i + 3 * i + 1) % 37 for i in range(24)]])


@pytest.fixture
def model() -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG, attention_dropout=0.5)
    return LlamaModel._from_config(config, attn_implementation="sdpa").train()


@pytest.fixture(autouse=True)
def _short_turns() -> Iterator[None]:
    """Let threads interrupt each other after a few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def state(model: nn.Module) -> object:
    """What belongs to the owner of a model and a measurement may set."""
    config = model.config
    return (
        config._attn_implementation,
        config.use_cache,
        [part.training for part in model.modules()],
        [(len(part._forward_pre_hooks), len(part._forward_hooks)) for part in model.modules()],
        [(id(p), p.requires_grad, p.grad is None, p._version) for p in model.parameters()],
        [id(b) for b in model.buffers()],
    )


def measured(model: Any) -> object:
    study = ls.measure(model, IDS[0], lengths=[4, 7], samples=1, scopes=["attention", "block"])
    return [(r.scope, r.layer, r.head, r.value, r.lower, r.upper, r.status) for r in study.rows]


def budgeted(model: Any) -> object:
    budget = ls.error_budget(model, IDS, formats="bf16,int8", observe=True)
    totals = [budget.total(name) for name in ("bf16", "int8")]
    return [(t.value, t.low, t.high) for t in totals], sorted(budget.observed.items())


def compared(model: Any) -> object:
    found = ls.check_run(model, copied(model).bfloat16(), IDS)
    return repr(found), found.ok


def copied(model: nn.Module) -> nn.Module:
    """A copy by hand: copy.deepcopy would read the configuration while another thread sets it."""
    port = type(model)(LlamaConfig(**CONFIG))
    port.load_state_dict(model.state_dict())
    return port.eval()


def watched(model: Any) -> object:
    monitor = ls.SmoothnessMonitor(ls.watch(model), every=1)
    try:
        model(IDS)  # a forward pass of the training
        return [(r.layer, r.sigma, r.status) for r in monitor.step()]
    finally:
        monitor.close()


def sited(model: Any) -> object:
    site = ls.load(model).sites(IDS[:, :6], scopes=["residual"], layers=[1])[0]
    upper = ls.local_lipschitz(site.f, site.X[0], solver=ls.Solver(seed=0)).upper
    return upper, [ls.load(model).card.weights for _ in range(20)]


def run_together(calls: list[Callable[[], object]]) -> list[object]:
    """The result, or the error, of each call in a thread of its own, all started at once."""
    results: list[object] = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.wide
def test_threads_measure_one_model_as_one_thread_does(model: LlamaModel) -> None:
    ways = (measured, budgeted, compared, sited)
    expected, before = [way(model) for way in ways], state(model)
    assert run_together([lambda way=way: way(model) for way in ways]) == expected
    assert state(model) == before


@pytest.mark.wide
def test_threads_share_one_loaded_model(model: LlamaModel) -> None:
    expected = measured(ls.load(model))
    shared = ls.load(model)
    assert run_together([lambda: measured(shared)] * 3) == [expected] * 3


def test_settings_of_torch_are_restored_when_calls_overlap() -> None:
    before = torch.get_num_threads(), torch.backends.cuda.flash_sdp_enabled()
    inside, first_left = threading.Event(), threading.Event()

    def first() -> None:
        with threads_for(10**6, threads=3):
            assert inside.wait(10)
        first_left.set()

    def second() -> None:
        with threads_for(10**6, threads=2):
            inside.set()
            assert first_left.wait(10)

    def f(X: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(X[None], X[None], X[None])[0]

    calls = [lambda: ls.local_lipschitz(f, IDS[0, :12].reshape(4, 3).double())] * 3
    run_together([first, second, *calls])
    assert (torch.get_num_threads(), torch.backends.cuda.flash_sdp_enabled()) == before


@pytest.mark.wide
def test_models_that_share_modules_are_measured_one_after_the_other(model: LlamaModel) -> None:
    other = LlamaForCausalLM(model.config)
    other.model = model  # tied: its trunk is the first model
    expected, before = measured(model), state(model)
    found = run_together([lambda: measured(model), lambda: measured(other)])
    assert found == [expected] * 2
    assert state(model) == before


@pytest.mark.wide
def test_a_monitor_does_not_record_measurements(model: LlamaModel) -> None:
    model.eval()
    expected = watched(model)
    monitor = ls.SmoothnessMonitor(ls.watch(model), every=1)
    model(IDS)
    measured(model)  # runs the watched modules on other tokens
    assert [(r.layer, r.sigma, r.status) for r in monitor.step()] == expected
    monitor.close()
    found = run_together([lambda: watched(model), lambda: measured(model)])
    assert found[0] == expected


def test_buffers_of_one_module_are_lent_to_one_thread_at_a_time() -> None:
    torch.manual_seed(0)
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    X, before = torch.randn(5, 8), copy.deepcopy(module.state_dict())
    expected = ls.nn.measured_sigma(module, X).item()
    assert run_together([lambda: ls.nn.measured_sigma(module, X).item()] * 4) == [expected] * 4
    after = module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_hook_that_is_being_removed_does_not_disturb_a_forward_pass(model: LlamaModel) -> None:
    # torch forgets that a hook takes keyword arguments after another thread has fetched the hook.
    attention = nn.MultiheadAttention(8, 2)
    for module, watch in ((model, ls.watch(model)), (attention, ModuleWatch(attention))):
        watch.arm()
        assert module._forward_pre_hooks
        for tap in module._forward_pre_hooks.values():
            tap(module, (IDS,))
        watch.release()


@pytest.mark.parametrize("change", ["mode", "attention", "weights"])
def test_a_model_changed_under_a_measurement_is_refused_and_left(
    model: LlamaModel, change: str
) -> None:
    def step(*_: Any) -> None:
        if change == "mode":
            model.train()
        elif change == "attention":
            model.config._attn_implementation = "eager"
        else:
            with torch.no_grad():
                model.norm.weight.mul_(1.01)

    model.eval()
    loaded = ls.load(model)
    site = loaded.sites(IDS[:, :4], scopes=["block"], layers=[0])[0]
    # In the middle of the forward pass, as another thread would.
    hook = model.layers[0].mlp.register_forward_hook(step)
    with pytest.raises(ls.UserError, match="was changed while it was measured"):
        ls.local_lipschitz(site.f, site.X[0])
    hook.remove()
    assert all(part.training for part in model.modules()) == (change == "mode")
    assert model.config._attn_implementation == ("eager" if change == "attention" else "sdpa")
    assert model.config.use_cache
