"""The commands that look for the worst: every theorem against each head, and attacks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipscope._types import UserError
from lipscope.cli.terminal import numbers, progress, read_text, show_table


def bounds(
    model: Annotated[
        str | None, typer.Argument(help="Hub name or folder.", show_default="embedded MiniLM")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE|-", show_default="embedded prose")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="As in 0,2 or 0-5.", show_default="all")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens per sample.", show_default="64")
    ] = None,
    radius: Annotated[
        float | None, typer.Option(help="Of the ball.", show_default="the text's")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the study; resume it.")
    ] = None,
) -> None:
    """Hold every theorem against each head: bounds, the worst input found, and how tight they are."""
    sizes, where, words = (
        numbers("lengths", lengths),
        numbers("layers", layers),
        text and read_text(text),
    )
    with progress() as report:
        from lipscope.audit.heads import audit_model
        from lipscope.report.bound_table import bound_summary

        found = audit_model(model, words, sizes, where, radius=radius, out=out, progress=report)
    show_table(bound_summary(found))


def attack(
    kind: Annotated[str, typer.Option(help="construction, ascent, direction, tokens or compare.")],
    model: Annotated[
        str | None, typer.Argument(help="Hub name or folder.", show_default="embedded MiniLM")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE|-", show_default="embedded prose")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="As in 0,2 or 0-5.", show_default="all")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of the text.")] = 32,
    swaps: Annotated[int, typer.Option(help="Tokens to replace, at most.")] = 3,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the study.")] = None,
) -> None:
    """Look for inputs, or words, on which attention reacts most.

    Kind compare sets attacks on the whole model against each other at equal norm, on a text in each line of the file.
    """
    if kind == "compare":
        if layers is not None:
            raise UserError("kind compare attacks the whole model; leave --layers out.")
        return _compare(model, text, length, swaps, out)
    with progress() as report:
        from lipscope.audit.attacks import Plan, attack_model, attack_table

        plan = Plan(kind, length, swaps, numbers("layers", layers))
        found = attack_model(model, text and read_text(text), plan, out=out, progress=report)
    show_table(attack_table(*found))


def _compare(
    model: str | None, text: str | None, length: int, swaps: int, out: Path | None
) -> None:
    """Prints the table; with `out` also leaves attacks.csv and attacks.png there."""
    with progress() as report:
        from lipscope.audit.attack_comparison import (
            Contest,
            compare_attacks,
            comparison_table,
            texts_in,
            write_trials,
        )

        texts = None if text is None else texts_in(read_text(text))
        trials = compare_attacks(model, texts, Contest(swaps, length), progress=report)
    show_table(comparison_table(trials))
    if out is not None:
        from lipscope.report.attack_figures import contest_figure

        out.mkdir(parents=True, exist_ok=True)
        write_trials(trials, out / "attacks.csv")
        contest_figure(trials).savefig(out / "attacks.png", dpi=150)
