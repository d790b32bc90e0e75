"""The same numbers on a GPU."""

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

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
    pairs = zip(
        here.sites(**inputs, scopes=scopes), there.sites(**inputs, scopes=scopes), strict=True
    )
    for a, b in pairs:
        assert b.X.is_cuda and not a.X.is_cuda
        torch.testing.assert_close(b.radius, a.radius)
        slow, fast = (
            spectral_norm(jacobian(site.f, site.X), 1e-8, solver=Solver(seed=0)) for site in (a, b)
        )
        torch.testing.assert_close(fast.value, slow.value, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
def test_a_model_is_loaded_onto_the_gpu(tmp_path):
    make("llama").save_pretrained(tmp_path)
    model = load(str(tmp_path), device="cuda")
    assert model.device.type == "cuda" and model.card.device.startswith("cuda")
    assert model.preflight.difference < 1e-13


@pytest.mark.gpu
def test_a_long_text_needs_memory_like_its_length():
    """A Llama with rotary positions at 16k and 32k tokens; its mask alone would take a gigabyte."""
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1 << 15,
    )
    torch.manual_seed(0)
    model = load(LlamaModel(config).cuda(), dtype="float32")
    model.sites(torch.randint(100, (1, 4096)), scopes=["attention"])
    peaks = []
    for n in (1 << 14, 1 << 15):
        ids = torch.randint(100, (1, n), generator=torch.Generator().manual_seed(n))
        torch.cuda.reset_peak_memory_stats()
        for site in model.sites(ids, scopes=["heads", "attention", "block"], layers=[1]):
            e = spectral_norm(jacobian(site.f, site.X), 1e-2, solver=Solver(seed=0))
            assert all(status.ok for status in e.status)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 2.2 * peaks[0] and peaks[1] < 1 << 30, peaks
