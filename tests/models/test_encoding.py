"""A tokenizer that takes too long or fails is refused; any other gives what it always gave."""

from __future__ import annotations

import time

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lipscope._types import UserError
from lipscope.models import tokenizers
from tests.models.test_loading import words

PROSE = "The quick brown fox jumps over the lazy dog and looks back at the forest behind it " * 40


def splitting(pattern: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def test_it_gives_what_the_tokenizer_gives():
    tokenizer = words()
    text = "ba be bi"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizers.encode(tokenizer, text, False, "name") == ids
    assert tokenizers.decode(tokenizer, ids, "name") == [tokenizer.decode([i]) for i in ids]


def test_a_catastrophic_pattern_is_left_behind(monkeypatch):
    """Cubic in the length of the text: seconds here, hours for a book."""
    monkeypatch.setattr(tokenizers, "PATIENCE", 0.2)
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"^hostile: its tokenizer has not read 900 characters in 0"
    ):
        tokenizers.encode(splitting("(?:[a-zA-Z ]+){2}[0-9]"), PROSE[:900], False, "hostile")
    assert time.monotonic() - began < 10


def test_a_long_text_has_more_time(monkeypatch):
    monkeypatch.setattr(tokenizers, "PATIENCE", 0.0)

    def slow(*_: object, **__: object) -> dict[str, list[int]]:
        time.sleep(0.2)
        return {"input_ids": [7]}

    assert tokenizers.encode(slow, "a" * 100 * tokenizers.PACE, False, "name") == [7]
    with pytest.raises(UserError, match="has not read 1 characters"):
        tokenizers.encode(slow, "a", False, "name")


@pytest.mark.wide
def test_a_panic_is_a_sentence():
    """The engine gives up a single match after ten million steps, by a panic."""
    with pytest.raises(UserError, match="fails on the text"):
        tokenizers.encode(splitting("(.*a){20}Z"), PROSE[:2000], False, "hostile")


def test_an_error_is_a_sentence():
    def broken(*_: object, **__: object) -> None:
        raise ValueError("no\nsuch token")

    with pytest.raises(
        UserError, match=r"^name: its tokenizer fails on the text \(.*no such token"
    ):
        tokenizers.encode(broken, "a", False, "name")
