"""The model under test: sequences, layers by name, and copies in low precision."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTModel

import lipscope as ls
from lipscope.budget.subject import blocks, hidden_states, layer_of, read_sequences, read_subject
from tests.budget.tiny import some_ids, tiny


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


def test_layers_are_the_first_number_in_a_path():
    assert layer_of("model.layers.3.mlp.experts.7.up_proj") == 3
    assert layer_of("gpt2.wte") is None
    assert list(blocks(tiny("llama_lm"))) == [f"model.layers.{i}" for i in range(3)]
    assert list(blocks(tiny("gpt2"))) == [f"h.{i}" for i in range(3)]


def test_hidden_states_are_those_of_transformers():
    for kind in ("bert", "gpt2", "llama"):
        model, ids = tiny(kind), some_ids(1, 9)
        with torch.no_grad(), hidden_states(model) as seen:
            expected = model(ids, output_hidden_states=True).hidden_states
        # All but the last, which transformers returns after the final norm.
        assert len(seen) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(seen[:-1], expected[:-1], strict=True))


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
    assert ls.compare_runs(model, port, inputs=pixels(), probes=4).ok
    wrong = next(p for n, p in port.named_parameters() if n.endswith("1.mlp.fc2.weight"))
    wrong.data.neg_()
    found = ls.compare_runs(model, port, inputs={"pixel_values": pixels()}, probes=4)
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
    got = ls.error_budget(model, some_ids(2, 9), formats="int8", probes=4).total("int8").value
    assert (
        got
        == ls.error_budget(tiny("gpt2"), some_ids(2, 9), formats="int8", probes=4)
        .total("int8")
        .value
    )
    assert model.last.requires_grad
