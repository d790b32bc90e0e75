"""Sound, and models that read more than one input: against dense Jacobians of the whole model."""

import pytest
import torch
import transformers
from transformers import (
    CLIPConfig,
    CLIPModel,
    OneFormerConfig,
    OneFormerModel,
    SwinConfig,
    SwinModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

from lipscope._types import UserError
from lipscope.linalg.local import local_lipschitz
from lipscope.models._transformers_internals import CONFIG_MAPPING, random_model
from lipscope.models.loading import load
from tests.models.small import small_configs
from tests.models.truth import Truth

SOUND = {"input_values": torch.randn(1, 1200, generator=torch.Generator().manual_seed(0))}
PICTURE = {
    "input_ids": torch.tensor([[1, 5, 7, 2]]),
    "pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
}
KINDS = {
    "sound": (Wav2Vec2Config, Wav2Vec2Model, SOUND, "encoder.layers.0"),
    "picture": (CLIPConfig, CLIPModel, PICTURE, "vision_model.encoder.layers.0"),
    "caption": (CLIPConfig, CLIPModel, PICTURE, "text_model.encoder.layers.0"),
}


def build(kind):
    config, model, inputs, path = KINDS[kind]
    torch.manual_seed(1)
    return random_model(model, next(small_configs(config))).eval(), inputs, path


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_measured_as_the_dense_jacobian_says(kind):
    module, inputs, path = build(kind)
    sites = load(module).sites(inputs=inputs, scopes=["block"])
    block = module.get_submodule(path)
    (site,) = [site for site in sites if site.f.module is block]
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    J = Truth(module).jacobian(wide, path, 0, (path, "output"))
    found = local_lipschitz(site.f, site.X[0], tol=1e-9)
    assert found.value == pytest.approx(torch.linalg.matrix_norm(J, 2).item(), rel=1e-8)


def test_a_batch_of_pairs_is_measured_pair_by_pair():
    module, inputs, _ = build("caption")
    twice = {name: torch.cat([x, x.flip(-1)]) for name, x in inputs.items()}
    model = load(module)
    for both, alone in zip(
        model.sites(inputs=twice, scopes=["attention"]),
        model.sites(inputs=inputs, scopes=["attention"]),
        strict=True,
    ):
        torch.testing.assert_close(both.value()[:1], alone.value(), rtol=1e-12, atol=1e-12)


def test_scores_are_no_hidden_states():
    module, inputs, _ = build("picture")
    model = load(module)
    with pytest.raises(UserError, match="returns no hidden states, so scope model"):
        model.sites(inputs=inputs, scopes=["model"])


def test_without_inputs_the_error_says_how():
    with pytest.raises(UserError, match=r"reads input_values.*sites\(inputs=\{'input_values'"):
        load(build("sound")[0]).layers  # noqa: B018
    with pytest.raises(UserError, match=r"needs more inputs, give them all.*sites\(inputs="):
        load(build("picture")[0]).layers  # noqa: B018


@pytest.mark.wide
def test_windows_of_a_picture_are_not_taken_for_samples():
    """Swin runs attention on windows, shifted ones with a mask each, not on all tokens."""
    torch.manual_seed(0)
    config = SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4
    )
    module = SwinModel(config)
    model, pixels = load(module), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    for scope in ("heads", "attention", "normed"):
        with pytest.raises(UserError, match=r"cuts a sample into 4 sequences.*use scope residual"):
            model.sites(pixel_values=pixels, scopes=[scope])
    site = model.sites(pixel_values=pixels, scopes=["block"])[1]
    path = "encoder.layers.0.blocks.1"
    J = Truth(module).jacobian({"pixel_values": pixels[:1]}, path, 0, (path, "output"))
    found = local_lipschitz(site.f, site.X, tol=1e-9)[0]
    assert found.value == pytest.approx(torch.linalg.matrix_norm(J, 2).item(), rel=1e-8)


def test_several_main_inputs_are_named():
    """OneFormer has a list of them where others have a name."""
    config = next(small_configs(OneFormerConfig))
    model = load(random_model(OneFormerModel, config).eval())
    with pytest.raises(UserError, match=r"reads pixel_values and task_inputs.*'task_inputs': tens"):
        model.layers  # noqa: B018


@pytest.mark.skipif(not hasattr(transformers, "NeoMMEModel"), reason="newer than transformers here")
def test_attention_with_an_embedding_of_its_own_needs_two_samples():
    """NeoMME adds value embeddings of the tokens: copies of one sample lack them."""
    torch.manual_seed(0)
    config = next(small_configs(CONFIG_MAPPING["neomme"]))
    model = load(random_model(transformers.NeoMMEModel, config).eval())
    ids = torch.arange(8).reshape(2, 4)
    (alone,) = model.sites(ids[:1], scopes=["heads"], layers=[1])
    with pytest.raises(UserError, match=r"copies of one sample.*give two samples"):
        local_lipschitz(alone.f, alone.X)
    (both,) = model.sites(ids, scopes=["heads"], layers=[1])
    found = local_lipschitz(both.f, both.X)
    assert len(found) == len(both.members) == 2 * model.heads
    assert all(status.ok for status in found.status)
