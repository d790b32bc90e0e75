"""Text to token ids and back, in bounded time: a tokenizer from elsewhere may search for hours.

The regular expressions of a `tokenizer.json` can backtrack in cubic time and more. They run outside
Python, where no signal reaches them, so they get a thread of their own to be left behind in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lipscope._types import UserError
from lipscope.models.model_files import on_one_line

PATIENCE = 20.0
PACE = 10_000
"""Seconds allowed for any text, and characters per further second; usual tokenizers read a hundred
times more."""

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
            f"{name}: its tokenizer has not read {size} characters in {limit:.0f} seconds; "
            "pass another one (tokenizer=, --tokenizer)"
        )
    if isinstance(errors[0], UserError | TypeError):
        raise errors[0]  # the caller's
    raise UserError(
        f"{name}: its tokenizer fails on the text ({on_one_line(errors[0])}); "
        "pass another one (tokenizer=, --tokenizer)"
    ) from errors[0]
