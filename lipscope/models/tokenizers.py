"""Text to token ids and back in bounded time, and limits of a tokenizer's files.

A tokenizer from elsewhere may search for hours: the regular expressions of a `tokenizer.json` can
backtrack in cubic time and more. They run outside Python, where no signal reaches them, so they get
a thread of their own to be left behind in. The library also allocates as much as an id or a
replacement asks for, and ends the process when there is not enough memory: files are checked first.
"""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lipscope._checks import abbreviate
from lipscope._files import for_terminal
from lipscope._types import UserError
from lipscope.models.model_files import on_one_line

PATIENCE = 20.0
PACE = 10_000
"""Seconds allowed for any text, and characters per further second; usual tokenizers read a hundred
times more."""

REMEDY = "pass another tokenizer (tokenizer=, --tokenizer)"

T = TypeVar("T")


def encode(tokenizer: Any, text: str, special_tokens: bool, name: str) -> list[int]:
    """The token ids of a text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        half = ascii(text[error.start]).strip("'")
        raise UserError(
            f"the text contains {half} (character {error.start + 1}), half of a surrogate pair and "
            "not a character; remove it"
        ) from error

    def work() -> list[int]:
        found = tokenizer(text, add_special_tokens=special_tokens, verbose=False)
        return found["input_ids"]

    return _in_time(work, len(text), name)


def decode(tokenizer: Any, ids: Sequence[int], name: str) -> list[str]:
    """The text of each token."""
    return _in_time(lambda: [tokenizer.decode([i]) for i in ids], len(ids), name)


def _in_time(work: Callable[[], T], size: int, name: str) -> T:
    """The result of `work`; a UserError if there is none within the time for `size` characters."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # tokenizers' panics are no Exceptions
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    limit = PATIENCE + size / PACE
    thread.join(limit)
    if results:
        return results[0]
    if not errors:
        raise UserError(
            f"{name}: its tokenizer has not read {size} characters in {limit:.0f} seconds; {REMEDY}"
        )
    if isinstance(errors[0], UserError | TypeError):
        raise errors[0]  # the caller's
    raise UserError(
        f"{name}: its tokenizer fails on the text ({on_one_line(errors[0])}); {REMEDY}"
    ) from errors[0]


MOST_ENTRIES = 1 << 20
LARGEST_ID = 1 << 24
"""Entries of a list, and the largest id; the largest vocabularies have a million tokens."""

MOST_ADDED = 1 << 16
MOST_SPECIAL = 1 << 13
"""Tokens beside the vocabulary, and special ones, each of which is compared with all others."""

MOST_SPLITS = 1 << 28
"""Sum of the squared lengths of all tokens: some formats try all splits of every token."""

COUNTS = ("extra_ids", "num_madeup_words")
"""Settings that ask for so many special tokens."""

LONGEST = {"precompiled_charsmap": 1 << 22, "": 1 << 16}
"""Longest string by the end of its key, first match."""

LONGEST_ADDED = 1000
"""Characters that may be added to every text or word."""

VOCABULARIES = ("vocab.json", "added_tokens.json")

ADDED = ("prepend", "continuing_subword_prefix", "end_of_word_suffix", "prefix", "suffix")

CONSUMING = re.compile(r"(?:[^\\?*|(){}^$]|\\[nrtsSdDwW.])+(?:\{[1-9]\d*,?\d*\})?")
"""Plain regular expressions, which match at least one character."""

BYTES = 4.0
"""Bytes of a character at most; some parts make a character of each."""

LARGEST_GROWTH = 16
"""How many times longer a text may become; most tokenizers keep its length."""


TIKTOKEN = re.compile(rb"(?:[A-Za-z0-9+/]+=* \d+\r?\n?)*+")
"""A vocabulary of lines, each a token in base 64 and its rank."""


def check_lines(path: Path, name: str) -> bool:
    """Check a vocabulary that is not JSON; return whether it is one, of lines or of SentencePiece.

    Raises:
        UserError: If it has more or longer entries than any tokenizer needs.
    """
    content = path.read_bytes()
    where = f"{name}: {for_terminal(path.name, 100)}"
    if path.suffix == ".model" and TIKTOKEN.fullmatch(content) is None:
        return _check_sentencepiece(content, where)
    lines = content.count(b"\n")
    _at_most(MOST_ENTRIES, lines, f"{where} has {lines} entries")
    _check_lengths(map(len, content.split(b"\n")), where)
    return True


def _check_sentencepiece(content: bytes, where: str) -> bool:
    """The same for a model of SentencePiece, which is a protocol buffer."""
    pieces: list[int] = []
    try:
        for number, value in _fields(content):
            if number == 1:
                pieces.append(len(value))  # with its score, which takes seven bytes
                _at_most(MOST_ENTRIES, len(pieces), f"{where} has {len(pieces)} entries")
            if number == 3:  # the rules of normalisation
                for key, charsmap in _fields(value):
                    growth = _growth_of_charsmap(charsmap) if key == 2 else 1.0
                    _check_growth(growth, where, "normalizer")
    except IndexError:  # cut, or of another kind
        return False
    _check_lengths(pieces, where)
    return True


def _fields(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a protocol buffer that have a length; IndexError if it is none."""
    at = 0
    end = len(content)

    def whole_number() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = content[at]
            at = at + 1
            number = number | (byte & 127) << shift
            shift = shift + 7
            if byte < 128:
                return number
            if shift > 63:
                raise IndexError

    while at < end:
        tag = whole_number()
        if tag & 7 == 0:
            whole_number()
            continue
        size = whole_number() if tag & 7 == 2 else {1: 8, 5: 4}.get(tag & 7, end + 1)
        if size > end - at:
            raise IndexError
        at += size
        if tag & 7 == 2:
            yield tag >> 3, content[at - size : at]


def _check_lengths(lengths: Iterable[int], where: str) -> None:
    splits = sum(length * length for length in lengths)
    what = f"tokens of so many characters that their squares add up to {splits}"
    _at_most(MOST_SPLITS, splits, f"{where} has {what}")


def _check_growth(growth: float, where: str, part: str) -> None:
    what = f"a {part} that makes a text up to {growth:.3g} times longer"
    _at_most(LARGEST_GROWTH, growth, f"{where} has {what}")


def _at_most(most: int, found: float, what: str) -> None:
    if found > most:
        raise UserError(f"{what}, more than {most}; {REMEDY}")


def check_tokenizer(content: dict[str, Any], name: str, file: str) -> None:
    """Raise UserError for ids, strings and replacements in a JSON file that no tokenizer needs."""
    where = f"{name}: {for_terminal(file, 100)}"
    # A list rather than recursion, and long runs of one kind by their extremes: a vocabulary has a
    # million entries.
    left: list[tuple[str, Any]] = [("vocab" if file in VOCABULARIES else "", content)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict | list):
            most = MOST_ENTRIES
            if "added" in key or file == "added_tokens.json":
                most = MOST_ADDED
            elif "special" in key:
                most = MOST_SPECIAL
            what = f"{where}: {for_terminal(key, 80)!r} has {len(value)} entries"
            _at_most(most, len(value), what)
            if key == "vocab":
                # Tokens by name, or lists of a token and its score.
                found = (x[0] if isinstance(x, list) and x else x for x in value)
                _check_lengths((len(x) for x in found if isinstance(x, str)), where)
        if isinstance(value, dict):
            _check_string(max(value, key=len, default=""), "", where)
            if key == "added_tokens_decoder":
                left += [("id", int(id)) for id in value if id.isdecimal() and len(id) < 4000]
            if key == "vocab":
                # A token may be called "max_length": among tokens, every number is an id.
                left += [("id", id) for id in _extremes(list(value.values()))]
            else:
                left += value.items()
        elif isinstance(value, list):
            if key == "merges":
                value = [x for pair in value for x in (pair if isinstance(pair, list) else [pair])]
            left += [(key, part) for part in _extremes(value)]
        elif isinstance(value, str):
            _check_string(value, key, where)
        # A maximum length is often written as 10^30 and allocates nothing.
        elif isinstance(value, int) and "max" not in key:
            largest = MOST_SPECIAL if key in COUNTS else LARGEST_ID
            if abs(value) > largest:
                raise UserError(
                    f"{where} has {for_terminal(key, 80)!r} = {abbreviate(value)}, outside "
                    f"{-largest} to {largest}; {REMEDY}"
                )
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        _check_growth(_growth(content.get(part)), where, part)


def _extremes(values: list[Any]) -> list[Any]:
    """Those of many values that a limit concerns: the longest string, the extreme numbers."""
    kinds = set(map(type, values))
    if kinds == {str}:
        return [max(values, key=len)]
    if kinds == {int}:
        return [min(values), max(values)]
    return values


def _check_string(text: str, key: str, where: str) -> None:
    longest = next(most for end, most in LONGEST.items() if key.endswith(end))
    longest = LONGEST_ADDED if key in ADDED else longest
    what = f"a string of {len(text)} characters ({for_terminal(text, 20)})"
    _at_most(longest, len(text), f"{where} has {what}")


def _growth(part: Any) -> float:
    """An upper estimate of how many times longer a text becomes."""
    if isinstance(part, list):
        total = 1.0
        for one in part:
            # Kept finite: a file has room for thousands of replacements.
            total = min(total * _growth(one), 1e300)
        return total
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "Replace" and isinstance(part.get("content"), str):
        return _growth_of_replacement(part.get("pattern"), part["content"])
    if part.get("type") == "Precompiled":
        try:
            return _growth_of_charsmap(base64.b64decode(part.get("precompiled_charsmap", "")))
        except (TypeError, ValueError):  # the library refuses it too
            return _growth_of_charsmap(b"")
    if part.get("type") == "ByteLevel":
        return BYTES
    if part.get("type") == "TemplateProcessing":
        templates = [part.get("single"), part.get("pair")]
        return max(str(template).count("'Sequence'") for template in templates) or 1.0
    return _growth(list(part.values()))


def _growth_of_charsmap(charsmap: bytes) -> float:
    """The same for a table of replacements: the size of a search tree, the tree, and strings."""
    strings = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    longest = max(map(len, strings.split(b"\0")))
    # Unicode has a sign of 18 letters, so every such table has a long string, which is rare.
    return BYTES if longest <= 64 else float(longest)


def _growth_of_replacement(pattern: Any, content: str) -> float:
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        known = pattern["String"]
        return max(1.0, len(content) / len(known)) if known else 1.0 + len(content)
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    # A match of nothing inserts the content between all characters. The expression itself is not
    # tried out, since it may search for hours.
    empty = CONSUMING.fullmatch(str(regex)) is None
    return max(1.0, len(content) + float(empty))
