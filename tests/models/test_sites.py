"""Every scope of every family: its value is the module's own, its Jacobian the dense one."""

from functools import cache
from pathlib import Path

import pytest
import torch

from lipscope._types import UserError
from lipscope.attention.layer import HeadsApart, SelfAttention
from lipscope.linalg.differentiate import jacobian
from lipscope.linalg.spectral import spectral_norm
from lipscope.models.loading import load
from lipscope.models.scopes import SCOPES
from tests.models.truth import Truth
from tests.models.zoo import BYPASSING, ENTANGLED, FAMILIES, make, sample

LAYER = 1
ENTRY = {
    "heads": "core",
    "attention": "core",
    "normed": "block",
    "residual": "block",
    "block": "block",
    "suffix": "block",
    "model": "block",
}


@cache
def prepared(name):
    """A live module, in training mode and float32, and its truth; measuring leaves both alone."""
    module = make(name).train()
    return load(module), Truth(module)


def places(name, scope):
    """Where the map begins (path, call) and where it ends, as the zoo knows the family."""
    family = {**FAMILIES, **BYPASSING}[name]
    layer = 0 if scope == "model" else LAYER
    entry = family.parts[ENTRY[scope]].format(layer), layer if family.shared else 0
    projection = family.parts.get("projection", "").format(layer)
    taps = {
        "heads": (projection, "input"),
        "attention": (projection, "output"),
        "normed": (projection, "output"),
        "residual": family.parts.get("residual"),
        "block": (entry[0], "output"),
        "suffix": None,
        "model": None,
    }
    tap = taps[scope]
    return entry, tap and (tap[0].format(layer), tap[1])


def has(name, scope):
    family = FAMILIES.get(name) or BYPASSING[name]
    if name in BYPASSING:
        return scope in ("block", "suffix", "model")
    return {"normed": family.prenorm, "residual": family.parts["residual"] is not None}.get(
        scope, True
    )


ALL = [(name, scope) for name in [*FAMILIES, *BYPASSING] for scope in SCOPES]


@pytest.mark.parametrize(("name", "scope"), [case for case in ALL if has(*case)])
def test_value_and_jacobian_are_the_modules_own(name, scope):
    (model, truth), inputs = prepared(name), sample(name)
    (site,) = model.sites(**inputs, scopes=[scope], layers=[LAYER])
    J, value = jacobian(site.f, site.X), site.value()
    (path, call), tap = places(name, scope)
    dense = J.to_dense()
    for s in range(2):
        alone = {key: x[s : s + 1] for key, x in inputs.items()}
        X = truth.tokens(alone, path, call)
        expected, D = (
            truth.value(alone, path, call, X, tap)[0],
            truth.jacobian(alone, path, call, tap),
        )
        torch.testing.assert_close(site.X[s], X[0], rtol=1e-12, atol=1e-12)
        for r, (member, head) in enumerate(site.members):
            if member != s:
                continue
            size = FAMILIES[name].head_size if head is not None else 0
            cut = slice(None) if head is None else slice(size * head, size * head + size)
            rows = D.view(*expected.shape, -1)[:, cut].reshape(-1, D.shape[1])
            found = value[s] if head is None else value[s, head]
            torch.testing.assert_close(found, expected[:, cut], rtol=1e-10, atol=1e-11)
            assert (dense[r] - rows).norm() <= 1e-11 * rows.norm()


@pytest.mark.parametrize(("name", "scope"), [case for case in ALL if not has(*case)])
def test_a_scope_the_model_does_not_have_is_refused_by_name(name, scope):
    with pytest.raises(UserError, match=rf"scopes? .*\b{scope}\b.* not available"):
        prepared(name)[0].sites(**sample(name), scopes=[scope])


@pytest.mark.parametrize("name", ENTANGLED)
@pytest.mark.parametrize("scope", ["heads", "attention"])
def test_attention_of_several_sequences_at_once_is_refused_by_name(name, scope):
    model = load(make(name))
    with pytest.raises(
        UserError,
        match=r"not a map of a single sequence.*scopes heads and attention are not available",
    ):
        model.sites(**sample(name), scopes=[scope])
    for site in model.sites(**sample(name), scopes=["residual", "block"]):
        jacobian(site.f, site.X)


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_self_attention_comes_in_closed_form(name):
    heads, attention = prepared(name)[0].sites(**sample(name), layers=[LAYER])
    assert (
        isinstance(heads.f, HeadsApart)
        == isinstance(attention.f, SelfAttention)
        == FAMILIES[name].closed
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
def test_some_heads_are_those_among_all(name):
    (model, _), inputs = prepared(name), sample(name)
    (every,) = model.sites(**inputs, scopes=["heads"], layers=[LAYER])
    (some,) = model.sites(**inputs, scopes=["heads"], layers=[LAYER], heads=[1, 0])
    assert some.members == ((0, 1), (0, 0), (1, 1), (1, 0))
    rows = [every.members.index(member) for member in some.members]
    expected = jacobian(every.f, every.X).to_dense()[rows]
    torch.testing.assert_close(
        jacobian(some.f, some.X).to_dense(), expected, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize(
    ("name", "scope"), [*(("t5", scope) for scope in SCOPES), ("falcon", "block")]
)
def test_a_batch_can_be_narrowed_down_to_some_members(name, scope):
    (site,) = prepared(name)[0].sites(**sample(name, batch=3), scopes=[scope], layers=[LAYER])
    J = jacobian(site.f, site.X)
    members = torch.tensor([len(site.members) - 1, 1])
    assert J.take is not None
    two = J.take(members)
    assert two.take is not None
    dense = J.to_dense()
    torch.testing.assert_close(two.to_dense(), dense[members], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        two.take(torch.tensor([1])).to_dense(), dense[[1]], rtol=1e-9, atol=1e-12
    )


def test_radius_is_the_largest_token_of_each_member():
    heads, attention = load(make("bert")).sites(**sample("bert"), layers=[0])
    expected = attention.X.square().sum(-1).sqrt().max(-1).values
    torch.testing.assert_close(attention.radius, expected)
    torch.testing.assert_close(heads.radius, expected.repeat_interleave(2))


def test_unbatched_tokens_are_measured_too():
    model = prepared("qwen3")[0]
    (site,) = model.sites(**sample("qwen3"), scopes=["attention"], layers=[0])
    together = spectral_norm(jacobian(site.f, site.X)).value
    (first,) = model.sites(sample("qwen3")["input_ids"][0], scopes=["attention"], layers=[0])
    alone = spectral_norm(jacobian(first.f, first.X[0])).value
    assert alone == pytest.approx(together[0].item(), rel=1e-9)


def test_a_gate_before_the_output_projection_is_part_of_attention():
    """Its heads are plain self-attention, what the projection reads is not."""
    module = make("llama")
    gate = module.get_submodule("layers.1.self_attn.o_proj")
    gate.register_forward_pre_hook(lambda _, args: (args[0] * torch.sigmoid(args[0]),))
    heads, attention = load(module).sites(**sample("llama"), layers=[LAYER])
    assert isinstance(heads.f, HeadsApart) and not isinstance(attention.f, SelfAttention)
    O = gate.weight.detach().double()
    joined = heads.value().transpose(1, 2).flatten(2)
    expected = (joined * joined.sigmoid()) @ O.T + gate.bias.detach().double()
    torch.testing.assert_close(attention.value(), expected, rtol=1e-12, atol=1e-12)
    jacobian(attention.f, attention.X)


def test_the_page_holds_every_scope_as_the_table_has_it():
    page = (Path(__file__).parents[2] / "docs" / "scopes.md").read_text()
    for name, scope in SCOPES.items():
        assert f"| `{name}` | `{scope.formula}` | {scope.description} |" in page
