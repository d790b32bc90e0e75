"""A watched transformers model: its constants are right, and watching changes nothing in it."""

import math

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import lipscope as ls
from lipscope.papers.charlm.language_model import Architecture
from lipscope.papers.charlm.pretrained import CharacterConfig, CharacterModel
from lipscope.train.monitor import SmoothnessMonitor, SmoothnessWarning
from lipscope.train.watched_models import watch
from tests.models import zoo
from tests.train.watched import unchecked


def character():
    model = CharacterModel(CharacterConfig.of(Architecture(50, "dot", 2, 8, 2, 12, False)))
    return model, model.network.attention_layers()[0].query


def gpt2():
    model = zoo.make("gpt2")
    return model, model.h[0].attn.c_attn


def test_watched_constants_are_those_of_the_model_measured_by_itself():
    model = zoo.make("llama")
    random = torch.get_rng_state()
    monitor = SmoothnessMonitor(watch(model, [1, 0]), every=1, tol=1e-6)
    inputs = zoo.sample("llama")
    model.train()
    for seed in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
        model(**inputs)
        readings = monitor.step()
        truth = ls.load(model)
        for reading, layer in zip(readings, (1, 0), strict=True):
            (site,) = truth.sites(inputs["input_ids"][:1], scopes=["attention"], layers=[layer])
            exact = ls.local_lipschitz(site.f, site.X).value.item()
            assert reading.layer == f"attention.{layer}"
            assert reading.sigma == pytest.approx(exact, rel=1e-5)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training and model.config._attn_implementation != "lipscope"


@pytest.mark.parametrize("scope", ["normed", "residual", "block"])
def test_other_scopes_are_watched_too(scope):
    model = zoo.make("gpt2")
    monitor = SmoothnessMonitor(watch(model, [1], scope), every=1, tol=1e-5)
    inputs = zoo.sample("gpt2")
    model(**inputs)
    (reading,) = monitor.step()
    (site,) = ls.load(model).sites(inputs["input_ids"][:1], scopes=[scope], layers=[1])
    assert reading.sigma == pytest.approx(ls.local_lipschitz(site.f, site.X).value.item(), rel=1e-4)


def test_padding_is_cut_off():
    model = zoo.make("bert")
    monitor = SmoothnessMonitor(watch(model, [0]), every=1, tol=1e-5)
    ids = zoo.sample("bert", n=7)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    model(input_ids=ids, attention_mask=mask)
    (reading,) = monitor.step()
    (site,) = ls.load(model).sites(ids[:1, :4], scopes=["attention"], layers=[0])
    assert reading.tokens == 4
    assert reading.sigma == pytest.approx(ls.local_lipschitz(site.f, site.X).value.item(), rel=1e-4)


def test_what_cannot_be_watched_is_said():
    with pytest.raises(ls.UserError, match="watch takes a transformers model, got Linear"):
        watch(nn.Linear(2, 2))
    with pytest.raises(ls.UserError, match="no scope 'heads' to watch"):
        watch(zoo.make("gpt2"), scope="heads")
    with pytest.raises(ls.UserError, match="layer 2 does not exist"):
        watch(zoo.make("gpt2"), [2])
    with pytest.raises(ls.UserError, match="its own attention code"):
        watch(zoo.make("gpt_neo"))


@pytest.mark.parametrize("make", [character, gpt2])
@pytest.mark.parametrize("scope", ["attention", "block"])
@pytest.mark.parametrize(
    "normalize", [spectral_norm, nn.utils.spectral_norm], ids=["parametrization", "hook"]
)
def test_weights_that_torch_normalizes_stay_as_they_are(make, scope, normalize):
    torch.manual_seed(0)
    model, layer = make()
    normalize(layer)
    model.train()
    monitor = SmoothnessMonitor(watch(model, scope=scope), every=1)
    model(zoo.sample("gpt2")["input_ids"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = vars(layer).get("weight")
    assert all(reading.sigma > 0 for reading in monitor.step())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert vars(layer).get("weight") is made and (made is None) == (normalize is spectral_norm)
    assert all(module.training for module in model.modules())


@pytest.mark.wide
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_watched_from_outside(in_place):
    torch.manual_seed(0)
    model, ids = zoo.make("gpt2").train(), zoo.sample("gpt2")["input_ids"]
    plain = SmoothnessMonitor(watch(model), every=1)
    model(ids)
    expected = plain.step()
    plain.close()
    compiled = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    compiled(ids)
    monitor = SmoothnessMonitor(watch(compiled), every=1)
    compiled(ids)
    readings = monitor.step()
    assert [(r.layer, r.sigma) for r in readings] == [(r.layer, r.sigma) for r in expected]
    monitor.close()
    assert not model._forward_pre_hooks and not model._forward_hooks


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [("albert", None), ("gpt2", None), ("gpt2", False), ("gpt2", True)],
    ids=["albert", "gpt2", "checkpoint", "reentrant checkpoint"],
)
def test_each_depth_is_measured_at_its_own_tokens_also_where_one_block_serves_all(name, reentrant):
    model = zoo.make(name).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert model.is_gradient_checkpointing
    monitor = SmoothnessMonitor(watch(model), every=1, tol=1e-5)
    calls = []
    model.get_submodule(zoo.FAMILIES[name].parts["core"].format(0)).register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(torch.is_grad_enabled()), with_kwargs=True
    )
    ids = zoo.sample(name)["input_ids"]
    model(input_ids=ids).last_hidden_state.square().sum().backward()
    assert len(calls) == (2 if name == "albert" else 1) * (1 if reentrant is None else 2)
    readings = monitor.step()
    sites = ls.load(model).sites(ids[:1], scopes=["attention"])
    truth = [ls.local_lipschitz(site.f, site.X).value.item() for site in sites]
    assert [r.sigma for r in readings] == pytest.approx(truth, rel=1e-4)
    assert abs(truth[0] - truth[1]) > 1e-2 * truth[0]


def test_a_model_that_runs_several_times_is_measured_at_its_last_call_in_the_forward_pass():
    model = zoo.make("gpt2")
    monitor = SmoothnessMonitor(watch(model, [0]), every=1, tol=1e-5)
    first, last = (zoo.sample("gpt2", n=n)["input_ids"] for n in (4, 6))
    sums = [
        checkpoint(
            lambda x: model(input_ids=x).last_hidden_state.square().sum(), x, use_reentrant=False
        )
        for x in (first, last)
    ]
    sum(sums).backward()
    (reading,) = monitor.step()
    (site,) = ls.load(model).sites(last[:1], scopes=["attention"], layers=[0])
    assert reading.tokens == 6
    assert reading.sigma == pytest.approx(ls.local_lipschitz(site.f, site.X).value.item(), rel=1e-4)


class Odd(transformers.GPT2Model):
    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids=input_ids)


def test_a_call_that_cannot_be_kept_runs_as_it_would_unwatched():
    model = Odd(zoo.make("gpt2").config).eval()
    ids, mask = zoo.sample("gpt2")["input_ids"], torch.tensor(1)
    expected = model(ids, attention_mask=mask).last_hidden_state
    monitor = SmoothnessMonitor(watch(model, [0]), every=1)
    assert torch.equal(model(ids, attention_mask=mask).last_hidden_state, expected)
    with pytest.warns(
        SmoothnessWarning,
        match=r"no readings of attention.0: slice\(\) cannot be applied to a 0-dim",
    ):
        assert math.isnan(monitor.step()[0].sigma)
    model(ids)
    assert monitor.step()[0].sigma > 0


def test_layers_that_cannot_be_meant_are_refused():
    model = zoo.make("gpt2")
    for layers, message in [
        ([], "layers is empty"),
        ("01", r"as in layers=\['01'\], got str"),
        (1, r"as in layers=\[1\], got int"),
        ([1, 1], "layer 1 is listed 2 times"),
        ([2], "layer 2 does not exist: the model has layers 0 to 1"),
        ([True], "layer True does not exist"),
    ]:
        with unchecked(), pytest.raises(ls.UserError, match=message):
            watch(model, layers)
    assert watch(model, range(1, 2)).names == ("attention.1",)
