"""The command `train`: a character language model with a choice of attention layers."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipscope.cli import options as opt
from lipscope.cli.terminal import progress, read_text, show_json, show_table, tell

if TYPE_CHECKING:
    from lipscope.papers.charlm.training import Training

of_model = partial(typer.Option, rich_help_panel="The model")
of_optimiser = partial(typer.Option, rich_help_panel="The optimiser")
of_run = partial(typer.Option, rich_help_panel="The run")


def train(
    text: Annotated[
        list[str],
        typer.Option(metavar="FILE|-", help="UTF-8 text to train on; repeatable; - reads stdin."),
    ],
    attention: Annotated[
        str, of_model(help="dot, l2, ball, contractive, contractive-ball or cosine.")
    ] = "l2",
    depth: Annotated[int, of_model(help="Number of blocks.")] = 4,
    width: Annotated[int, of_model(help="Embedding dimension.")] = 64,
    heads: Annotated[int, of_model(help="Heads per layer.")] = 4,
    context: Annotated[int, of_model(help="Maximum sequence length, in characters.")] = 64,
    norm: Annotated[str, of_model(help="Placement of LayerNorm: pre, post or none.")] = "pre",
    invertible: Annotated[
        bool, of_model("--invertible", help="Use invertible blocks, without norms.")
    ] = False,
    constant: Annotated[
        float | None,
        of_model(help="Lipschitz constant of contractive branches.", show_default="0.9"),
    ] = None,
    steps: Annotated[int, of_optimiser(help="Number of steps.")] = 2000,
    batch: Annotated[int, of_optimiser(help="Sequences per step.")] = 16,
    lr: Annotated[float, of_optimiser(help="Peak learning rate.")] = 3e-3,
    warmup: Annotated[int, of_optimiser(help="Steps of linear warm-up.")] = 50,
    weight_decay: Annotated[float, of_optimiser(help="AdamW weight decay.")] = 0.01,
    clip: Annotated[float, of_optimiser(help="Maximum gradient norm.")] = 1.0,
    seed: Annotated[int, of_run(help="Seed of weights and batches.")] = 0,
    every: Annotated[int, of_run(help="Steps between evaluations and checkpoints.")] = 200,
    device: Annotated[str, of_run(help="For example cpu, cuda or cuda:1.")] = "cpu",
    out: Annotated[
        Path | None,
        of_run(
            metavar="DIR",
            help="Directory to save to; rerun to resume.",
            show_default="trained-ATTENTION",
        ),
    ] = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Train a character language model that `lipscope measure` can load; reruns resume."""
    options = locals()
    # Every other option is a setting of the training, by the same name.
    settings = {k: v for k, v in options.items() if k not in ("text", "out", "as_json", "quiet")}
    with progress("training", quiet) as report:
        from lipscope.papers.charlm.files import write_curves
        from lipscope.papers.charlm.training import train_character_model
        from lipscope.study.reading import Prose, content

        sources = [read_text(source) for source in text]
        directory = out or Path(f"trained-{attention}")

        def kept(now: Training) -> None:
            report.doing = f"training, test loss {now.curve[-1].test:.3f}"
            # Drawing takes longer than a step, so the curves are drawn once, at the end.
            if now.step == now.recipe.steps:
                write_curves(now.curve, directory, now.text.unigram_loss)

        training = train_character_model(
            sources[0] if len(sources) == 1 else Prose("\n".join(map(content, sources))),
            out=directory,
            **settings,
            progress=report,
            kept=kept,
        )
    if as_json:
        show_json([asdict(point) for point in training.curve])
        return
    from lipscope.papers.charlm.files import curve_table

    show_table(curve_table(training.curve, training.text.unigram_loss), quiet)
    if not quiet:
        tell(f"the model and its curves are in {directory}; try `lipscope measure {directory}`", 0)
