"""lipscope's attention inside models: the same values as eager attention, and models restored."""

import copy

import pytest
import torch
from transformers import LevitConfig, LevitModel
from transformers.models.bert.modeling_bert import eager_attention_forward as bert_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager
from transformers.models.t5.modeling_t5 import eager_attention_forward as t5_eager

from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import jacobian
from lipscope.models.attention import NAME, configs, lipscope_attention, listening, using_attention
from lipscope.models.loading import load
from lipscope.models.maps import Float64
from lipscope.models.structure import TOLERANCE
from tests.models.zoo import BYPASSING, FAMILIES, MASKING, make, sample


def last_hidden_state(module, implementation, **inputs):
    with torch.no_grad(), using_attention(module, implementation), Float64():
        return module(**inputs).last_hidden_state


def test_what_a_model_keeps_of_its_weights_is_restored():
    """LeViT keeps attention biases in evaluation mode, here of the dtype of the measurement."""
    sizes = {"hidden_sizes": [8] * 3, "num_attention_heads": [2] * 3, "key_dim": [4] * 3}
    module = LevitModel(LevitConfig(image_size=64, depths=[1] * 3, **sizes)).eval()
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    exact = copy.deepcopy(module)(images).last_hidden_state
    load(module).survey(inputs={"pixel_values": images})
    assert torch.equal(module(images).last_hidden_state, exact)


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
    with pytest.raises(UserError, match=r"its own attention code.*scope block, suffix or model"):
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
    """Attention far beyond the window, where a dropped mask would show; recognised as a window."""
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


class Attention(torch.nn.Module):
    """What eager attention reads of the module that calls it."""

    def __init__(self, sinks=None):
        super().__init__()
        self.sinks, self.num_key_value_groups, self.training = sinks, 1, False


def draw(*shape, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def tensors(dtype=torch.float64):
    return [draw(2, 3, 5, 4, seed=seed, dtype=dtype) for seed in range(3)]


def additive(number, dtype=torch.float64):
    """Queries that see some keys, and, of member 0, one that sees none: every key has `number`."""
    mask = torch.zeros(2, 1, 5, 5, dtype=dtype)
    mask[:, :, :, 3:] = mask[0, :, 2] = number
    return mask


INVISIBLE = [(dtype, torch.finfo(dtype).min) for dtype in (torch.float64, torch.float32)]
INVISIBLE += [(torch.float64, INVISIBLE[1][1]), (torch.float64, -1e30), (torch.float32, -1e9)]


@pytest.mark.parametrize(("dtype", "number"), INVISIBLE)
def test_a_query_that_the_mask_hides_from_every_key_attends_as_in_eager_attention(dtype, number):
    """Its scores are lost beside such a number: all keys weigh the same, or a sink takes all."""
    (q, k, v), mask = tensors(dtype), additive(number, dtype)
    bias, sinks = draw(1, 3, 5, 5, seed=4, dtype=dtype), draw(3, seed=5, dtype=dtype)
    eager = [
        bert_eager(Attention(), q, k, v, mask, scaling=0.5)[0],
        t5_eager(Attention(), q, k, v, mask, scaling=0.5, position_bias=bias)[0],
        gpt_oss_eager(Attention(sinks), q, k, v, mask, scaling=0.5)[0],
    ]
    for given, expected in zip(({}, {"position_bias": bias}, {"s_aux": sinks}), eager, strict=True):
        ours = lipscope_attention(Attention(), q, k, v, mask, scaling=0.5, **given)[0]
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours, expected, rtol=10 * eps, atol=eps)
    uniform = v[0].mean(dim=-2)
    torch.testing.assert_close(eager[0][0, 2], uniform)
    assert eager[2][0, 2].abs().max() == 0


def test_the_derivative_of_a_query_that_sees_no_key_is_that_of_its_values():
    """Eager attention is flat in its scores there, though autograd through it says otherwise."""
    (q, k, v), mask = tensors(), additive(torch.finfo(torch.float64).min)
    d = tensors()[::-1]

    def ours(*x):
        return lipscope_attention(Attention(), *x, mask)[0]

    tangent = torch.func.jvp(ours, (q, k, v), tuple(d))[1]
    torch.testing.assert_close(tangent[0, 2], d[2][0].mean(dim=-2), rtol=1e-14, atol=1e-14)
    moved = [[x + h * e for x, e in zip((q, k, v), d, strict=True)] for h in (1e-6, -1e-6)]
    ahead, behind = (bert_eager(Attention(), *x, mask, scaling=0.5)[0] for x in moved)
    torch.testing.assert_close(tangent, (ahead - behind) / 2e-6, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("number", [-1e4, -1e9, 1e9])
@pytest.mark.parametrize("biased", [False, True])
def test_a_number_that_every_key_of_a_query_has_costs_no_digits(number, biased):
    (q, k, v), shown = tensors(), torch.zeros(2, 1, 5, 5, dtype=torch.float64)
    shown[..., 3:] = -1e9
    mask = shown.clone()
    mask[0, :, 2] += number
    given = {"position_bias": draw(1, 3, 5, 5, seed=4)} if biased else {}
    eager = t5_eager if biased else bert_eager
    ours = lipscope_attention(Attention(), q, k, v, mask, scaling=0.5, **given)[0]
    expected = eager(Attention(), q, k, v, shown, scaling=0.5, **given)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


def test_a_bias_that_hides_keys_by_itself():
    (q, k, v), bias = tensors(), draw(1, 3, 5, 5, seed=4)
    hidden = bias + additive(torch.finfo(torch.float64).min)
    ours = lipscope_attention(Attention(), q, k, v, position_bias=hidden, scaling=0.5)[0]
    expected = t5_eager(Attention(), q, k, v, None, scaling=0.5, position_bias=hidden)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


def caught(*args, **kwargs):
    calls = []
    with listening(lambda call: calls.append(call) or call.output()):
        lipscope_attention(Attention(), *args, **kwargs)
    return calls[0]


def test_the_largest_logit_counts_what_is_left_of_the_mask():
    q, k, v = tensors()
    scores = 0.5 * q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1)
    mask = torch.zeros(2, 1, 5, 5, dtype=torch.float64)
    mask[0, :, 1] = -1e9  # every key alike
    mask[0, :, 2, 0] = -1e9  # no weight
    mask[1, :, 2, :2] = -50.0
    left = torch.tensor([[0.0], [50.0]], dtype=torch.float64)
    call = caught(q, k, v, mask, scaling=0.5)
    torch.testing.assert_close(call.largest_score(), scores + left, rtol=1e-15, atol=0)
    members, heads = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1])
    some = caught(q[members], k[members], v[members], mask[members], scaling=0.5).alone(heads)
    expected = (scores + left)[members, heads]
    torch.testing.assert_close(some.largest_score(), expected, rtol=1e-15, atol=0)
    sinks = torch.tensor([1e9, 80.0, 0.0], dtype=torch.float64)
    call = caught(q, k, v, scaling=0.5, s_aux=sinks)
    expected = scores + torch.tensor([0.0, 80.0, 0.0])
    torch.testing.assert_close(call.largest_score(), expected, rtol=1e-15, atol=0)
    # A softcap bounds what can make up for a mask, and not the terms of a score, which may cancel.
    mask = torch.tensor([0.0, 0.0, 0.0, 0.0, -763.0], dtype=torch.float64).expand(2, 1, 5, 5)
    for softcap, less in ((None, 763.0), (1.0, 0.0)):
        found = caught(q, k, v, mask, scaling=0.5, softcap=softcap).largest_score()
        torch.testing.assert_close(found, scores + less, rtol=1e-15, atol=0)


def test_a_head_alone_keeps_an_expanded_row_of_its_mask():
    q, k, v = tensors()
    mask = draw(2, 1, 1, 5, seed=4).expand(2, 1, 5, 5)
    call, heads = caught(q, k, v, mask), torch.tensor([2, 0])
    assert call.alone(heads).mask.shape == (2, 1, 5)
    torch.testing.assert_close(call.alone(heads).output(), call.output()[torch.arange(2), heads])


def fingerprint(module):
    """Everything an owner could find changed."""
    return {
        "weights": {
            name: (p.data_ptr(), p.dtype, p._version, p.clone())
            for name, p in module.state_dict().items()
        },
        "parameters": {
            name: (id(p), p.requires_grad, p.grad is None) for name, p in module.named_parameters()
        },
        "buffers": {name: (id(b), b.dtype, b._version) for name, b in module.named_buffers()},
        "modes": {name: m.training for name, m in module.named_modules()},
        "hooks": {
            name: [
                *m._forward_hooks.values(),
                *m._forward_pre_hooks.values(),
                *m._backward_hooks.values(),
            ]
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
    scopes = (
        ["block", "model"]
        if name == "falcon"
        else ["heads", "attention", "residual", "block", "model"]
    )
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
