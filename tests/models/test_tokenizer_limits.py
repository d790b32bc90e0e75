"""Files of tokenizers that would take all memory are refused before they are read outside Python.

Without the limits several of these end the interpreter, so that the test run dies with them.
"""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lipscope._types import UserError
from lipscope.models import tokenizers
from lipscope.models.repository import open_tokenizer
from lipscope.models.tokenizers import encode

DOUBLE = {"type": "Replace", "pattern": {"String": "w"}, "content": "ww"}
A = {"Sequence": {"id": "A", "type_id": 0}}


def tokenizer_file(**changes: Any) -> dict[str, Any]:
    vocabulary = {"[UNK]": 0, "▁a": 1, "▁b": 2, "a": 3, "b": 4, "max_length": 5}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
    empty = dict.fromkeys(parts)
    return {"version": "1.0", "added_tokens": [], **empty, "model": model, **changes}


def with_vocabulary(**ids: Any) -> dict[str, Any]:
    content = tokenizer_file()
    content["model"]["vocab"].update(ids)
    return content


def special(id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": "<s>", "special": True, **flags}


def sequence(*normalizers: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(normalizers)}


def replacement(regex: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": regex}, "content": content}


def byte_level() -> dict[str, Any]:
    return {"type": "ByteLevel", **dict.fromkeys(("add_prefix_space", "trim_offsets"), False)}


def charsmap(string: str) -> bytes:
    return (1024).to_bytes(4, "little") + bytes(1024) + string.encode() + b"\0"


def table(string: str) -> dict[str, Any]:
    content = base64.b64encode(charsmap(string)).decode()
    return {"type": "Precompiled", "precompiled_charsmap": content}


def field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer with a length; both take one or two bytes."""
    size = len(content)
    length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
    return bytes([number << 3 | 2]) + length + content


def piece(token: bytes) -> bytes:
    # A score in 32 bits and a kind come after the token.
    return field(1, field(1, token) + b"\x15\0\0\x80\xbf" + b"\x18\x01")


def written(folder: Path, content: str, config: Any = None) -> str:
    (folder / "tokenizer.json").write_text(content)
    usual = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**usual, **(config or {})}))
    return str(folder)


HOSTILE = {
    "largest id": with_vocabulary(w=2**31 - 1),
    "id of a token called max_length": with_vocabulary(max_length=2**31 - 1),
    "id of an added token": tokenizer_file(added_tokens=[special(2**31 - 1)]),
    "id among others": with_vocabulary(w=2**31 - 1, v="x"),
    "long prefix of texts": tokenizer_file(normalizer={"type": "Prepend", "prepend": "w" * 10**5}),
    "long suffix of words": tokenizer_file(
        model={"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": "w" * 2000}
    ),
    "long token": with_vocabulary(**{"w" * 70_000: 6}),
    "doubling": tokenizer_file(normalizer=sequence(*[DOUBLE] * 40)),
    "doubling, nested": tokenizer_file(normalizer=sequence(*[sequence(DOUBLE, DOUBLE)] * 20)),
    "doubling by a regular expression": tokenizer_file(
        normalizer=sequence(*[replacement("w", "ww")] * 40)
    ),
    "between all characters": tokenizer_file(normalizer=replacement("", "w" * 20)),
    "before all characters": tokenizer_file(
        normalizer=sequence(*[replacement("(?=.)", "w")] * 40)
    ),
    "thousands of replacements": tokenizer_file(normalizer=sequence(*[DOUBLE] * 5000)),
    "decoder": tokenizer_file(decoder={"type": "Sequence", "decoders": [DOUBLE] * 40}),
    "letters of bytes of letters": tokenizer_file(
        normalizer=sequence(*[{"type": "ByteLevel"}] * 40)
    ),
    "letters of bytes, before words": tokenizer_file(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [byte_level()] * 40}
    ),
    "a long string in a table": tokenizer_file(normalizer=table("w" * 100)),
    "many tables": tokenizer_file(normalizer=sequence(*[table("ww")] * 40)),
    "many tokens": with_vocabulary(**{f"{i:x}": i for i in range(2000)}),
    "many merges": tokenizer_file(model={"type": "BPE", "vocab": {}, "merges": ["a b"] * 2000}),
    "many added tokens": tokenizer_file(added_tokens=[special(6)] * 2000),
    "many splits": with_vocabulary(**{"w" * i: i for i in range(6, 1000)}),
    "many splits, with scores": tokenizer_file(
        model={"type": "Unigram", "unk_id": 0, "vocab": [["w" * i, -1.0] for i in range(1000)]}
    ),
    "repeated text": tokenizer_file(
        post_processor={
            "type": "TemplateProcessing", "single": [A] * 1000, "pair": [A], "special_tokens": {}
        }
    ),
}  # fmt: skip


@pytest.fixture
def small_limits(monkeypatch):
    for name in ("MOST_ENTRIES", "MOST_ADDED", "MOST_SPECIAL"):
        monkeypatch.setattr(tokenizers, name, 1000)


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.usefixtures("small_limits")
def test_files_that_would_take_all_memory_are_refused(case, tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json.* has .*; pass another tokenizer"):
        open_tokenizer(written(tmp_path, json.dumps(HOSTILE[case])))


def test_of_a_repeated_key_no_value_escapes(tmp_path):
    good = json.dumps(tokenizer_file())
    bad = json.dumps(with_vocabulary(w=2**31 - 1)["model"])
    folder = written(tmp_path, good.replace('"model":', f'"model": {bad}, "model":', 1))
    assert max(open_tokenizer(folder).get_vocab().values()) == 5


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {str(2**31 - 1): special(0)}}),
        ("vocab.json", {"max_length": 2**31 - 1}),
        ("added_tokens.json", {"w": 2**31 - 1}),
        ("tokenizer_config.json", {"extra_ids": 2**31 - 1}),
        ("tokenizer_config.json", {"additional_special_tokens": ["w"] * 2000}),
        ("tokenizer_config.json", {"extra_special_tokens": ["w"] * 2000}),
        ("added_tokens.json", {f"w{i}": i for i in range(2000)}),
    ],
)
@pytest.mark.usefixtures("small_limits")
def test_other_files_have_the_same_limits(file, content, tmp_path):
    written(tmp_path, json.dumps(tokenizer_file()))
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"{file}.* has (.* = 2147483647, outs|2000 entries, m)"):
        open_tokenizer(str(tmp_path))


MODEL = piece(b"<unk>") + piece(b"a") + piece(b"b") + field(2, b"\x18\x01")
"""A model of SentencePiece, with the settings of its training."""


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("vocab.txt", b"a\n" * 2000, "2000 entries, more than 1000"),
        ("merges.txt", b"a b\n" * 2000, "2000 entries"),
        ("merges.txt", b"a" * 20_000, "squares add up to 400000000"),
        ("spiece.model", MODEL + b"\x0a\0" * 2000, "1001 entries"),
        ("spiece.model", b"".join(piece(b"w" * i) for i in range(1000)), "squares add up to"),
        ("spiece.model", MODEL + field(3, field(2, charsmap("w" * 100))), "100 times longer"),
        ("x.model", b"YQ== 0\n" * 2000, "2000 entries"),
    ],
)
@pytest.mark.usefixtures("small_limits")
def test_other_formats_have_limits(file, content, told, tmp_path):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=f"{file} has .*{told}.*; pass another tokenizer"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content", "known"),
    [
        ("vocab.txt", "[UNK]\na\n".encode("utf-16"), True),
        ("spiece.model", MODEL + field(3, field(2, charsmap("w" * 33))), True),
        ("tokenizer.model", b"YQ== 0\nYWE= 1\n", True),
        ("tokenizer.model", MODEL[:-1], False),
        ("tokenizer.model", MODEL + b"\x0b\x0c", False),  # a group
        ("tokenizer.model", MODEL + b"\x0a" + b"\xff" * 9 + b"\x01", False),
        ("tokenizer.model", MODEL + b"\x08" + b"\xff" * 12, False),
    ],
)
def test_files_of_another_kind_are_not_shown_to_the_library(file, content, known, tmp_path):
    (tmp_path / file).write_bytes(content)
    assert tokenizers.check_lines(tmp_path / file, "m") == known
    if not known:
        with pytest.raises(UserError, match="is no vocabulary of SentencePiece"):
            open_tokenizer(str(tmp_path))
        # Models of other programs have this suffix too.
        assert len(open_tokenizer(written(tmp_path, json.dumps(tokenizer_file())))) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": sequence({"type": "Prepend", "prepend": "▁"}, DOUBLE)},
        {"normalizer": sequence(*[replacement(" {2,}", " ")] * 20)},
        {"normalizer": replacement("\\n", "<newline>")},
        # 15 characters between any two: 16 times longer, which is the most that is allowed
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "w" * 15}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [special(6)]},
    ],
)
def test_usual_tokenizers_are_read_as_they_are(changes, tmp_path):
    content = tokenizer_file(**changes)
    folder = written(tmp_path, json.dumps(content), {"model_max_length": 10**30})
    found = open_tokenizer(folder)
    for text in ("a b", "w  w", "a\nb", "<s>"):
        truth = Tokenizer.from_str(json.dumps(content)).encode(text, add_special_tokens=False)
        assert encode(found, text, special_tokens=False, name="m") == truth.ids


def test_half_of_a_surrogate_pair_is_not_a_text(tmp_path):
    found = open_tokenizer(written(tmp_path, json.dumps(tokenizer_file())))
    with pytest.raises(UserError, match=r"contains \\ud800 \(character 3\), half of a surrogate"):
        encode(found, "a \ud800", special_tokens=False, name="m")
