"""The command that trains a character language model with attention of one's choice."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipscope._types import UserError
from lipscope.cli.terminal import Report, farewell, progress, read_text, show_table

if TYPE_CHECKING:
    from lipscope.charlm.training import Training

of_model = partial(typer.Option, rich_help_panel="The model")
of_optimiser = partial(typer.Option, rich_help_panel="The optimiser")
of_run = partial(typer.Option, rich_help_panel="The run")


def train(
    text: Annotated[str, typer.Option(metavar="FILE|-", help="UTF-8 text to learn; - is stdin.")],
    attention: Annotated[str, of_model(help="dot, l2, contractive or cosine.")] = "l2",
    depth: Annotated[int, of_model(help="Blocks.")] = 4,
    width: Annotated[int, of_model(help="Size of a token.")] = 64,
    heads: Annotated[int, of_model(help="Heads of a layer.")] = 4,
    context: Annotated[int, of_model(help="Characters the model sees at once.")] = 64,
    norm: Annotated[
        str, of_model(help="LayerNorm before branches or after sums: pre, post or none.")
    ] = "pre",
    invertible: Annotated[
        bool, of_model("--invertible", help="Invertible blocks, no norms.")
    ] = False,
    constant: Annotated[
        float | None,
        of_model(help="Lipschitz constant of contractive branches.", show_default="0.9"),
    ] = None,
    steps: Annotated[int, of_optimiser(help="Steps.")] = 2000,
    batch: Annotated[int, of_optimiser(help="Windows a step.")] = 16,
    lr: Annotated[float, of_optimiser(help="Largest learning rate.")] = 3e-3,
    warmup: Annotated[int, of_optimiser(help="Steps until it is reached.")] = 50,
    weight_decay: Annotated[float, of_optimiser(help="Of AdamW.")] = 0.01,
    clip: Annotated[float, of_optimiser(help="Largest norm of a gradient.")] = 1.0,
    seed: Annotated[int, of_run(help="Decides weights and batches.")] = 0,
    every: Annotated[int, of_run(help="Steps between readings and checkpoints.")] = 200,
    device: Annotated[str, of_run(help="As in cpu, cuda, cuda:1.")] = "cpu",
    out: Annotated[
        Path | None,
        of_run(
            metavar="DIR", help="Keep the training; resume it.", show_default="trained-ATTENTION"
        ),
    ] = None,
) -> None:
    """Train a character language model; its folder resumes after a kill, and `lipscope measure` reads it."""
    unchanged = "Stopped before a step was taken; nothing has changed. Give the same command again."
    with farewell(unchanged), progress("training") as report:
        from lipscope.charlm.characters import read_characters
        from lipscope.charlm.language_model import Architecture
        from lipscope.charlm.training import Recipe, Training
        from lipscope.linalg.device import usable_device

        recipe = Recipe(
            steps=steps,
            batch=batch,
            lr=lr,
            warmup=warmup,
            weight_decay=weight_decay,
            clip=clip,
            seed=seed,
            every=every,
        )
        shape = Architecture(
            vocabulary=2,
            attention=attention,
            depth=depth,
            width=width,
            heads=heads,
            context=context,
            invertible=invertible,
            norm=norm,
        )
        if constant is not None:
            shape = replace(shape, constant=constant)
            if attention != "contractive":
                raise UserError(
                    f"--constant is for --attention contractive; {attention} attention takes none"
                )
        learned = read_characters(read_text(text), context)
        training = Training(
            learned, replace(shape, vocabulary=len(learned.alphabet)), recipe, usable_device(device)
        )
        directory = out or Path(f"trained-{attention}")
        _run(training, directory, report)
    _show(training, directory)


def _run(training: Training, directory: Path, report: Report) -> None:
    """What is left of the training; its model is kept at every checkpoint, its curves at the end."""
    from lipscope.charlm.checkpoint import claimed
    from lipscope.charlm.folder import save_character_model
    from lipscope.charlm.training import train as run
    from lipscope.report.training import write_curves

    def keep(now: Training) -> None:
        report.doing = f"training, test loss {now.curve[-1].test:.3f}"
        save_character_model(directory, now.model, now.text.alphabet)
        if now.step == now.recipe.steps:
            write_curves(now.curve, directory, now.text.unigram_loss)

    with claimed(directory):
        run(training, directory, report, keep)


def _show(training: Training, directory: Path) -> None:
    with farewell(f"Stopped; the training is done, and its model and curves are in {directory}."):
        from lipscope.report.training import curve_table

        show_table(curve_table(training.curve, training.text.unigram_loss))
    if sys.stderr.isatty():
        typer.echo(
            f"The model and its curves are in {directory}; try `lipscope measure {directory}`.",
            err=True,
        )
