"""Attacks against each other at equal perturbation norm: how much each changes a model's output, and its neighbours.

A perturbation is a change of the token embeddings of one text, its size the Frobenius norm. Replacing tokens fixes the
size, for each text and each number of swaps; the other attacks then get exactly that norm, and shares of it where no
token can follow.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from lipscope._files import whole_file
from lipscope._types import UserError
from lipscope.attack.perturbation import (
    gradient_perturbations,
    random_perturbations,
    singular_perturbations,
)
from lipscope.attack.tokens import guided_swaps
from lipscope.audit.sentence import TextReader, sentence_embedding
from lipscope.audit.token_target import output_change
from lipscope.models.embedded import default_text
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.study.reading import check_vocabulary, read_file, special_frame
from lipscope.study.work import threads_for
from lipscope.study.writer import Progress

TOKENS, DIRECTION, GRADIENT, RANDOM = (
    "token swap",
    "singular direction",
    "projected gradient",
    "random",
)
SHARES = (0.01, 0.03, 0.1, 0.3)
"""Norms below that of one swap, as shares of it."""

WIDTH = 16
"""Candidates measured at a turn of the token search."""

DEFAULT_TEXTS = 16


@dataclass(frozen=True)
class Contest:
    """Up to how many tokens are replaced, in how many tokens of each text, the special tokens not counted."""

    swaps: int = 3
    length: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.swaps <= self.length:
            raise UserError(
                f"cannot replace {self.swaps} tokens in a text of {self.length}: swaps must be 1 to {self.length}."
            )


class Trial(NamedTuple):
    """One attack on one text: the norm of the perturbation, ||F(X + E) - F(X)|| / ||F(X)||, and its success.

    budget is the number of swaps whose norm it has, or the share of the norm of one; the attack succeeds where the text
    nearest to it, by the cosine of sentence embeddings, is another one than before.
    """

    text: int
    attack: str
    budget: float
    norm: float
    change: float
    success: bool


@dataclass(frozen=True, eq=False)
class Victim:
    """A text in the model's hands: token ids, their embeddings, what comes out, and how it is read."""

    ids: list[int]
    reader: TextReader
    X: Tensor
    hidden: Tensor


def compare_attacks(
    model: Any = None,
    texts: Sequence[str] | None = None,
    contest: Contest | None = None,
    *,
    progress: Progress | None = None,
) -> list[Trial]:
    """Every attack on every text, at every norm. Texts: 16 paragraphs of the embedded prose, unless given.

    model: a loaded Model, or a name, loaded in float32: the smallest change here is far above its resolution.
    """
    contest = contest or Contest()
    model = model if isinstance(model, Model) else load(model, dtype="float32")
    victims = _victims(model, _default_texts() if texts is None else texts, contest)
    sentences = torch.cat([sentence_embedding(one.hidden) for one in victims])
    trials: list[Trial] = []
    for i, victim in enumerate(victims):
        if progress is not None:
            progress(i, len(victims))
        with threads_for(len(victim.ids)):
            trials += _duel(model, victim, i, nearest_other(sentences, i), contest)
    return trials


def texts_in(source: Path | str) -> list[str]:
    """The lines that hold anything of a file, or of a string: one text each."""
    whole = read_file(source) if isinstance(source, Path) else source
    return [line.strip() for line in whole.splitlines() if line.strip()]


def _default_texts() -> list[str]:
    paragraphs = default_text().split("\n\n")
    return paragraphs[:: len(paragraphs) // DEFAULT_TEXTS][:DEFAULT_TEXTS]


def _victims(model: Model, texts: Sequence[str], contest: Contest) -> list[Victim]:
    before, after = special_frame(model)
    every = {tuple(model.encode(text)[: contest.length]): text for text in texts}
    short = next((text for ids, text in every.items() if len(ids) < contest.swaps), None)
    if short is not None:
        raise UserError(
            f"the text {short[:40]!r} has too few tokens to replace {contest.swaps} of them."
        )
    if len(every) < 3:
        raise UserError(
            f"a nearest neighbour can change among at least 3 different texts, got {len(every)}."
        )
    found = []
    for ids in every:
        check_vocabulary(model, ids)
        reader = TextReader(model, len(ids), before, after)
        text = torch.tensor([ids])
        found.append(Victim(list(ids), reader, reader.rows[text[0]], reader.hidden_of(text)))
    return found


def nearest_other(sentences: Tensor, own: int) -> Callable[[Tensor], Tensor]:
    """Sentence embeddings [B, d] -> which text is nearest to each by cosine, text `own` left out."""
    left_out = torch.arange(len(sentences)) == own
    return lambda s: (s @ sentences.T).masked_fill(left_out, -torch.inf).argmax(dim=1)


def _duel(
    model: Model, v: Victim, text: int, nearest: Callable[[Tensor], Tensor], contest: Contest
) -> list[Trial]:
    """All attacks on one text: the swaps first, for they set the norms."""
    target = output_change(model, v.ids, reader=v.reader, seed=contest.seed)
    swapped = [
        guided_swaps(target, v.ids, k, width=WIDTH, seed=contest.seed).ids
        for k in range(1, contest.swaps + 1)
    ]
    by_tokens = v.reader.rows[torch.tensor(swapped)] - v.X
    norms = by_tokens.norm(dim=(1, 2)).tolist()
    budgets = [*SHARES, *range(1, contest.swaps + 1)]
    radii = [share * norms[0] for share in SHARES] + norms
    f, seed = v.reader.hidden, contest.seed
    found = {
        TOKENS: (budgets[len(SHARES) :], by_tokens),
        DIRECTION: (budgets, singular_perturbations(f, v.X, radii, seed=seed)),
        GRADIENT: (budgets, gradient_perturbations(f, v.X, radii, seed=seed)),
        RANDOM: (budgets, random_perturbations(v.X, radii, seed=seed + text)),
    }
    before = nearest(sentence_embedding(v.hidden)).item()
    trials = []
    for attack, (given, E) in found.items():
        with torch.no_grad():
            after = f(v.X + E)
        changes = ((after - v.hidden).norm(dim=(1, 2)) / v.hidden.norm()).tolist()
        moved = (nearest(sentence_embedding(after)) != before).tolist()
        sizes = E.norm(dim=(1, 2)).tolist()
        trials += [
            Trial(text, attack, *row) for row in zip(given, sizes, changes, moved, strict=True)
        ]
    return trials


def comparison_table(trials: Sequence[Trial]) -> Table:
    """Median and range of the change over texts, and how many texts have another neighbour, norm by norm."""
    about = "norm: median over texts; success: texts whose nearest neighbour, by sentence embedding, changed"
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), caption=about, caption_justify="left"
    )
    for name in ("norm of", "norm", "attack", "change of the output", "success"):
        table.add_column(name)
    attacks = list(dict.fromkeys(one.attack for one in trials))
    for budget in sorted({one.budget for one in trials}):
        rows = {
            attack: [t for t in trials if (t.attack, t.budget) == (attack, budget)]
            for attack in attacks
        }
        size = median(t.norm for here in rows.values() for t in here)
        label = (f"{budget:g} swap" + ("s" if budget > 1 else ""), f"{size:.3g}")
        for attack in sorted(
            (a for a in attacks if rows[a]), key=lambda a: -median(t.change for t in rows[a])
        ):
            changes = [t.change for t in rows[attack]]
            spread = f"{median(changes):.3g} [{min(changes):.3g}, {max(changes):.3g}]"
            table.add_row(
                *label, attack, spread, f"{sum(t.success for t in rows[attack])} of {len(changes)}"
            )
            label = ("", "")
    return table


def write_trials(trials: Sequence[Trial], path: Path) -> None:
    """One line for each attack on each text at each norm."""
    with whole_file(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Trial._fields)
        writer.writerows(trials)
