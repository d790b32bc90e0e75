"""Compare attacks at equal perturbation norm: how much each changes a model's output.

A perturbation is a change of the token embeddings of one text, measured in the Frobenius norm.
Token swaps are discrete and determine the norm, per text and number of swaps; the other attacks are
given exactly that norm, and fractions of it that no swap can reach.

    python benchmarks/attack_comparison.py                     # paragraphs of the embedded prose
    python benchmarks/attack_comparison.py --text FILE --out attacks/   # attacks.csv, attacks.png
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import lipscope as ls
from lipscope.attack.perturbation import (
    gradient_perturbations,
    random_perturbations,
    singular_perturbations,
)
from lipscope.attack.tokens import guided_swaps
from lipscope.models.embedded import default_text
from lipscope.probes.token_target import TextReader, output_change, sentence_embedding
from lipscope.report.palette import colour
from lipscope.study.reading import check_vocabulary, content, special_frame

TOKENS = "token swap"
DIRECTION = "singular direction"
GRADIENT = "projected gradient"
RANDOM = "random"
SHARES = (0.01, 0.03, 0.1, 0.3)
"""Norms below that of one swap, as fractions of it."""

WIDTH = 16
"""Number of candidates measured per round of the token search."""

DEFAULT_TEXTS = 16


LOOKS = {
    GRADIENT: (colour("s0"), "o-"),
    DIRECTION: (colour("s2"), "s-"),
    TOKENS: (colour("s1"), "D--"),
    RANDOM: (colour("muted"), "^:"),
}
"""Colour and marker of each attack; the markers distinguish them without colour."""


@dataclass(frozen=True)
class Settings:
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
            raise ls.UserError(
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


@dataclass(frozen=True, eq=False)
class AttackedText:
    """A text to attack: its token ids, the reader that runs them, their embeddings and output."""

    ids: list[int]
    reader: TextReader
    X: Tensor
    hidden: Tensor


def compare_attacks(model: ls.Model, texts: Sequence[str], settings: Settings) -> list[Trial]:
    """Run every attack on every text, at every perturbation norm."""
    samples = _samples(model, texts, settings)
    sentences = torch.cat([sentence_embedding(one.hidden) for one in samples])
    trials = []
    for i, one in enumerate(track(samples, console=Console(stderr=True), transient=True)):
        trials += _attack_all_ways(model, one, i, nearest_other(sentences, i), settings)
    return trials


def texts_in(path: Path) -> list[str]:
    """The non-empty lines of a file, one text per line."""
    return [line.strip() for line in content(path).splitlines() if line.strip()]


def _samples(model: ls.Model, texts: Sequence[str], settings: Settings) -> list[AttackedText]:
    before, after = special_frame(model)
    # Texts that agree after truncation count once: each would be the other's neighbour for ever.
    every = {tuple(model.encode(text)[: settings.length]): text for text in texts}
    short = next((text for ids, text in every.items() if len(ids) < settings.swaps), None)
    if short is not None:
        raise ls.UserError(
            f"the text {short[:40]!r} has too few tokens to replace {settings.swaps} of them; "
            "give a longer text, or fewer swaps"
        )
    if len(every) < 3:
        raise ls.UserError(
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
    model: ls.Model,
    v: AttackedText,
    text: int,
    nearest: Callable[[Tensor], Tensor],
    settings: Settings,
) -> list[Trial]:
    """All attacks on one text; the swaps come first because they determine the norms."""
    target = output_change(model, v.ids, reader=v.reader, seed=settings.seed)
    swapped = [
        guided_swaps(target, v.ids, k, width=WIDTH, seed=settings.seed).ids
        for k in range(1, settings.swaps + 1)
    ]
    by_tokens = v.reader.rows[torch.tensor(swapped)] - v.X
    norms = by_tokens.norm(dim=(1, 2)).tolist()
    budgets = [*SHARES, *range(1, settings.swaps + 1)]
    radii = [share * norms[0] for share in SHARES] + norms
    f = v.reader.hidden
    seed = settings.seed
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


def comparison_figure(trials: Sequence[Trial]) -> Figure:
    """Change of the output, and share of texts whose nearest neighbour changed, by norm."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    count = len({t.text for t in trials})
    for attack, (tint, mark) in LOOKS.items():
        here = {
            b: [t for t in trials if (t.attack, t.budget) == (attack, b)]
            for b in sorted({t.budget for t in trials if t.attack == attack})
        }
        # Attacks reach a budget only nearly: they are compared at the norms they really have.
        norms = [median(t.norm for t in rows) for rows in here.values()]
        changes = [sorted(t.change for t in rows) for rows in here.values()]
        low = [c[0] for c in changes]
        high = [c[-1] for c in changes]
        left.plot(norms, [median(c) for c in changes], mark, color=tint, markersize=4, label=attack)
        left.fill_between(norms, low, high, color=tint, alpha=0.12, linewidth=0)
        shares = [100 * sum(t.success for t in rows) / len(rows) for rows in here.values()]
        right.plot(norms, shares, mark, color=tint, markersize=4, label=attack)
    left.set(
        xscale="log", yscale="log", ylabel="‖F(X+E) − F(X)‖ / ‖F(X)‖", title="change of the output"
    )
    right.set(xscale="log", ylabel="texts, %", ylim=(-4, 104), title="nearest neighbour changed")
    for ax in (left, right):
        ax.set_xlabel(f"‖E‖, Frobenius norm in embeddings (median of {count} texts)")
        ax.grid(alpha=0.25, which="both" if ax is left else "major")
    left.legend(fontsize="small")
    return figure


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="by default the embedded one")
    parser.add_argument("--text", type=Path, help="one text per line")
    parser.add_argument("--swaps", type=int, default=3)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="directory for attacks.csv and attacks.png")
    options = parser.parse_args(words)
    settings = Settings(options.swaps, options.length, options.seed)
    if options.text is None:
        paragraphs = default_text().split("\n\n")
        texts = paragraphs[:: len(paragraphs) // DEFAULT_TEXTS][:DEFAULT_TEXTS]
    else:
        texts = texts_in(options.text)
    # Swapped words change the output far more than float32 rounds it.
    trials = compare_attacks(ls.load(options.model, dtype="float32"), texts, settings)
    Console().print(comparison_table(trials))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "attacks.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Trial._fields, *trials])
        comparison_figure(trials).savefig(options.out / "attacks.png", dpi=150)


if __name__ == "__main__":
    main()
