"""Limits of a tokenizer's files, checked before they are read outside Python.

The library that reads them allocates as much as an id or a replacement asks for, and ends the
process when there is not enough memory.
"""

from __future__ import annotations

import re
from typing import Any

from lipscope._checks import shown
from lipscope._files import for_terminal
from lipscope._types import UserError

LARGEST_ID = 1 << 24
"""The largest vocabularies have a million tokens."""

LONGEST = {"precompiled_charsmap": 1 << 22, "": 1 << 16}
"""Longest string by the end of its key, first match."""

LONGEST_ADDED = 1000
"""Characters that may be added to every text or word."""

VOCABULARIES = ("vocab.json", "added_tokens.json")

ADDED = ("prepend", "continuing_subword_prefix", "end_of_word_suffix", "prefix", "suffix")

CONSUMING = re.compile(r"(?:[^\\?*|(){}^$]|\\[nrtsSdDwW.])+(?:\{[1-9]\d*,?\d*\})?")
"""Plain regular expressions, which match at least one character."""

LARGEST_GROWTH = 16
"""How many times longer a text may become; most tokenizers keep its length."""


def check_tokenizer(content: dict[str, Any], name: str, file: str) -> None:
    """Raise UserError for ids, strings and replacements in a JSON file that no tokenizer needs."""
    where = f"{name}: {for_terminal(file, 100)}"
    # A list rather than recursion, and long runs of one kind by their extremes: a vocabulary has a
    # million entries.
    left: list[tuple[str, Any]] = [("vocab" if file in VOCABULARIES else "", content)]
    while left:
        key, value = left.pop()
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
        elif isinstance(value, int) and abs(value) > LARGEST_ID and "max" not in key:
            raise UserError(
                f"{where} has {for_terminal(key, 80)!r} = {shown(value)}, outside {-LARGEST_ID} to "
                f"{LARGEST_ID}; pass another tokenizer (tokenizer=, --tokenizer)"
            )
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        growth = _growth(content.get(part))
        if growth > LARGEST_GROWTH:
            raise UserError(
                f"{where} has a {part} that makes a text up to {growth:.3g} times longer, more "
                f"than {LARGEST_GROWTH}; pass another tokenizer (tokenizer=, --tokenizer)"
            )


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
    if len(text) > longest:
        raise UserError(
            f"{where} has a string of {len(text)} characters ({for_terminal(text, 20)}), more than "
            f"{longest}; pass another tokenizer (tokenizer=, --tokenizer)"
        )


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
    if part.get("type") == "TemplateProcessing":
        templates = [part.get("single"), part.get("pair")]
        return max(str(template).count("'Sequence'") for template in templates) or 1.0
    return _growth(list(part.values()))


def _growth_of_replacement(pattern: Any, content: str) -> float:
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        known = pattern["String"]
        return max(1.0, len(content) / len(known)) if known else 1.0 + len(content)
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    # A match of nothing inserts the content between all characters. The expression itself is not
    # tried out, since it may search for hours.
    empty = CONSUMING.fullmatch(str(regex)) is None
    return max(1.0, len(content) + float(empty))
