"""The commands `bounds` and `attack`: theorems beside measurements, and worst-case inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipscope._types import UserError
from lipscope.cli.terminal import numbers, progress, read_text, show_table


def bounds(
    model: Annotated[
        str | None, typer.Argument(help="Model id or directory.", show_default="embedded MiniLM")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-", help="UTF-8 text; - reads stdin.", show_default="embedded prose"
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="For example 0,2 or 0-5.", show_default="all")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens per sample.", show_default="64")
    ] = None,
    radius: Annotated[
        float | None, typer.Option(help="Radius of the ball of inputs.", show_default="the text's")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory to save the study in; rerun to resume."),
    ] = None,
) -> None:
    """Compare every theorem with the measured constant of each head and the worst input found."""
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
    kind: Annotated[
        str, typer.Option(help="One of construction, ascent, direction, tokens, compare.")
    ],
    model: Annotated[
        str | None, typer.Argument(help="Model id or directory.", show_default="embedded MiniLM")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-", help="UTF-8 text; - reads stdin.", show_default="embedded prose"
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="For example 0,2 or 0-5.", show_default="all")
    ] = None,
    length: Annotated[int, typer.Option(help="Number of tokens taken from the text.")] = 32,
    swaps: Annotated[int, typer.Option(help="Maximum number of tokens to replace.")] = 3,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory to save the results in.")
    ] = None,
) -> None:
    """Search for inputs, or replacement words, that attention is most sensitive to.

    The kind `compare` compares attacks on the whole model at equal norm, one text per line.
    """
    if kind == "compare":
        if layers is not None:
            raise UserError("--kind compare attacks the whole model; leave --layers out")
        return _compare(model, text, length, swaps, out)
    with progress() as report:
        from lipscope.audit.attacks import Plan, attack_model, attack_table

        plan = Plan(kind=kind, length=length, swaps=swaps, layers=numbers("layers", layers))
        found = attack_model(model, text and read_text(text), plan, out=out, progress=report)
    show_table(attack_table(*found))


def _compare(
    model: str | None, text: str | None, length: int, swaps: int, out: Path | None
) -> None:
    """Print the table; with `out`, also write attacks.csv and attacks.png there."""
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
