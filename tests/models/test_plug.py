"""lipscope's attention inside models: the same values as eager attention, and no trace left behind."""

import copy

import pytest
import torch

from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import jacobian
from lipscope.models.loading import load
from lipscope.models.plug import NAME, configs, lipscope_attention, plugged
from lipscope.models.precision import Float64
from lipscope.models.preflight import TOLERANCE
from tests.models.zoo import BYPASSING, FAMILIES, MASKING, make, sample


def last_hidden_state(module, implementation, **inputs):
    with torch.no_grad(), plugged(module, implementation), Float64():
        return module(**inputs).last_hidden_state


@pytest.mark.parametrize("name", FAMILIES)
def test_the_preflight_finds_every_call_and_no_difference(name):
    check = load(make(name)).preflight
    assert check.routed and check.calls == 2
    assert check.difference <= 1e-14 < TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", BYPASSING)
def test_the_preflight_tells_models_with_attention_of_their_own(name):
    model = load(make(name))
    assert not model.preflight.routed and model.preflight.calls == 0 and model.heads == 0
    assert type(model.trunk).__name__ in model.preflight.reason
    with pytest.raises(UserError, match=r"attention code of its own.*scope block or model"):
        model.sites(**sample(name))


@pytest.mark.parametrize("name", MASKING)
def test_a_mask_that_depends_on_the_input_is_told_too(name):
    model = load(make(name))
    assert not model.preflight.routed and "depends on the input" in model.preflight.reason
    for site in model.sites(**sample(name), scopes=["block"]):
        jacobian(site.f, site.X)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "vit"])
def test_padding_is_respected_as_in_eager_attention(name):
    """On the left, where causal order alone would not hide it."""
    module, ids = make(name).double().requires_grad_(False), sample(name, batch=2, n=7)["input_ids"]
    real = torch.ones_like(ids)
    real[0, :2] = 0
    inputs = {"input_ids": ids, "attention_mask": real}
    ours, eager = (last_hidden_state(module, kind, **inputs) for kind in (NAME, "eager"))
    unpadded = last_hidden_state(module, NAME, input_ids=ids)
    torch.testing.assert_close(ours[real.bool()], eager[real.bool()], rtol=1e-11, atol=1e-12)
    assert not torch.allclose(ours[real.bool()], unpadded[real.bool()], atol=1e-6)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_a_window_is_told_by_its_mask(name):
    """Attention far beyond the window, where a dropped mask would show; found in closed form as a window."""
    module = make(name).double().requires_grad_(False)
    inputs = sample(name, batch=1, n=20)
    ours, eager = (last_hidden_state(module, kind, **inputs) for kind in (NAME, "eager"))
    torch.testing.assert_close(ours, eager, rtol=1e-11, atol=1e-12)
    maps = [site.f for site in load(module).sites(**inputs, scopes=["attention"])]
    windows = {f.window for f in maps if isinstance(f, SelfAttention)}
    assert windows == ({3} if name == "mistral" else {3, None})


def test_dropout_is_refused():
    q = torch.zeros(1, 1, 2, 2)
    with pytest.raises(UserError, match=r"dropout 0\.1"):
        lipscope_attention(torch.nn.Identity(), q, q, q, dropout=0.1)


def test_a_bias_that_depends_on_the_input_is_refused():
    q = torch.zeros(1, 1, 2, 2)
    bias = torch.zeros(1, 1, 2, 2, requires_grad=True)
    with pytest.raises(UserError, match="bias to its scores that depends on the input"):
        lipscope_attention(torch.nn.Identity(), q, q, q, position_bias=2 * bias)


def fingerprint(module):
    """Everything an owner could find changed."""
    return {
        "weights": {name: (p.data_ptr(), p.dtype, p._version, p.clone()) for name, p in module.state_dict().items()},
        "parameters": {name: (id(p), p.requires_grad, p.grad is None) for name, p in module.named_parameters()},
        "buffers": {name: (id(b), b.dtype, b._version) for name, b in module.named_buffers()},
        "modes": {name: m.training for name, m in module.named_modules()},
        "hooks": {
            name: [*m._forward_hooks.values(), *m._forward_pre_hooks.values(), *m._backward_hooks.values()]
            for name, m in module.named_modules()
        },
        "attributes": {name: sorted(vars(m)) for name, m in module.named_modules()},
        "configs": [copy.deepcopy(vars(config)) for config in configs(module)],
        "random": torch.get_rng_state(),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def lived_in(name):
    """A module in the middle of its owner's work: half trained, partly frozen, hooked."""
    module = make(name).train()
    parameters = list(module.parameters())
    parameters[0].requires_grad_(False)
    parameters[1].grad = torch.ones_like(parameters[1])
    list(module.modules())[2].eval()
    list(module.modules())[3].register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize("name", ["bert", "albert", "llama", "gpt_oss", "t5", "vit", "falcon"])
def test_a_live_module_is_left_exactly_as_it_was(name):
    module = lived_in(name)
    before = fingerprint(module)
    scopes = ["block", "model"] if name == "falcon" else ["heads", "attention", "residual", "block", "model"]
    for site in load(module).sites(**sample(name), scopes=scopes):
        jacobian(site.f, site.X)
    after = fingerprint(module)
    assert [key for key in before if not same(before[key], after[key])] == []


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_live_module_is_left_as_it_was_by_a_failure_too(name):
    module = lived_in(name)
    model = load(module)
    sites = model.sites(**sample(name), scopes=["attention", "block", "model"])
    failing = list(module.modules())[-1]

    def fail(*_):
        raise RuntimeError("planted")

    handle = failing.register_forward_hook(fail)
    before = fingerprint(module)
    with pytest.raises(UserError, match="planted"):
        model.survey(**sample(name, n=4))
    for site in sites[-1:]:
        with pytest.raises(RuntimeError, match="planted"):
            site.f(site.X)
    after = fingerprint(module)
    assert [key for key in before if not same(before[key], after[key])] == []
    handle.remove()


def test_the_owner_goes_on_as_if_nothing_had_happened():
    module, ids = make("llama"), sample("llama")["input_ids"]
    with torch.no_grad():
        before = module(ids).last_hidden_state
        for site in load(module).sites(ids, scopes=["normed"]):
            site.value()
        assert torch.equal(module(ids).last_hidden_state, before)
