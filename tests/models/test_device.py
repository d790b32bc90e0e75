"""The same numbers on a GPU."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from lipscope.linalg.differentiate import jacobian
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.models.loading import load
from lipscope.models.maps import LONG
from lipscope.models.scopes import SCOPES
from tests.models.zoo import FAMILIES, make, sample


def long_llama(positions: int) -> LlamaModel:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
    )
    torch.manual_seed(0)
    return LlamaModel(config).cuda()


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
def test_a_search_in_bfloat16_ends_at_the_same_number():
    model = load(long_llama(LONG), dtype="float32")
    ids = torch.randint(100, (1, LONG), generator=torch.Generator().manual_seed(0))
    (site,) = model.sites(ids, scopes=["block"], layers=[1])
    J = jacobian(site.f, site.X)
    assert J.low_precision is not None
    found, alone = (
        spectral_norm(j, 1e-4, solver=Solver(seed=0)) for j in (J, replace(J, low_precision=None))
    )
    torch.testing.assert_close(found.value, alone.value, rtol=1e-5, atol=0.0)
    assert all(status.ok for status in found.status)


@pytest.mark.gpu
def test_a_long_text_needs_memory_like_its_length():
    """A Llama with rotary positions at 16k and 32k tokens; its mask alone would take a gigabyte."""
    model = load(long_llama(1 << 15), dtype="float32")
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
