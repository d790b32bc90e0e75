"""The same numbers on a GPU."""

import pytest
import torch

from lipscope.linalg.differentiate import jacobian
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.models.loading import load
from lipscope.models.scopes import SCOPES
from tests.models.zoo import FAMILIES, make, sample


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_the_gpu_measures_what_the_cpu_measures(name):
    family, inputs = FAMILIES[name], sample(name, batch=3)
    has = {"normed": family.prenorm, "residual": family.parts["residual"] is not None}
    scopes = [scope for scope in SCOPES if has.get(scope, True)]
    here, there = load(make(name)), load(make(name).cuda())
    pairs = zip(here.sites(**inputs, scopes=scopes), there.sites(**inputs, scopes=scopes), strict=True)
    for a, b in pairs:
        assert b.X.is_cuda and not a.X.is_cuda
        torch.testing.assert_close(b.radius, a.radius)
        slow, fast = (spectral_norm(jacobian(site.f, site.X), 1e-8, solver=Solver(seed=0)) for site in (a, b))
        torch.testing.assert_close(fast.value, slow.value, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
def test_a_model_is_loaded_onto_the_gpu(tmp_path):
    make("llama").save_pretrained(tmp_path)
    model = load(str(tmp_path), device="cuda")
    assert model.device.type == "cuda" and model.card.device.startswith("cuda")
    assert model.preflight.difference < 1e-13
