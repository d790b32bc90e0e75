"""Compare attacks at equal perturbation norm: how much each changes a model's output.

A perturbation is a change of the token embeddings of one text, measured in the Frobenius norm.
Token swaps are discrete and determine the norm, per text and number of swaps; the other attacks are
given exactly that norm, and fractions of it that no swap can reach.
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

from lipscope._ambient import entry_point
from lipscope._checks import abbreviate
from lipscope._files import whole_file
from lipscope._notebook_bar import with_bar
from lipscope._types import UserError
from lipscope.attack.perturbation import (
    gradient_perturbations,
    random_perturbations,
    singular_perturbations,
)
from lipscope.attack.tokens import guided_swaps
from lipscope.models.embedded import default_text
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.probes.sentence import TextReader, sentence_embedding
from lipscope.probes.token_target import output_change
from lipscope.study.reading import check_vocabulary, special_frame
from lipscope.study.run import Progress
from lipscope.study.texts import Prose, TextColumn, content
from lipscope.study.work import threads_for

TOKENS = "token swap"
DIRECTION = "singular direction"
GRADIENT = "projected gradient"
RANDOM = "random"
SHARES = (0.01, 0.03, 0.1, 0.3)
"""Norms below that of one swap, as fractions of it."""

WIDTH = 16
"""Number of candidates measured per round of the token search."""

DEFAULT_TEXTS = 16


@dataclass(frozen=True)
class Contest:
    """The settings of a comparison.

    swaps:  the maximum number of tokens replaced in each text
    length: the number of tokens kept of each text, special tokens not counted
    seed:   the seed of the searches and of the random perturbations
    """

    swaps: int = 3
    length: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.swaps <= self.length:
            raise UserError(
                f"cannot replace {self.swaps} tokens in a text of {self.length}; "
                f"swaps must be 1 to {self.length}"
            )


class Trial(NamedTuple):
    """One attack on one text.

    budget:  the number of swaps whose norm the perturbation has, or the fraction of one swap's norm
    norm:    the norm of the perturbation E
    change:  ||F(X + E) - F(X)|| / ||F(X)||
    success: whether the nearest other text, by the cosine of sentence embeddings, has changed
    """

    text: int
    attack: str
    budget: float
    norm: float
    change: float
    success: bool


class Trials(list[Trial]):
    """The trials that :func:`compare_attacks` returns."""

    def plot(self) -> Any:
        """Plot the change of the output and the success of each attack; returns both Axes."""
        from lipscope.papers.attack_figures import contest_figure

        return contest_figure(self).axes

    def __repr__(self) -> str:
        texts = len({trial.text for trial in self})
        return f"Trials({len(self)} on {texts} texts)"

    def _repr_html_(self) -> str:
        from lipscope.report.notebook import terminal_html

        return terminal_html(comparison_table(self))


@dataclass(frozen=True, eq=False)
class AttackedText:
    """A text to attack: its token ids, the reader that runs them, their embeddings and output."""

    ids: list[int]
    reader: TextReader
    X: Tensor
    hidden: Tensor


@entry_point
@with_bar("attacking")
def compare_attacks(
    model: Any = None,
    texts: Sequence[str | Path] | None = None,
    contest: Contest | None = None,
    *,
    progress: Progress | None = None,
) -> Trials:
    """Run every attack on every text, at every perturbation norm.

    The attacks are token swaps, the top singular direction, projected gradient ascent and random
    perturbations.

    Args:
        model: A :class:`Model`, or anything :func:`load` takes, loaded in float32: the smallest
            change here is far above its resolution. Default: the embedded model.
        texts: At least three different texts, as strings or files (``Path``). Default: 16
            paragraphs of the embedded text.
        contest: Number of swaps, text length and seed, as a
            ``lipscope.papers.attack_comparison.Contest``.
        progress: Called with the number of texts done and their total. Default: a
            bar in notebooks, nothing elsewhere.

    Returns:
        A list with one :class:`Trial` per attack, text and norm; `plot` draws it.

    Raises:
        UserError: If there are too few texts, or a text is too short.

    Example:
        >>> import lipscope as ls
        >>> from lipscope.papers.attack_comparison import Contest
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast
        >>> vocabulary = "a the cat dog sat ran".split()
        >>> words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        >>> module = LlamaModel(LlamaConfig(
        ...     vocab_size=6, hidden_size=16, intermediate_size=24,
        ...     num_hidden_layers=1, num_attention_heads=2))
        >>> model = ls.load(module, tokenizer, dtype="float32", random_init=0)
        >>> texts = ["the cat sat", "a dog ran", "the dog sat"]
        >>> trials = ls.compare_attacks(model, texts, Contest(swaps=1, length=3))
        >>> sorted({trial.attack for trial in trials})
        ['projected gradient', 'random', 'singular direction', 'token swap']
    """
    contest = contest or Contest()
    model = model if isinstance(model, Model) else load(model, dtype="float32")
    samples = _samples(model, _default_texts() if texts is None else texts, contest)
    sentences = torch.cat([sentence_embedding(one.hidden) for one in samples])
    trials = Trials()
    for i, sample in enumerate(samples):
        if progress is not None:
            progress(i, len(samples))
        with threads_for(len(sample.ids)):
            trials += _attack_all_ways(model, sample, i, nearest_other(sentences, i), contest)
    return trials


def texts_in(*sources: Path | str | TextColumn) -> list[str]:
    """The non-empty lines of files or strings, one text per line."""
    lines = [line.strip() for source in sources for line in content(source).splitlines()]
    return [Prose(line) for line in lines if line]


def _default_texts() -> list[str]:
    paragraphs = default_text().split("\n\n")
    return paragraphs[:: len(paragraphs) // DEFAULT_TEXTS][:DEFAULT_TEXTS]


def _samples(model: Model, given: Sequence[str | Path], contest: Contest) -> list[AttackedText]:
    if isinstance(given, str | Path):
        raise UserError(f"texts must be a list of texts, got {abbreviate(given)}")
    texts = [content(text) for text in given]
    before, after = special_frame(model)
    # Texts that agree after truncation count once: each would be the other's neighbour for ever.
    every = {tuple(model.encode(text)[: contest.length]): text for text in texts}
    short = next((text for ids, text in every.items() if len(ids) < contest.swaps), None)
    if short is not None:
        raise UserError(
            f"the text {short[:40]!r} has too few tokens to replace {contest.swaps} of them; "
            "give a longer text, or fewer swaps"
        )
    if len(every) < 3:
        raise UserError(
            f"comparing attacks needs at least 3 different texts, got {len(every)}: "
            "with fewer, the nearest neighbour of a text cannot change"
        )
    found = []
    for ids in every:
        check_vocabulary(model, ids)
        reader = TextReader(model, len(ids), before, after)
        text = torch.tensor([ids])
        sample = AttackedText(
            ids=list(ids), reader=reader, X=reader.rows[text[0]], hidden=reader.hidden_of(text)
        )
        found.append(sample)
    return found


def nearest_other(sentences: Tensor, own: int) -> Callable[[Tensor], Tensor]:
    """Sentence embeddings [B, d] -> the text nearest to each by cosine, excluding text `own`."""
    left_out = torch.arange(len(sentences), device=sentences.device) == own
    return lambda s: (s @ sentences.T).masked_fill(left_out, -torch.inf).argmax(dim=1)


def _attack_all_ways(
    model: Model, v: AttackedText, text: int, nearest: Callable[[Tensor], Tensor], contest: Contest
) -> list[Trial]:
    """All attacks on one text; the swaps come first because they determine the norms."""
    target = output_change(model, v.ids, reader=v.reader, seed=contest.seed)
    swapped = [
        guided_swaps(target, v.ids, k, width=WIDTH, seed=contest.seed).ids
        for k in range(1, contest.swaps + 1)
    ]
    by_tokens = v.reader.rows[torch.tensor(swapped)] - v.X
    norms = by_tokens.norm(dim=(1, 2)).tolist()
    budgets = [*SHARES, *range(1, contest.swaps + 1)]
    radii = [share * norms[0] for share in SHARES] + norms
    f = v.reader.hidden
    seed = contest.seed
    # All attacks get the same norms; the random one is drawn differently for every text.
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
            Trial(text=text, attack=attack, budget=b, norm=size, change=change, success=success)
            for b, size, change, success in zip(given, sizes, changes, moved, strict=True)
        ]
    return trials


def comparison_table(trials: Sequence[Trial]) -> Table:
    """Per norm and attack: median and range of the change over texts, and the success count."""
    about = (
        "norm: median over texts; success: texts whose nearest neighbour, by sentence embedding, "
        "changed"
    )
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
    """Write a CSV file with one line per attack, text and norm."""
    with whole_file(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Trial._fields)
        writer.writerows(trials)
