"""What `lipscope train` leaves behind is a model that transformers loads and lipscope measures."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

import lipscope as ls
from lipscope.nn import ATTENTIONS
from lipscope.papers.charlm.characters import CharacterText
from lipscope.papers.charlm.files import MODEL_CLASS, save_character_model
from lipscope.papers.charlm.language_model import Architecture, CharacterTransformer, make_attention
from lipscope.papers.charlm.pretrained import CharacterConfig, CharacterModel, Routed
from lipscope.papers.charlm.training import Recipe, Training

TEXT = CharacterText.of("she sells sea shells by the sea shore. \n" * 12, 12)
KINDS = [
    ("dot", False, "post"),
    ("l2", False, "pre"),
    ("contractive", False, "none"),
    ("contractive", True, "pre"),
    ("cosine", False, "pre"),
    ("ball", False, "post"),
    ("contractive-ball", True, "none"),
]
IDS = TEXT.held_out[:9]


def architecture(attention: str, invertible: bool, norm: str = "pre") -> Architecture:
    return Architecture(len(TEXT.alphabet), attention, 2, 8, 2, 12, invertible, norm=norm)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def trained(request, tmp_path_factory) -> tuple[CharacterTransformer, Path, ls.Model]:
    """Twenty steps of training, saved and loaded; both models in float64."""
    training = Training(
        TEXT, architecture(*request.param), Recipe(20, 4, 1e-2, 2), torch.device("cpu")
    )
    for _ in range(20):
        training.advance()
    folder = tmp_path_factory.mktemp("trained")
    save_character_model(folder, training.model, TEXT.alphabet)
    return training.model.double(), folder, ls.load(str(folder))


def test_the_loaded_model_says_what_the_trained_one_says(trained):
    model, _, loaded = trained
    with torch.no_grad():
        expected = model.norm(model.trunk(model.embed(IDS[None])))
        found = loaded.trunk(IDS[None]).last_hidden_state
    torch.testing.assert_close(found, expected)
    assert loaded.card.architecture == "CharacterModel"
    assert (loaded.layers, loaded.heads, loaded.max_positions) == (2, 2, 12)


def test_it_runs_on_lipscope_attention_and_agrees_with_eager(trained):
    check = trained[2].preflight
    assert check.routed and check.calls == 2 and check.difference < 1e-12


def test_sigma_is_that_of_dense_autograd_through_the_trained_layer(trained):
    model, _, loaded = trained
    X = model.embed(IDS)
    sites = {site.layer: site for site in loaded.sites(IDS, scopes=("attention",))}
    for i, block in enumerate(model.blocks):
        layer = model.attention_layers()[i]
        before = model.architecture.norm == "pre" and not model.architecture.invertible
        tokens = (block.attention_norm(X) if before else X).detach()
        J = torch.autograd.functional.jacobian(layer, tokens).reshape(72, 72)
        found = ls.local_lipschitz(sites[i].f, sites[i].X)
        assert found.value.item() == pytest.approx(torch.linalg.matrix_norm(J, 2).item(), rel=1e-9)
        torch.testing.assert_close(sites[i].value()[0], layer(tokens))
        X = block(X)


def test_distances_are_measured_in_closed_form(trained):
    model, _, loaded = trained
    closed = model.architecture.attention in ("dot", "l2", "contractive")
    for site in loaded.sites(IDS, scopes=("heads", "attention")):
        f = getattr(site.f, "layer", site.f)
        assert isinstance(f, ls.SelfAttention) == closed
        if closed and model.architecture.attention != "dot":
            assert isinstance(f.kernel, ls.L2)


def test_heads_are_those_of_dense_autograd(trained):
    model, _, loaded = trained
    layer = model.attention_layers()[0]
    site = loaded.sites(IDS, scopes=("heads",), layers=[0], heads=[1])[0]

    def head(x):
        """Head 1 from its weights, before the output projection; contractions scale values."""
        _, _, v = layer.project(x)
        return (layer.weights(x) @ v)[1]

    J = torch.autograd.functional.jacobian(head, site.X[0]).reshape(36, 72)
    assert ls.local_lipschitz(site.f, site.X).value.item() == pytest.approx(
        torch.linalg.matrix_norm(J, 2).item(), rel=1e-9
    )


def sublayer(block, norm, X):
    """Attention with its residual and its norm, spelled out."""
    match norm:
        case "pre":
            return X + block.attention(block.attention_norm(X))
        case "post":
            return block.attention_norm(X + block.attention(X))
        case _:
            return X + block.attention(X)


@pytest.mark.wide
@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_every_scope_of_every_norm_is_that_of_dense_autograd(norm, tmp_path):
    torch.manual_seed(1)
    model = CharacterTransformer(architecture("dot", False, norm))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight += 0.3 * torch.randn_like(weight)
    save_character_model(tmp_path, model, TEXT.alphabet)
    model, loaded = model.double(), ls.load(str(tmp_path))
    X = model.embed(IDS).detach()
    reached = model.blocks[0](X).detach()
    maps = {
        "residual": (1, lambda x: sublayer(model.blocks[1], norm, x), reached),
        "block": (1, model.blocks[1], reached),
        "model": (None, lambda x: model.norm(model.trunk(x)), X),
    }
    if norm == "pre":
        maps["normed"] = (
            1,
            lambda x: model.blocks[1].attention(model.blocks[1].attention_norm(x)),
            reached,
        )
    for scope, (layer, f, tokens) in maps.items():
        site = next(s for s in loaded.sites(IDS, scopes=(scope,)) if s.layer == layer)
        torch.testing.assert_close(site.X[0], tokens)
        J = torch.autograd.functional.jacobian(f, tokens).reshape(72, 72)
        sigma = ls.local_lipschitz(site.f, site.X).value.item()
        assert sigma == pytest.approx(torch.linalg.matrix_norm(J, 2).item(), rel=1e-9), scope


@pytest.mark.parametrize(
    "trained", [kind for kind in KINDS if "contractive" in kind[0]], indirect=True
)
def test_the_constant_of_a_contraction_holds_for_the_loaded_map(trained):
    model, _, loaded = trained
    for site in loaded.sites(IDS, scopes=("attention",)):
        assert (
            ls.local_lipschitz(site.f, 5 * torch.randn_like(site.X)).value.item()
            <= model.architecture.constant
        )


def test_the_folder_is_plain_data(trained):
    _, folder, _ = trained
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    assert isinstance(AutoModel.from_pretrained(folder), CharacterModel)
    assert CharacterModel.__name__ == MODEL_CLASS


def test_the_tokenizer_is_the_alphabet(trained):
    model = trained[2]
    text = "sea\nshe all."
    ids = model.encode(text)
    assert model.tokens(ids) == list(text)
    assert ids == [TEXT.alphabet.index(character) for character in text]
    assert model.tokens(model.encode("sXs")) == ["s", "\N{REPLACEMENT CHARACTER}", "s"]


def test_a_configuration_is_an_architecture():
    for a in (architecture("contractive", True, "none"), architecture("dot", False, "post")):
        assert CharacterConfig.of(a).architecture == a
        assert CharacterConfig.from_dict(CharacterConfig.of(a).to_dict()).architecture == a
    written = CharacterConfig.of(architecture("dot", False)).to_dict()
    sizes = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    assert [written[name] for name in sizes] == [len(TEXT.alphabet), 8, 2, 2, 12]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_of_the_table_is_routed_and_otherwise_the_same(attention):
    a = Architecture(11, attention, 1, 8, 2, 12, constant=0.3)
    made, [layer] = (
        make_attention(a),
        CharacterModel(CharacterConfig.of(a)).network.attention_layers(),
    )
    assert isinstance(layer, Routed) and isinstance(layer, type(made)) and layer.causal
    assert getattr(layer, "constant", None) == getattr(made, "constant", None)


@pytest.mark.parametrize(
    ("trained", "written"), [(KINDS[1], True), (KINDS[2], False)], indirect=["trained"]
)
def test_folders_that_say_whether_there_are_norms_still_load(trained, written, tmp_path):
    model, folder, loaded = trained
    shutil.copytree(folder, tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    assert config["norm"] == model.architecture.norm
    (tmp_path / "old" / "config.json").write_text(json.dumps({**config, "norm": written}))
    found = ls.load(str(tmp_path / "old")).trunk(IDS[None]).last_hidden_state
    assert torch.equal(found, loaded.trunk(IDS[None]).last_hidden_state)


def test_random_weights_are_the_model_s_own():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = CharacterTransformer(architecture("l2", False))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = CharacterModel(CharacterConfig.of(architecture("l2", False)))
    for (name, a), (_, b) in zip(
        expected.named_parameters(), model.network.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
