"""The model under test: sequences, layers by name, and copies in low precision."""

from pathlib import Path

import pytest
import torch

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
    [("", "no tokens"), (Path("nowhere.txt"), "cannot read"), ([[0.5]], "must be integers")],
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
