"""Penn Treebank as characters, from the user's own files: the licence does not allow shipping them.

Two forms are in circulation: words as they are, and one character per word with "_" for a space
(` n o _ i t _ w a s `). Both give the same text here, so that losses agree.
"""

from __future__ import annotations

import hashlib

import torch

from lipscope._types import UserError
from lipscope.papers.charlm.characters import UNKNOWN, CharacterText
from lipscope.papers.setting import TEXTS, Setting

LOOKED_AT = 1000
"""Words that decide in which form a file is."""


def plain_text(content: str) -> str:
    """The text of a file in either form, one sentence per line."""
    if not _spelled(content):
        return "\n".join(line.strip() for line in content.splitlines() if line.strip())
    lines = ("".join(line.split()) for line in content.splitlines())
    return "\n".join(line.replace("_", " ").strip() for line in lines if line)


def _spelled(content: str) -> bool:
    """Whether every word is a single character."""
    words = content.split(maxsplit=LOOKED_AT)[:LOOKED_AT]
    return len(words) > 0 and all(len(word) == 1 for word in words)


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
