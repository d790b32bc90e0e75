"""A transformers model under watch: looking at it changes nothing in it."""

import pytest
import torch
from torch.nn.utils.parametrizations import spectral_norm

import lipscope as ls
from lipscope.models.character import CharacterConfig, CharacterModel
from lipscope.models.watching import watch
from lipscope.nn.language_model import Architecture
from lipscope.nn.monitor import SmoothnessMonitor
from tests.models import zoo
from tests.nn.watched import unchecked


def character():
    model = CharacterModel(CharacterConfig.of(Architecture(50, "dot", 2, 8, 2, 12, False)))
    return model, model.network.attention_layers()[0].query


def gpt2():
    model = zoo.make("gpt2")
    return model, model.h[0].attn.c_attn


@pytest.mark.parametrize("make", [character, gpt2])
@pytest.mark.parametrize("scope", ["attention", "block"])
@pytest.mark.parametrize("normalize", [spectral_norm, torch.nn.utils.spectral_norm], ids=["parametrization", "hook"])
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


def test_layers_that_cannot_be_meant_are_refused():
    model = zoo.make("gpt2")
    for layers, message in [
        ([], "layers is empty"),
        ("01", r"as in layers=\['01'\], got str"),
        (1, r"as in layers=\[1\], got int"),
        ([1, 1], "layer 1 is asked for 2 times"),
        ([2], "layer 2 does not exist: the model has layers 0 to 1"),
        ([True], "layer True does not exist"),
    ]:
        with unchecked(), pytest.raises(ls.UserError, match=message):
            watch(model, layers)
    assert watch(model, range(1, 2)).names == ("attention.1",)
