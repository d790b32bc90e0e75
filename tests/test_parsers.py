"""Every parser of files and words from elsewhere: any bytes give a result or a UserError.

The quick run tries a few dozen inputs for each parser, `make slow` thousands: random bytes, random
text of the parser's own letters, and changed copies of input that is right.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lipscope._types import UserError
from lipscope.cli.terminal import numbers
from lipscope.models.model_files import read_json
from lipscope.models.repository import scrub
from lipscope.papers.charlm.characters import read_characters
from lipscope.papers.charlm.files import FILE as CHECKPOINT
from lipscope.papers.charlm.files import read_checkpoint
from lipscope.probes.budget.formats import read_formats
from lipscope.probes.budget.metrics import read_metric
from lipscope.study.jobs import parse_shard
from lipscope.study.reading import TextColumn, read_file
from lipscope.study.study import Study
from lipscope.study.sweep import read_sweep

Parser = Callable[[Path], object]


def words(parse: Callable[[str], object]) -> Parser:
    """A parser of text from the command line."""
    return lambda path: parse(path.read_bytes().decode("utf-8", "replace"))


def checkpoint(path: Path) -> object:
    path.rename(path.with_name(CHECKPOINT))
    return read_checkpoint(path.parent)


def study(path: Path) -> object:
    path.rename(path.with_name("study.sqlite"))
    opened = Study.open(path.parent)
    rows = opened.rows
    opened.close()
    return rows


PARSERS: dict[str, tuple[str, Parser, bytes]] = {
    "config": (
        "config.json",
        lambda path: scrub(read_json(path, "name")),
        b'{"model_type": "bert", "auto_map": {"A": "b.C"}, "a": [1, 2.5, null, {"b": "c"}]}',
    ),
    "column of CSV": (
        "t.csv",
        lambda path: TextColumn(path, "b").read(),
        b'a,b\n1,"two\nlines"\n3,four\n',
    ),
    "column of TSV": ("t.tsv", lambda path: TextColumn(path, "b").read(), b"a\tb\n1\t2\n"),
    "column of JSONL": (
        "t.jsonl",
        lambda path: TextColumn(path, "b").read(),
        b'{"a": 1, "b": "two"}\n{"b": [3]}\n\n{"a": 2}\n',
    ),
    "text": ("t.txt", read_file, "\ufeffplain text\r\n".encode()),
    "text of characters": ("t.txt", lambda path: read_characters(path, 4), b"abcabd" * 30),
    "numbers": ("w", words(lambda text: numbers("layers", text)), b"0-5,7,9-12"),
    "shard": ("w", words(parse_shard), b"3/64"),
    "formats": ("w", words(read_formats), b"bf16,int8:128,w8a8,kv4"),
    "metric": ("w", words(read_metric), b"accuracy"),
    "sweep": (
        "s.toml",
        read_sweep,
        b'models = ["a", "b"]\ntexts = ["t.txt"]\nout = "o"\n[settings.short]\nlengths = [8]\n',
    ),
    "checkpoint": ("c", checkpoint, b"\x10\x00\x00\x00\x00\x00\x00\x00" + b'{"a": {}}       '),
    "study": ("s", study, b"SQLite format 3\x00" + bytes(84)),
}


@cache
def changed(right: bytes) -> st.SearchStrategy[bytes]:
    """Copies with a piece cut out, doubled, or replaced by something odd."""
    odd = [b"", b"\x00", b"\xff", b'"', b"{", b"[" * 3000, b"9" * 5000, b"-", b"\xed\xa0\x80"]
    odd += [b"1e999", b"NaN", b"\r", b",", b"\n", b"\xef\xbb\xbf", b"null", b"=", b"/" * 300]
    places = st.integers(0, len(right))

    def change(a: int, b: int, piece: bytes, twice: bool) -> bytes:
        low, high = sorted((a, b))
        return right[:low] + piece + (right[low:] if twice else right[high:])

    return st.builds(
        change, places, places, st.sampled_from(odd) | st.binary(max_size=9), st.booleans()
    )


def inputs(right: bytes) -> st.SearchStrategy[bytes]:
    own = st.lists(st.sampled_from(sorted(set(right))), max_size=40).map(bytes)
    documents = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=8,
    )
    return (
        st.binary(max_size=60)
        | own
        | changed(right)
        | documents.map(lambda document: json.dumps(document).encode())
    )


def survives(parser: str, content: bytes) -> None:
    name, parse, _ = PARSERS[parser]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / name
        path.write_bytes(content)
        try:
            parse(path)
        except UserError as error:
            assert str(error)


def fuzz(parser: str, count: int) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        derandomize=count < 1000,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(PARSERS[parser][2]))
    def check(content: bytes) -> None:
        survives(parser, content)

    check()


@pytest.mark.parametrize("parser", PARSERS)
def test_what_is_right_is_read_or_refused(parser: str):
    survives(parser, PARSERS[parser][2])
    survives(parser, b"")


@pytest.mark.parametrize("parser", PARSERS)
def test_a_few_dozen_inputs(parser: str):
    fuzz(parser, 60)


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS)
def test_thousands_of_inputs(parser: str):
    fuzz(parser, 3000)


NASTY = [
    b"9" * 5000,
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"b": ' + b"9" * 5000 + b"}\n",
    b"int8:" + b"9" * 5000,
    b"\x00",
    b'models = ["\\u0000"]\n',
    b"x = " + b"[" * 100_000,
    b"1/" + "\u0663".encode(),
    b'"' * 200_000,
]


@pytest.mark.parametrize("content", NASTY, ids=lambda content: content[:12])
@pytest.mark.parametrize("parser", PARSERS)
def test_nasty_inputs(parser: str, content: bytes):
    survives(parser, content)
