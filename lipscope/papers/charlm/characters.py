"""A text as characters: its alphabet, a training part, a held-out part, and windows of both."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lipscope import UserError
from lipscope.study.reading import content

HELD_OUT = 10
"""The last 1/HELD_OUT of a text is for testing."""

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Part of every alphabet: it stands for the characters of other texts."""


@dataclass(frozen=True, eq=False)
class CharacterText:
    """A text as indices into its sorted alphabet, split into a training and a held-out part."""

    alphabet: str
    learned: Tensor
    held_out: Tensor
    digest: str

    @staticmethod
    def of(text: str, context: int) -> CharacterText:
        """Encode and split a text; it must be long enough for one held-out window of `context`."""
        needed = HELD_OUT * (context + 1)
        if len(text) < needed:
            raise UserError(
                f"the text has {len(text)} characters, and a context of {context} needs at least "
                f"{needed}; give more text, or a smaller context"
            )
        if len(set(text)) < 2:
            raise UserError(
                f"the text repeats a single character, {text[0]!r}; give a text with at least two"
            )
        cut = len(text) - len(text) // HELD_OUT
        return CharacterText._encoded(text[:cut], text[cut:], text)

    @staticmethod
    def of_parts(learned: str, held_out: str, context: int) -> CharacterText:
        """Encode a text whose held-out part is a file of its own."""
        shortest = min(len(learned), len(held_out))
        if shortest <= context:
            raise UserError(
                f"a part of the text has {shortest} characters, and a context of {context} needs "
                "more; give the whole files"
            )
        return CharacterText._encoded(learned, held_out, f"{learned}\0{held_out}")

    @staticmethod
    def _encoded(learned: str, held_out: str, whole: str) -> CharacterText:
        # Sorted: the same text gives the same indices, and so the same weights, in every process.
        alphabet = "".join(sorted({*learned, *held_out, UNKNOWN}))
        place = {character: i for i, character in enumerate(alphabet)}
        ids = [torch.tensor([place[one] for one in part]) for part in (learned, held_out)]
        digest = hashlib.sha256(whole.encode()).hexdigest()
        return CharacterText(alphabet=alphabet, learned=ids[0], held_out=ids[1], digest=digest)

    @property
    def unigram_loss(self) -> float:
        """The unigram baseline: held-out loss of character frequencies, in nats per character."""
        # Add-one smoothing: a held-out character that was never seen must not cost infinity.
        counts = torch.bincount(self.learned, minlength=len(self.alphabet)).double() + 1
        return float(-(counts / counts.sum()).log()[self.held_out].mean())

    @property
    def bigram_loss(self) -> float:
        """The bigram baseline, of character pairs: the best a model without attention can do."""
        size = len(self.alphabet)
        pairs = (
            torch.bincount(
                self.learned[:-1] * size + self.learned[1:], minlength=size * size
            ).double()
            + 1
        )
        chances = pairs.view(size, size) / pairs.view(size, size).sum(1, keepdim=True)
        return float(-chances.log()[self.held_out[:-1], self.held_out[1:]].mean())

    def draw(self, count: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows of the training part, and the same windows shifted by one character."""
        starts = torch.randint(len(self.learned) - context, (count,), generator=generator)
        return _windows(self.learned, starts, context)

    def test_windows(self, most: int, context: int) -> tuple[Tensor, Tensor]:
        """At most `most` disjoint windows, evenly spread over the held-out part."""
        # One character fewer: the targets of the last window end one further than its inputs.
        places = (len(self.held_out) - 1) // context
        chosen = torch.arange(min(most, places)) * places // min(most, places)
        return _windows(self.held_out, chosen * context, context)


def read_characters(text: str | Path, context: int) -> CharacterText:
    """Encode a text or a UTF-8 file, read as `lipscope measure` reads it."""
    return CharacterText.of(content(text), context)


def _windows(ids: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    rows = starts[:, None] + torch.arange(context)
    return ids[rows], ids[rows + 1]
