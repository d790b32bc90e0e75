"""Plain masks are recognised as what they are, and never written down on the way to attention."""

from dataclasses import replace

import pytest
import torch
from torch.func import jvp, vjp
from transformers import (
    Llama4TextConfig,
    Llama4TextModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    masking_utils,
)
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function, sdpa_mask

from lipscope.attention.layer import HeadsApart
from lipscope.linalg.differentiate import jacobian
from lipscope.models import attention, closed_form
from lipscope.models.attention import (
    AttentionCall,
    PlainMask,
    Rule,
    lipscope_mask,
    listening,
    using_attention,
)
from lipscope.models.loading import load
from lipscope.models.maps import Float64, Heads
from tests.models.truth import Truth
from tests.models.zoo import make, sample

WINDOW = masking_utils.sliding_window_causal_mask_function
BOTH_WAYS = masking_utils.bidirectional_mask_function
TWO_SIDED = masking_utils.sliding_window_bidirectional_mask_function
CHUNKS = chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))


def arguments(rule, n: int, batch: int = 2, **more) -> dict:
    return {"batch_size": batch, "q_length": n, "kv_length": n, "mask_function": rule, **more}


@pytest.fixture(params=[1, 50, 1 << 26])
def rows(request, monkeypatch):
    monkeypatch.setattr(attention, "ROWS", request.param)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("rule", "size", "expected"),
    [
        (causal_mask_function, None, Rule(causal=True)),
        (WINDOW(3), 3, Rule(causal=True, window=3)),
        (WINDOW(30), 30, Rule(causal=True)),
        (BOTH_WAYS, None, Rule()),
        (TWO_SIDED(3), 3, Rule(causal=True, window=7, ahead=3)),
        (TWO_SIDED(30), 30, Rule()),
        (CHUNKS, 4, Rule(causal=True, chunk=4)),
    ],
)
def test_plain_masks_are_told(rule, size, expected):
    mask = lipscope_mask(**arguments(rule, 11, local_size=size))
    assert isinstance(mask, PlainMask) and mask.shape == (2, 1, 11, 11) and mask.dtype == torch.bool
    assert vars(mask.rule) == vars(expected)
    dense = sdpa_mask(**arguments(rule, 11), allow_is_causal_skip=False)
    assert torch.equal(mask, dense) and torch.equal(mask[1:, :, 4:], dense[1:, :, 4:])
    assert torch.equal(
        mask.of_members(torch.zeros(5, dtype=torch.int64)) & True,
        dense[:1].expand(5, -1, -1, -1),
    )


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("rule", "size"), [(WINDOW(3), 4), (WINDOW(5), 6), (TWO_SIDED(3), 4), (CHUNKS, 3)]
)
def test_other_masks_are_what_transformers_makes(rule, size):
    """A window or chunk of unknown size is written down."""
    given = arguments(rule, 11, local_size=size)
    mask = lipscope_mask(**given)
    assert not isinstance(mask, PlainMask) and torch.equal(
        mask, sdpa_mask(**given, allow_is_causal_skip=False)
    )


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("position", [0, 5, 10])
@pytest.mark.parametrize(
    ("rule", "size"), [(causal_mask_function, None), (BOTH_WAYS, None), (WINDOW(3), 3), (CHUNKS, 4)]
)
def test_padding_is_a_row_of_keys(rule, size, position):
    real = torch.ones(2, 11, dtype=torch.bool)
    real[1, position] = False
    given = arguments(rule, 11, attention_mask=real, local_size=size)
    mask = lipscope_mask(**given)
    assert isinstance(mask, PlainMask) and mask.rule.real.shape == (2, 1, 1, 11)
    dense = sdpa_mask(**given, allow_is_causal_skip=False)
    assert torch.equal(mask, dense)
    members = torch.tensor([1, 0, 1])
    assert torch.equal(mask.of_members(members) & True, dense[members])


def test_as_many_keys_as_queries_or_no_plain_mask():
    given = arguments(causal_mask_function, 4) | {"kv_length": 7, "q_offset": 3}
    assert torch.equal(lipscope_mask(**given), sdpa_mask(**given, allow_is_causal_skip=False))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_nothing_on_the_way_writes_a_plain_mask_down(name, monkeypatch):
    model = load(make(name))
    assert model.preflight.routed

    def forbidden(mask):
        raise AssertionError("written down")

    monkeypatch.setattr(PlainMask, "written", forbidden)
    scopes = ["heads", "attention", "normed", "residual", "block", "model"]
    for site in model.sites(**sample(name, batch=2, n=6), scopes=scopes):
        J = jacobian(site.f, site.X)
        J.mv(torch.ones(*J.leading, *J.in_shape, dtype=J.dtype))


def windowed() -> PreTrainedModel:
    """Two layers of three see two tokens on either side."""
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    special = {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4}
    return ModernBertModel(ModernBertConfig(**SMALL, num_hidden_layers=3, **ids, **special))


def chunked() -> PreTrainedModel:
    """Three layers of four see the tokens before them in their chunk."""
    heads = {"num_key_value_heads": 1, "head_dim": 4, "attention_chunk_size": 4}
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 12}
    return Llama4TextModel(Llama4TextConfig(**SMALL, num_hidden_layers=4, **heads, **experts))


def moved(make_model) -> PreTrainedModel:
    """A model with weights that are large enough to matter."""
    torch.manual_seed(0)
    model = make_model().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


SMALL = {
    "vocab_size": 50,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make_model", [windowed, chunked])
def test_windows_and_chunks_of_models_are_those_of_eager_attention(make_model, padded, monkeypatch):
    model = moved(make_model)
    ids, real = torch.randint(3, 50, (2, 15)), torch.ones(2, 15, dtype=torch.int64)
    if padded:  # every window keeps a real token: without one, eager attention gives NaN
        real[0, 13:] = 0
    with using_attention(model, "eager"), Float64():  # models compute parts in float32
        eager = model(input_ids=ids, attention_mask=real).last_hidden_state
    rules = []

    def note(call):
        rules.append((call.ahead, call.chunk))
        assert call.mask is None or call.mask.shape == (2, 1, 1, 15)
        # In value and derivatives, the rule is the mask it stands for.
        point = call.q, call.k, call.v
        tangent = tuple(map(torch.randn_like, point))

        def by_rule(q, k, v):
            return replace(call, q=q, k=k, v=v).output()

        def by_mask(q, k, v):
            return replace(call.with_mask(15), q=q, k=k, v=v).output()

        for x, y in zip(jvp(by_rule, point, tangent), jvp(by_mask, point, tangent), strict=True):
            torch.testing.assert_close(x, y)
        g = torch.randn_like(call.output())
        for x, y in zip(vjp(by_rule, *point)[1](g), vjp(by_mask, *point)[1](g), strict=True):
            torch.testing.assert_close(x, y)
        return call.output()

    def forbidden(mask):
        raise AssertionError("written down")

    with monkeypatch.context() as patch, using_attention(model), Float64(), listening(note):
        patch.setattr(PlainMask, "written", forbidden)
        mine = model(input_ids=ids, attention_mask=real).last_hidden_state
    assert ((2, None) if make_model is windowed else (0, 4)) in rules
    torch.testing.assert_close(mine[real.bool()], eager[real.bool()])


@pytest.mark.wide
@pytest.mark.parametrize("large", [closed_form.LARGE, 100], ids=["closed form", "autograd"])
@pytest.mark.parametrize(
    ("make_model", "module"), [(windowed, "layers.1.attn"), (chunked, "layers.1.self_attn")]
)
def test_windows_and_chunks_have_the_constants_of_eager_attention(
    make_model, module, large, monkeypatch
):
    monkeypatch.setattr(closed_form, "LARGE", large)
    model = moved(make_model)
    inputs = {"input_ids": torch.randint(3, 50, (1, 15))}
    places = {
        "attention": (module, (module, "output")),
        "block": ("layers.1", ("layers.1", "output")),
    }
    for site in load(model).sites(**inputs, layers=[1], scopes=list(places)):
        path, tap = places[site.scope]
        dense = Truth(model).jacobian(inputs, path, 0, tap)
        mine = jacobian(site.f, site.X).to_dense().reshape(dense.shape)
        torch.testing.assert_close(mine, dense)


@pytest.mark.wide
@pytest.mark.parametrize("make_model", [windowed, chunked])
def test_long_windows_and_chunks_are_never_written_down(make_model, monkeypatch):
    """At no scope is a mask of n x n made; heads are those of the closed form."""
    inputs = {"input_ids": torch.randint(3, 50, (2, 15))}
    model, scopes = moved(make_model), ["heads", "attention", "residual", "block"]
    (expected,) = load(model).sites(**inputs, layers=[1], scopes=["heads"])
    monkeypatch.setattr(closed_form, "LARGE", 100)

    def forbidden(*_):
        raise AssertionError("written down")

    network = load(model)
    with monkeypatch.context() as patch:
        patch.setattr(PlainMask, "written", forbidden)
        patch.setattr(AttentionCall, "with_mask", forbidden)
        heads, *others = network.sites(**inputs, layers=[1], scopes=scopes)
        truth = jacobian(expected.f, expected.X).to_dense()
        torch.testing.assert_close(jacobian(heads.f, heads.X).to_dense(), truth)
        for site in others:
            J = jacobian(site.f, site.X)
            J.mv(torch.ones(*J.leading, *J.in_shape, dtype=J.dtype))
    # A shorter text has its closed form all the same. Llama 4 has none: it normalises queries.
    short = {"input_ids": inputs["input_ids"][:, :9]}
    (site,) = network.sites(**short, layers=[1], scopes=["heads"])
    assert type(site.f) is type(expected.f) is (HeadsApart if make_model is windowed else Heads)
