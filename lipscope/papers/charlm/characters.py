"""A text as characters: its alphabet, a training part, a held-out part, and windows of both.

Penn Treebank comes from the user's own files: the licence does not allow shipping them. Two forms
are in circulation: words as they are, and one character per word with "_" for a space
(` n o _ i t _ w a s `). Both give the same text here, so that losses agree.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lipscope import UserError
from lipscope.papers.setting import TEXTS, Setting
from lipscope.study.reading import content

HELD_OUT = 10
"""The last 1/HELD_OUT of a text is for testing."""

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Part of every alphabet: it stands for the characters of other texts."""

LOOKED_AT = 1000
"""Words that decide in which form a file of Penn Treebank is."""


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
        # Sorted: the same text gives the same indices, and so the same weights, in every process.
        alphabet = "".join(sorted({*text, UNKNOWN}))
        if len(set(text)) < 2:
            raise UserError(
                f"the text repeats a single character, {text[0]!r}; give a text with at least two"
            )
        place = {character: i for i, character in enumerate(alphabet)}
        ids = torch.tensor([place[character] for character in text])
        cut = len(text) - len(text) // HELD_OUT
        return CharacterText(
            alphabet=alphabet,
            learned=ids[:cut],
            held_out=ids[cut:],
            digest=hashlib.sha256(text.encode()).hexdigest(),
        )

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


def plain_text(content: str) -> str:
    """The text of a file in either form, one sentence per line."""
    words = content.split(maxsplit=LOOKED_AT)[:LOOKED_AT]
    if not words or any(len(word) > 1 for word in words):
        return "\n".join(line.strip() for line in content.splitlines() if line.strip())
    lines = ("".join(line.split()) for line in content.splitlines())
    return "\n".join(line.replace("_", " ").strip() for line in lines if line)


def split_text(learned: str, held_out: str, context: int) -> CharacterText:
    """A text whose held-out part is a file of its own."""
    shortest = min(len(learned), len(held_out))
    if shortest <= context:
        raise UserError(
            f"a part of the text has {shortest} characters, and a context of {context} needs more; "
            "give the whole files"
        )
    alphabet = "".join(sorted({*learned, *held_out, UNKNOWN}))
    place = {character: i for i, character in enumerate(alphabet)}
    ids = [torch.tensor([place[character] for character in part]) for part in (learned, held_out)]
    digest = hashlib.sha256(f"{learned}\0{held_out}".encode()).hexdigest()
    return CharacterText(alphabet=alphabet, learned=ids[0], held_out=ids[1], digest=digest)


def penn_treebank(setting: Setting, context: int) -> CharacterText:
    """The training and test part of Penn Treebank, or the embedded prose where it is missing.

    Raises:
        UserError: If one of the two files is there without the other.
    """
    (learned, no_training), (held_out, no_test) = (
        setting.text(name) for name in ("ptb_train", "ptb_test")
    )
    if no_training != no_test:
        here, missing = ("ptb_test", "ptb_train") if no_training else ("ptb_train", "ptb_test")
        raise UserError(
            f"the folder of texts has {TEXTS[here]} but not {TEXTS[missing]}; "
            "Penn Treebank needs both"
        )
    if no_training:
        return CharacterText.of(learned, context)
    return split_text(plain_text(learned), plain_text(held_out), context)
