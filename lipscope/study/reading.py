"""The inputs of a study: texts and their files, windows drawn by a stable hash, whole inputs."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipscope._checks import abbreviate
from lipscope._types import UserError
from lipscope.models.embedded import default_text
from lipscope.study.records import SampleTokens

if TYPE_CHECKING:
    from lipscope.models.model import Model  # late: training needs no transformers

Text = Any
"""str | Path | list[str] | token ids (a list, a list of lists, or a tensor)."""

MOST_SAMPLES = 100_000
"""A list of all samples is made before the first is measured; more of them would fill memory."""

KINDS: dict[str, tuple[str, int | None]] = {
    "inputs_embeds": ("embeddings [B, n, d]", 3),
    "pixel_values": ("pixel values [B, channels, height, width]", 4),
}
"""Arguments of models in words, and their number of dimensions; others have any."""

DEFAULT_LENGTHS = (8, 16, 32, 64, 128, 256)

MANY_UNKNOWN = 0.05
"""Share of unknown tokens above which a text is not what the model was made for."""


class TextWarning(UserWarning):
    """A text that can be measured, but hardly as its owner means it."""


@dataclass(frozen=True)
class SampledText:
    """Samples of a text: n consecutive tokens at an offset drawn from (seed, n, sample).

    Special tokens `before` and `after` frame the window and count towards n. Positions are 0..n-1.

    digest: identifies the text
    name:   a description for readers
    option: the command-line arguments that give the same text; None if there are none
    """

    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    digest: str
    name: str = ""
    option: tuple[str, ...] | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens that samples are drawn from."""
        return len(self.ids)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(n, sample) for n in self.lengths for sample in range(self.samples)]

    def window(self, n: int, sample: int) -> tuple[int, ...]:
        inner = n - len(self.before) - len(self.after)
        # A hash rather than a generator: the same on every machine and in any order of calls. It
        # has 256 bits, so its remainder is uniform for all practical purposes.
        name = f"lipscope sample {self.seed} {n} {sample}"
        digest = hashlib.sha256(name.encode()).digest()
        start = int.from_bytes(digest, "big") % (len(self.ids) - inner + 1)
        return self.before + self.ids[start : start + inner] + self.after

    def batch(self, n: int, samples: Sequence[int]) -> Tensor:
        return torch.tensor([self.window(n, sample) for sample in samples])


@dataclass(frozen=True)
class FixedInputs:
    """Inputs measured whole: row i is sample i, of lengths[i] tokens.

    argument: the model's argument that the rows are; empty for token ids
    others:   its other arguments, each with one row per sample
    """

    rows: tuple[Tensor, ...]
    lengths: tuple[int, ...]
    digest: str
    name: str
    argument: str = ""
    others: Mapping[str, Tensor] = field(default_factory=dict)
    option: None = None

    @property
    def tokens(self) -> int:
        """The number of tokens in all samples."""
        return sum(self.lengths)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return sorted((n, sample) for sample, n in enumerate(self.lengths))

    def batch(self, n: int, samples: Sequence[int]) -> Tensor:
        return torch.stack([self.rows[sample] for sample in samples])

    def arguments(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """All arguments of the model for some samples."""
        chosen = {name: values[list(samples)] for name, values in self.others.items()}
        return {self.argument: self.batch(0, samples), **chosen}


def read(
    model: Model,
    text: Text = None,
    inputs: Any = None,
    *,
    lengths: Sequence[int] | None = None,
    samples: int = 1,
    seed: int = 0,
    special_tokens: bool = False,
) -> SampledText | FixedInputs:
    """The inputs described by `text` or `inputs`, with samples drawn as the options say."""
    if samples > MOST_SAMPLES:
        raise UserError(
            f"samples must be at most {MOST_SAMPLES} per length, got {abbreviate(samples)}"
        )
    if inputs is not None:
        if text is not None:
            raise UserError("give a text or inputs, not both")
        if lengths is not None:
            raise UserError("inputs are measured whole; omit lengths, or give a text")
        return _read_inputs(model, inputs)
    kind = model.trunk.main_input_name
    if kind != "input_ids":
        what = "pixel values" if kind == "pixel_values" else "a tensor, or {name: tensor, ...}"
        raise UserError(
            f"{model.card.name} reads {kind}, not text; measure it from Python, with inputs={what}"
        )
    found = _read_texts(model, text)
    if found is None:
        rows = _id_rows(text)
        # The same ids measured whole and in windows are different studies: their digests differ.
        way = b"rows" if lengths is None else b"windows"
        found = (
            tuple(i for row in rows for i in row),
            f"token ids ({len(rows)} row{'' if len(rows) == 1 else 's'})",
            _digest(way, *(repr(row).encode() for row in rows)),
        )
        if lengths is None:
            check_vocabulary(model, found[0])
            sizes = tuple(len(row) for row in rows)
            _check_positions(model, sizes)
            return FixedInputs(
                rows=tuple(torch.tensor(row) for row in rows),
                lengths=sizes,
                digest=found[2],
                name=found[1],
            )
    ids, name, digest = found
    check_vocabulary(model, ids)
    before, after = special_frame(model) if special_tokens else ((), ())
    return SampledText(
        ids=ids,
        lengths=_lengths(model, len(ids), len(before) + len(after), lengths),
        samples=samples,
        seed=seed,
        digest=digest,
        name=name,
        option=text_option(text),
        before=before,
        after=after,
    )


def _read_texts(model: Model, text: Text) -> tuple[tuple[int, ...], str, str] | None:
    """The ids, the name and the digest of one text or several; None if none is given."""
    if text is None:
        parts = [default_text()]
        name = "Python's help topics"
    elif isinstance(text, str | Path | TextColumn):
        parts = [content(text)]
        name = text.name if isinstance(text, Path) else "text"
        if isinstance(text, TextColumn):
            name = f"{text.path.name}, column {text.column}"
    elif (
        isinstance(text, Sequence)
        and text
        and all(isinstance(part, str | Path | TextColumn) for part in text)
    ):
        parts = [content(part) for part in text]
        name = f"{len(text)} texts"
    else:
        return None
    if not any(part.strip() for part in parts):
        raise UserError(
            f"the text is empty ({name}); "
            "give one with at least as many tokens as the shortest length"
        )
    ids = tuple(i for part in parts for i in model.encode(part))
    warn_of_unknown(model, ids)
    return ids, name, _digest(*(part.encode() for part in parts))


def warn_of_unknown(model: Model, ids: Sequence[int]) -> None:
    """Warn if many tokens of a text are unknown to the tokenizer: the numbers say little then."""
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    count = 0 if unknown is None else ids.count(unknown)
    if count > MANY_UNKNOWN * len(ids):
        warnings.warn(
            f"{count} of {len(ids)} tokens are unknown to the tokenizer; does it belong to "
            f"{model.card.name}, and does it know the language of this text?",
            TextWarning,
            stacklevel=2,
        )


def check_vocabulary(model: Model, ids: Sequence[int]) -> None:
    """Raise UserError for tokens without an embedding: they come from another tokenizer."""
    size = getattr(model.trunk.config, "vocab_size", None)
    foreign = next((i for i in ids if i < 0 or (size is not None and i >= size)), None)
    if foreign is not None:
        raise UserError(
            f"token id {foreign} is not in the vocabulary of {model.card.name}, "
            f"which has {size} tokens; use the model's own tokenizer"
        )


def special_frame(model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that the tokenizer adds before and after a text."""
    # Found by encoding one letter both ways: tokenizers expose the frame under many names.
    bare = tuple(model.encode("a"))
    framed = tuple(model.encode("a", special_tokens=True))
    starts = [i for i in range(len(framed) - len(bare) + 1) if framed[i : i + len(bare)] == bare]
    if not starts:
        raise UserError(
            "the tokenizer does not add its special tokens around a text; omit special tokens"
        )
    return framed[: starts[0]], framed[starts[0] + len(bare) :]


def sample_tokens(
    model: Model, inputs: SampledText | FixedInputs, pairs: Iterable[tuple[int, int]]
) -> Iterator[SampleTokens]:
    """The tokens of samples (n, sample) as text; none if the input does not consist of tokens."""
    words: dict[int, str] = {}
    for n, sample in sorted(set(pairs)):
        (row,) = inputs.batch(n, (sample,))
        if row.is_floating_point() or len(row) != n:  # of another input than what is measured
            return
        ids = row.tolist()
        # Decoding is slow, and long texts repeat their tokens: decode each id once.
        new = sorted(set(ids) - words.keys())
        words.update(zip(new, model.tokens(new) if model.tokenizer else map(str, new), strict=True))
        yield SampleTokens(n, sample, tuple(words[i] for i in ids))


def text_option(text: Any) -> tuple[str, ...] | None:
    """The command-line options that give this text; None if a command line cannot."""
    if text is None:
        return ()
    if isinstance(text, str):
        return "--text", "-"
    parts: Sequence[Any] = text if isinstance(text, list | tuple) else [text]
    if not all(isinstance(part, Path | TextColumn) for part in parts):
        return None
    columns = {getattr(part, "column", None) for part in parts}
    if len(columns) != 1:
        return None
    (column,) = columns
    # Absolute: the command may be repeated from another directory.
    paths = [str(getattr(part, "path", part).absolute()) for part in parts]
    words = [word for path in paths for word in ("--text", path)]
    return (*words, *(() if column is None else ("--column", column)))


def _id_rows(text: Text) -> list[list[int]]:
    """Token ids as rows, given as one row or many, nested or as a tensor."""
    nested = text.tolist() if hasattr(text, "tolist") else text
    # bytes are a sequence of integers, but users pass them as a text or a path.
    rows = list(nested) if isinstance(nested, Sequence) and not isinstance(nested, bytes) else []
    if not any(isinstance(row, list | tuple) for row in rows):
        rows = [rows]
    # type(i), not isinstance: True is an int, and a mask is not a row of token ids.
    if not all(
        isinstance(row, list | tuple) and row and all(type(i) is int for i in row) for row in rows
    ):
        raise UserError(
            "text must be a string, a file (Path), a list of strings, or non-empty rows of token "
            f"ids, got {type(text).__name__}: {str(text)[:60]}"
        )
    return [list(row) for row in rows]


def _lengths(model: Model, tokens: int, frame: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    """The requested lengths, or those default lengths that the text and the model allow."""
    limit = model.max_positions
    available = tokens + frame
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


def _read_inputs(model: Model, inputs: Any) -> FixedInputs:
    """A tensor for the model's main argument or its embeddings, or tensors for all arguments."""
    kinds = model.trunk.main_input_name
    kind = kinds if isinstance(kinds, str) else kinds[0]
    given = dict(inputs) if isinstance(inputs, Mapping) else {}
    if not given:
        argument = "inputs_embeds" if kind == "input_ids" else kind
        what, rank = KINDS.get(argument, (argument, None))
        is_tensor = isinstance(inputs, torch.Tensor)
        if not (is_tensor and inputs.is_floating_point()) or (
            rank is not None and inputs.ndim not in (rank - 1, rank)
        ):
            found = tuple(inputs.shape) if is_tensor else type(inputs).__name__
            raise UserError(f"inputs of this model must be floating-point {what}, got {found}")
        # A single sample may come without the dimension of samples.
        given = {argument: inputs[None] if inputs.ndim + 1 == rank else inputs}
    argument = kind if kind in given else next(iter(given))
    count = len(given[argument]) if isinstance(given[argument], torch.Tensor) else 0
    for name, values in given.items():
        if not isinstance(values, torch.Tensor) or values.ndim == 0 or len(values) != count:
            raise UserError(
                f"inputs[{name!r}] must be a tensor with one row per sample, got "
                f"{abbreviate(values)}"
            )
        if not count or not values.isfinite().all():
            raise UserError("inputs must be finite, and contain at least one sample")
    given = {name: values.detach().cpu() for name, values in given.items()}
    if argument == "inputs_embeds":
        n = given[argument].shape[-2]
        _check_positions(model, (n,))
    else:
        # What the first block reads: patches of an image, frames of a sound.
        first = {name: values[:1] for name, values in given.items()}
        n = model.survey(inputs=first).site("block", 0).X.shape[-2]
    contents = [
        (f"{name} {tuple(x.shape)}".encode(), x.double().contiguous().numpy().tobytes())
        for name, x in sorted(given.items())
    ]
    what, _ = KINDS.get(argument, (argument, None))
    return FixedInputs(
        rows=tuple(given.pop(argument)),
        lengths=(n,) * count,
        digest=_digest(*(part for pair in contents for part in pair)),
        name=what.split(" [")[0],
        argument=argument,
        others=given,
    )


def _digest(*parts: bytes) -> str:
    # Lengths first: ("ab", "c") and ("a", "bc") must not have the same digest.
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


@dataclass(frozen=True)
class TextColumn:
    """One column of a table of texts, CSV, TSV or JSONL by the suffix.

    column: its name in the header line or in the records, or, in a CSV or TSV file without a header
            line, its number, from 1
    """

    path: Path
    column: str

    def read(self) -> str:
        """The texts of the column, one per line."""
        whole = read_file(self.path)
        try:
            cells = list(self._cells(whole))
        except UserError:
            raise
        except (csv.Error, ValueError, RecursionError) as error:
            raise UserError(f"{self.path} cannot be read as a table: {error}") from error
        # A text with line breaks of its own is still one text, on one line.
        return "\n".join(" ".join(cell.split()) for cell in cells)

    def _cells(self, whole: str) -> Iterator[str]:
        if self.path.suffix.lower() in (".jsonl", ".ndjson"):
            records = [json.loads(line) for line in whole.splitlines() if line.strip()]
            for number, record in enumerate(records, 1):
                if not isinstance(record, dict):
                    raise UserError(
                        f"{self.path}: record {number} is not a JSON object with columns, "
                        f"but {type(record).__name__}"
                    )
            found = {key: None for r in records for key in r}
            self._check(list(found))
            yield from (str(r[self.column]) for r in records if self.column in r)
            return
        delimiter = "\t" if self.path.suffix.lower() == ".tsv" else ","
        rows = csv.reader(io.StringIO(whole, newline=""), delimiter=delimiter)
        first = next(rows, [])
        number = int(self.column) if self.column.isdecimal() and len(self.column) < 9 else 0
        if 1 <= number <= len(first):
            # Digits are no name: the first line may hold them as the class of its text.
            yield first[number - 1]
            place = number - 1
        else:
            self._check(first)
            place = first.index(self.column)
        yield from (row[place] for row in rows if len(row) > place)

    def _check(self, columns: Sequence[str]) -> None:
        if self.column not in columns:
            listed = ", ".join(columns)[:200] or "none"
            raise UserError(
                f"{self.path} has no column {self.column!r}; its columns are {listed}; of a table "
                "without a header line, give the number of the column"
            )


def read_file(path: Path) -> str:
    """The text of a UTF-8 file, without the byte order mark that some editors write."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it first"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read the text {path}: {error.strerror}") from error


class Prose(str):
    """A string that is a text even if a file has this name, such as a line read from a file."""


def content(text: object) -> str:
    """Return the text, read from its file if need be.

    Raises:
        UserError: If a file cannot be read, or a string is the name of a file: it would be measured
            in place of the file, and the numbers would look plausible.
    """
    if isinstance(text, TextColumn):
        return text.read()
    if isinstance(text, Path):
        return read_file(text)
    if not isinstance(text, str):
        raise UserError(f"a text must be a string or a file (Path), got {abbreviate(text)}")
    # A directory is not a text that could be meant, and its name ("data", ".") may well be one.
    # os.path.exists is False for strings that cannot be paths: too long, or with NUL characters.
    if not isinstance(text, Prose) and os.path.exists(text) and not os.path.isdir(text):
        raise UserError(
            f"the text {abbreviate(text)} is the name of a file; give Path({abbreviate(text)}) to "
            "read the "
            "file, or add a line break to use the name as a text"
        )
    return text
