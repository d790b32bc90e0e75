"""Read and check the inputs of a study: text, token ids, embeddings or pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.models.embedded import default_text
from lipscope.models.model import Model
from lipscope.study.sampling import DEFAULT_LENGTHS, Rows, Windows

Text = Any
"""str | Path | list[str] | token ids (a list, a list of lists, or a tensor)."""


@dataclass(frozen=True)
class Choice:
    """How samples are drawn from a text."""

    lengths: Sequence[int] | None
    samples: int
    seed: int
    special_tokens: bool


@dataclass(frozen=True)
class Reading:
    """The inputs of a study.

    name:   a description for readers
    tokens: the number of tokens that samples are drawn from
    option: the command-line arguments that give the same input; None if there are none
    """

    inputs: Windows | Rows
    name: str
    tokens: int
    option: tuple[str, ...] | None = None


def read(model: Model, text: Text, inputs: Any, choice: Choice) -> Reading:
    """The inputs described by `text` or `inputs`."""
    if inputs is not None:
        if text is not None:
            raise UserError("give a text or inputs, not both")
        return _read_tensor(model, inputs, choice)
    if model.trunk.main_input_name == "pixel_values":
        raise UserError(
            f"{model.card.name} reads pixels, not text; "
            "measure it from Python, with inputs=pixel values"
        )
    if text is None:
        return replace(
            _read_text(model, [default_text()], "Python's help topics", choice), option=()
        )
    if isinstance(text, Path):
        return replace(
            _read_text(model, [read_file(text)], text.name, choice), option=("--text", text.name)
        )
    if isinstance(text, str):
        return replace(_read_text(model, [text], "text", choice), option=("--text", "-"))
    if isinstance(text, Sequence) and text and all(isinstance(part, str) for part in text):
        return _read_text(model, list(text), f"{len(text)} texts", choice)
    return _read_ids(model, text, choice)


def read_file(path: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it first"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read the text {path}: {error.strerror}") from error


def _read_text(model: Model, parts: list[str], name: str, choice: Choice) -> Reading:
    if not any(part.strip() for part in parts):
        raise UserError(
            f"the text is empty ({name}); "
            "give one with at least as many tokens as the shortest length"
        )
    ids = tuple(i for part in parts for i in model.encode(part))
    check_vocabulary(model, ids)
    return _windows(model, ids, name, _digest(*(part.encode() for part in parts)), choice)


def check_vocabulary(model: Model, ids: Sequence[int]) -> None:
    """Raise UserError for tokens without an embedding: they come from another tokenizer."""
    size = getattr(model.trunk.config, "vocab_size", None)
    foreign = next((i for i in ids if i < 0 or (size is not None and i >= size)), None)
    if foreign is not None:
        raise UserError(
            f"token id {foreign} is not in the vocabulary of {model.card.name}, "
            f"which has {size} tokens; use the model's own tokenizer"
        )


def _read_ids(model: Model, text: Text, choice: Choice) -> Reading:
    rows = _id_rows(text)
    check_vocabulary(model, [i for row in rows for i in row])
    # The same ids measured whole and in windows are different studies: keep their digests apart.
    whole = b"rows" if choice.lengths is None else b"windows"
    digest = _digest(whole, *(repr(row).encode() for row in rows))
    name = f"token ids ({len(rows)} rows)"
    if choice.lengths is not None:
        return _windows(model, tuple(i for row in rows for i in row), name, digest, choice)
    lengths = tuple(len(row) for row in rows)
    _check_positions(model, lengths)
    return Reading(
        Rows(tuple(torch.tensor(row) for row in rows), lengths, digest), name, sum(lengths)
    )


def _id_rows(text: Text) -> list[list[int]]:
    """Token ids as rows, given as one row or many, nested or as a tensor."""
    nested = text.tolist() if hasattr(text, "tolist") else text
    rows = list(nested) if isinstance(nested, Sequence) else []
    if not any(_is_row(row) for row in rows):
        rows = [rows]
    # type(i), not isinstance: True is an int, and a mask is not a row of token ids.
    if not all(_is_row(row) and row and all(type(i) is int for i in row) for row in rows):
        raise UserError(
            "text must be a string, a file (Path), a list of strings, or non-empty rows of token "
            f"ids, got {type(text).__name__}: {str(text)[:60]}"
        )
    return [list(row) for row in rows]


def _is_row(row: object) -> bool:
    return isinstance(row, list | tuple)


def _windows(model: Model, ids: tuple[int, ...], name: str, digest: str, choice: Choice) -> Reading:
    before, after = special_frame(model) if choice.special_tokens else ((), ())
    available = len(ids) + len(before) + len(after)
    lengths = _lengths(model, available, len(before) + len(after), choice.lengths)
    windows = Windows(
        ids=ids,
        lengths=lengths,
        samples=choice.samples,
        seed=choice.seed,
        digest=digest,
        before=before,
        after=after,
    )
    return Reading(windows, name, len(ids))


def _lengths(
    model: Model, available: int, frame: int, asked: Sequence[int] | None
) -> tuple[int, ...]:
    """The requested lengths, or those default lengths that the text and the model allow."""
    limit = model.max_positions
    if asked is None:
        fitting = tuple(n for n in DEFAULT_LENGTHS if frame < n <= available and n <= (limit or n))
        asked = fitting or DEFAULT_LENGTHS[:1]
    lengths = tuple(sorted(set(asked)))
    if not lengths or lengths[0] <= frame:
        raise UserError(
            f"a length must be at least {frame + 1}, got {lengths[0] if lengths else 'none'}"
        )
    _check_positions(model, lengths)
    too_long = [n for n in lengths if n > available]
    if too_long:
        raise UserError(
            f"the text has {available} tokens, too few for length {too_long[0]}; "
            f"give a longer text, or lengths up to {available}"
        )
    return lengths


def _check_positions(model: Model, lengths: Sequence[int]) -> None:
    limit = model.max_positions
    if limit is not None and max(lengths) > limit:
        raise UserError(
            f"length {max(lengths)} is above the {limit} positions of {model.card.name}; "
            f"use lengths up to {limit}"
        )


def special_frame(model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that the tokenizer adds before and after a text."""
    # Found by encoding one letter both ways: tokenizers expose the frame under many names.
    bare, framed = tuple(model.encode("a")), tuple(model.encode("a", special_tokens=True))
    starts = [i for i in range(len(framed) - len(bare) + 1) if framed[i : i + len(bare)] == bare]
    if not starts:
        raise UserError(
            "the tokenizer does not add its special tokens around a text; omit special tokens"
        )
    return framed[: starts[0]], framed[starts[0] + len(bare) :]


def _read_tensor(model: Model, inputs: Any, choice: Choice) -> Reading:
    if choice.lengths is not None:
        raise UserError("inputs are measured whole; omit lengths, or give a text")
    pixels = model.trunk.main_input_name == "pixel_values"
    rank = 4 if pixels else 3
    what = "pixel values [B, channels, height, width]" if pixels else "embeddings [B, n, d]"
    if (
        not isinstance(inputs, torch.Tensor)
        or not inputs.is_floating_point()
        or inputs.ndim not in (rank - 1, rank)
    ):
        shape = tuple(inputs.shape) if isinstance(inputs, torch.Tensor) else type(inputs).__name__
        raise UserError(f"inputs of this model must be floating-point {what}, got {shape}")
    inputs = inputs.detach().cpu()
    rows = tuple(inputs if inputs.ndim == rank else inputs[None])
    if not rows or not inputs.isfinite().all():
        raise UserError("inputs must be finite, and contain at least one sample")
    n = _tokens_of_pixels(model, rows[0]) if pixels else inputs.shape[-2]
    _check_positions(model, (n,))
    digest = _digest(
        str(tuple(inputs.shape)).encode(), inputs.double().contiguous().numpy().tobytes()
    )
    return Reading(Rows(rows, (n,) * len(rows), digest), what.split(" [")[0], n * len(rows))


def _tokens_of_pixels(model: Model, row: Tensor) -> int:
    return model.survey(pixel_values=row[None]).site("block", 0).X.shape[-2]


def _digest(*parts: bytes) -> str:
    # Lengths first: ("ab", "c") and ("a", "bc") must not have the same digest.
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
