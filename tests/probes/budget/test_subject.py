"""The model under test: sequences, layers, names, and copies in low precision."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertModel, JambaConfig, JambaModel, ViTConfig, ViTModel

import lipscope as ls
from lipscope.probes.budget import subject as subject_module
from lipscope.probes.budget.subject import (
    hidden_states,
    read_sequences,
    read_subject,
)
from tests.probes.budget.tiny import some_ids, tiny


def encode(text):
    """A tokenizer of a kind: a number per character."""
    return [ord(c) for c in text]


def test_windows_are_spread_over_the_text(tmp_path):
    text = "".join(chr(65 + i) for i in range(50))
    rows = read_sequences(text, encode, 10, 3)
    assert [row[0, 0].item() for row in rows] == [65, 85, 105]
    assert all(row.shape == (1, 10) for row in rows)
    (tmp_path / "a.txt").write_text(text)
    assert torch.equal(read_sequences(tmp_path / "a.txt", encode, 10, 3)[1], rows[1])
    assert [r.shape[1] for r in read_sequences(["abc", "a" * 20], encode, 10, 3)] == [3, 10]
    assert [r.shape for r in read_sequences("abc", encode, 10, 3)] == [(1, 3)]
    assert [r.tolist() for r in read_sequences("ABC", encode, 1, 3)] == [[[65]], [[66]], [[67]]]
    assert len(read_sequences("ABC", encode, 1, 5)) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tokens"),
        (Path("nowhere.txt"), "cannot read"),
        ([[0.5]], "must be integers"),
        (b"abc", "text must be"),
        (["abc", 3], "a text must be"),
    ],
)
def test_texts_without_tokens_are_errors(text, message):
    with pytest.raises(ls.UserError, match=message):
        read_sequences(text, encode, 10, 3)


SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
SHARED = AlbertConfig(**SMALL, embedding_size=16)
HYBRID = JambaConfig(
    **SMALL, num_key_value_heads=2, attn_layer_period=4, attn_layer_offset=2, num_experts=1,
    use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4,
)  # fmt: skip


class Towers(nn.Module):
    """Numbers in names that are no layers, and layers in a Sequential."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.embed = nn.Embedding(60, 8)
        self.stack = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

    def forward(self, ids):
        y = self.stack(self.embed(ids))
        return sum(head(y) for head in self.heads)


MODELS = {
    "albert": (lambda: AlbertModel(SHARED), ["encoder.albert_layer_groups.0"] * 4),
    "jamba": (lambda: JambaModel(HYBRID), [f"layers.{i}" for i in range(4)]),
    "bert": (lambda: tiny("bert"), [f"encoder.layer.{i}" for i in range(3)]),
    "gpt2": (lambda: tiny("gpt2"), [f"h.{i}" for i in range(3)]),
    "llama": (lambda: tiny("llama_lm"), [f"layers.{i}" for i in range(3)]),
    "towers": (Towers, [f"stack.{i}" for i in range(3)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_the_blocks_that_the_tokens_pass(name):
    torch.manual_seed(0)
    make, expected = MODELS[name]
    model, ids = make().eval(), some_ids(1, 9)
    subject = read_subject(model, ids, head=False, length=9, samples=1)
    assert list(subject.layers) == expected
    with torch.no_grad(), subject.ready(), hidden_states(subject) as seen:
        subject.run(ids)
    assert len(seen) == len(expected) + 1
    if name != "towers":
        trunk = getattr(model, "model", model).double()
        states = trunk(ids, output_hidden_states=True).hidden_states
        # All but the last, which transformers returns after the final norm.
        assert len(seen) == len(states)
        for a, b in zip(seen[:-1], states[:-1], strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.wide
def test_what_several_layers_share_belongs_to_none_of_them():
    torch.manual_seed(0)
    subject = read_subject(AlbertModel(SHARED), some_ids(1, 9), head=False, length=9, samples=1)
    assert subject.layer_of("encoder.albert_layer_groups.0.albert_layers.0.ffn") is None
    assert subject.attending == (0, 1, 2, 3)
    budget = ls.error_budget(AlbertModel(SHARED), some_ids(), formats="bf16,kv4,w8a8", probes=2)
    for format, kind in (("bf16", None), ("kv4", "key"), ("w8a8", "activation")):
        rows = [r for r in budget.rows if r.format == format and kind in (None, r.kind)]
        assert {0, 1, 2, 3} <= {row.layer for row in rows}
    assert {r.layer for r in budget.rows if r.format == "w8a8" and r.kind == "weight"} == {None}


@pytest.mark.wide
def test_names_are_those_of_the_model_that_was_given(tmp_path):
    model, ids = tiny("llama_lm"), some_ids()
    modules = dict(model.named_modules())
    for metric in ("output", "kl", lambda output: output.logits):
        budget = ls.error_budget(model, ids, formats="int8", probes=2, metric=metric)
        assert all(isinstance(modules[row.site], nn.Linear) for row in budget.rows)
        assert "model.layers.0.mlp.down_proj" in {row.site for row in budget.rows}
        # As a filter of torchao.
        kept = budget.keep_high("int8")
        quantised = [n for n, m in modules.items() if isinstance(m, nn.Linear) and n not in kept]
        assert kept and len(quantised) + len(kept) == 22
    bare = ls.error_budget(model.model, ids, formats="int8", probes=2)
    assert {row.site for row in bare.rows} <= set(dict(model.model.named_modules()))
    model.save_pretrained(tmp_path)
    saved = ls.error_budget(str(tmp_path), ids, formats="int8", probes=2)
    assert {row.site for row in saved.rows} <= modules.keys()


def test_a_copy_in_low_precision_keeps_its_buffers():
    subject = read_subject(tiny("llama"), some_ids(1, 9), head=False, length=9, samples=1)
    low = subject.in_dtype(torch.bfloat16)
    assert {p.dtype for p in low.module.parameters()} == {torch.bfloat16}
    assert low.module.rotary_emb.inv_freq.dtype == torch.float32
    assert subject.attention == "lipscope" and low.attention == "eager"
    assert next(subject.module.parameters()).dtype == torch.float64


class OwnMap(nn.Module):
    """A module of no library that reads two floating-point arguments."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, shift):
        return self.linear(x) + shift


def pixels(rows=2):
    return torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def tiny_vit():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "image_size": 16, "patch_size": 8}
    model = ViTModel(ViTConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)).eval()
    for parameter in model.parameters():
        parameter.data *= 2
    return model


def test_images_have_budgets_that_real_runs_confirm():
    X, model = pixels(), tiny_vit()
    budget = ls.error_budget(model, inputs=X, formats="bf16,int8,kv4", probes=32, observe=True)
    assert (budget.sequences, budget.tokens) == (2, 2 * 5)  # four patches and a class token
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(X.double()).last_hidden_state
        low = copy.deepcopy(model).bfloat16()(X.bfloat16()).last_hidden_state.double()
    error = ((low - exact).norm() / exact.norm()).item()
    assert 0.8 <= error / budget.total("bf16").value <= 1.25
    for name in budget.formats:
        assert 0.8 <= budget.observed[name] / budget.total(name).value <= 1.25
    assert any(row.kind == "input" for row in budget.rows)  # images are rounded as well


def test_ports_of_image_models_are_compared():
    model = tiny_vit()
    port = copy.deepcopy(model).bfloat16()
    assert ls.check_run(model, port, inputs=pixels(), probes=4).ok
    wrong = next(p for n, p in port.named_parameters() if n.endswith("1.mlp.fc2.weight"))
    wrong.data.neg_()
    found = ls.check_run(model, port, inputs={"pixel_values": pixels()}, probes=4)
    assert found.first_outside.name == "layer 1"


def test_arguments_by_name_of_any_module():
    X = {"x": torch.randn(2, 5, 8), "shift": torch.randn(2, 5, 8)}
    budget = ls.error_budget(OwnMap(), inputs=X, formats="fp16,int8", probes=64, observe=True)
    assert budget.tokens == 10
    for name in budget.formats:
        assert 0.7 <= budget.observed[name] / budget.total(name).value <= 1.4
    with pytest.raises(ls.UserError, match="one row per sample"):
        ls.error_budget(OwnMap(), inputs={"x": X["x"], "shift": X["shift"][:1]})
    with pytest.raises(ls.UserError, match="one row per sample"):
        ls.error_budget(OwnMap(), inputs=torch.ones(3))


def test_a_model_that_reads_no_text_says_what_it_reads():
    with pytest.raises(ls.UserError, match="reads pixel_values, not text"):
        ls.error_budget(tiny_vit())
    with pytest.raises(ls.UserError, match="a text or inputs, not both"):
        ls.error_budget(tiny_vit(), "text", inputs=pixels())


def test_a_module_that_keeps_the_graph_of_a_run_is_copied():
    model = tiny("gpt2")
    model.last = model(some_ids(1, 5)).last_hidden_state  # as recurrent models keep their state
    found, expected = (
        ls.error_budget(one, some_ids(2, 9), formats="int8", probes=4).total("int8").value
        for one in (model, tiny("gpt2"))
    )
    assert found == expected and model.last.requires_grad


class Drawing(nn.Module):
    """A map that draws random numbers, as masked autoencoders do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) * (torch.rand(8) > 0.5)


def test_a_model_that_draws_random_numbers_is_refused():
    with pytest.raises(ls.UserError, match="Drawing gives another output when it runs again"):
        ls.error_budget(Drawing(), inputs=torch.randn(2, 5, 8), formats="bf16")


def test_windows_are_no_longer_than_the_positions_of_a_model(monkeypatch):
    """The tiny model has 64 positions."""
    asked = []
    monkeypatch.setattr(
        subject_module,
        "read_sequences",
        lambda text, encode, length, samples: asked.append(length) or [some_ids(1, 4)],
    )
    for length in (16, 64, 200):
        read_subject(tiny("gpt2"), "a text", head=False, length=length, samples=2)
    assert asked == [16, 64, 64]
