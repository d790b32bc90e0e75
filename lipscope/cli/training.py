"""The command that trains a character language model with attention of one's choice."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lipscope.cli.terminal import progress, show_table


def train(
    text: Annotated[Path, typer.Option(metavar="FILE", help="UTF-8 text to learn.")],
    attention: Annotated[str, typer.Option(help="dot, l2, contractive or cosine.")] = "l2",
    depth: Annotated[int, typer.Option(help="Blocks.")] = 4,
    width: Annotated[int, typer.Option(help="Size of a token.")] = 64,
    heads: Annotated[int, typer.Option(help="Heads of a layer.")] = 4,
    context: Annotated[int, typer.Option(help="Characters the model sees at once.")] = 64,
    invertible: Annotated[bool, typer.Option("--invertible", help="Invertible blocks, no norms.")] = False,
    constant: Annotated[float, typer.Option(help="Lipschitz constant of contractive branches.")] = 0.9,
    norm: Annotated[str, typer.Option(help="LayerNorm before branches or after sums: pre, post or none.")] = "pre",
    steps: Annotated[int, typer.Option(help="Steps of the optimiser.")] = 2000,
    batch: Annotated[int, typer.Option(help="Windows a step.")] = 16,
    lr: Annotated[float, typer.Option(help="Largest learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Decides weights and batches.")] = 0,
    every: Annotated[int, typer.Option(help="Steps between readings and checkpoints.")] = 200,
    device: Annotated[str, typer.Option(help="As in cpu, cuda, cuda:1.")] = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the training; resume it.", show_default="trained-ATTENTION"),
    ] = None,
) -> None:
    """Train a character language model; its folder resumes after a kill, and `lipscope measure` reads it."""
    with progress("training") as report:
        from lipscope.linalg.device import usable_device
        from lipscope.nn.characters import read_characters
        from lipscope.nn.checkpoint import claimed
        from lipscope.nn.language_model import Architecture
        from lipscope.nn.training import Recipe, Training
        from lipscope.nn.training import train as run

        recipe = Recipe(steps, batch, lr, seed=seed, every=every)
        shape = Architecture(2, attention, depth, width, heads, context, invertible, constant, norm)
        learned = read_characters(text, context)
        architecture = replace(shape, vocabulary=len(learned.alphabet))
        training = Training(learned, architecture, recipe, usable_device(device))
        directory = out or Path(f"trained-{attention}")
        with claimed(directory):
            from lipscope.models.character_folder import save_character_model

            run(
                training,
                directory,
                report,
                lambda now: save_character_model(directory, now.model, learned.alphabet),
            )
            from lipscope.report.training import curve_table, write_curves

            write_curves(training.curve, directory, learned.unigram_loss)
    show_table(curve_table(training.curve, learned.unigram_loss))
    if sys.stderr.isatty():
        typer.echo(f"The model and its curves are in {directory}; try `lipscope measure {directory}`.", err=True)
