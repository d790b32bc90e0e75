"""The commands `budget` and `check`: predicted numerical error, and whether a run is correct."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lipscope.cli import options as opt
from lipscope.cli.studies import write_page
from lipscope.cli.terminal import ExitCode, progress, read_texts, show_json, show_table, tell

Length = Annotated[int, opt.option("Maximum number of tokens per sequence.")]
Samples = Annotated[int, opt.option("Sequences taken from the text.")]
Probes = Annotated[int, opt.option("Backward passes per sequence.")]


def budget(
    model: opt.ModelName = None,
    text: opt.Texts = None,
    column: opt.Column = None,
    format: Annotated[
        str, opt.option("Some of bf16, fp16, int8, int4:32, fp8, w8a8, kv8, kv4, by commas.")
    ] = "bf16,int8",
    metric: Annotated[str, opt.option("output (last hidden state) or kl (next token).")] = "output",
    probes: Probes = 16,
    observe: Annotated[bool, opt.option("Run every format as well.", name="--observe")] = False,
    length: Length = 128,
    samples: Samples = 4,
    embeddings: Annotated[
        bool, opt.option("Round embeddings and a tied head as well.", name="--embeddings")
    ] = False,
    worst: Annotated[
        bool,
        opt.option("Bound σ after every site, for the worst case. Takes long.", name="--worst"),
    ] = False,
    random_init: opt.RandomInit = None,
    tokenizer: opt.Tokenizer = None,
    revision: opt.Revision = None,
    device: opt.Device = None,
    dtype: opt.Dtype = "float64",
    seed: opt.Seed = 0,
    workers: opt.Workers = 1,
    cluster: opt.Cluster = None,
    shard: opt.ShardOption = None,
    out: opt.StudyOut = None,
    csv: Annotated[Path | None, opt.option("Write all rows as CSV.", metavar="FILE")] = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Predict what low precision costs, and which layers and heads it comes from."""
    words: Any = read_texts(text, column, quiet)
    with progress("propagating", quiet=quiet) as report:
        engine = opt.parallel(workers, cluster, shard)
        from lipscope.models.loading import load, load_language_model
        from lipscope.probes.budget.formats import read_formats
        from lipscope.probes.budget.metrics import read_metric
        from lipscope.probes.budget.prediction import error_budget
        from lipscope.report.budgets import budget_table, shares_table

        read_formats(format)  # checked before a model is loaded, which may take a while
        opened = (load_language_model if read_metric(metric).head else load)(
            model, tokenizer, dtype=dtype, device=device, revision=revision, random_init=random_init
        )
        found = error_budget(
            opened,
            words,
            formats=format,
            probes=probes,
            metric=metric,
            observe=observe,
            length=length,
            samples=samples,
            embeddings=embeddings,
            worst=worst,
            seed=seed,
            **engine,
            out=out,
            progress=report,
        )
    if csv is not None:
        found.to_csv(csv)
    if as_json:
        show_json(found.as_dict())
    elif not found.formats:
        tell("no sequence belongs to this part", 0)
    else:
        show_table(budget_table(found), quiet)
        show_table("", quiet)
        show_table(shares_table(found), quiet)
    if out is not None:
        write_page(out, quiet)


def check(
    a: Annotated[str, typer.Argument(metavar="A", help="The reference: model id or directory.")],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B", help="Model id, directory, or file of hidden states (.safetensors, .npz)."
        ),
    ],
    text: opt.Texts = None,
    column: opt.Column = None,
    format: Annotated[str | None, opt.option("bf16, fp16 or fp32.", "of the file, or bf16")] = None,
    probes: Probes = 8,
    length: Length = 128,
    samples: Samples = 4,
    random_init: opt.RandomInit = None,
    tokenizer: opt.Tokenizer = None,
    device: opt.Device = None,
    dtype: opt.Dtype = "float64",
    seed: opt.Seed = 0,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Check whether rounding explains how B differs from A; exit code 1 if it does not.

    A file (.safetensors or .npz) holds hidden_states.0 to hidden_states.L of shape [B, n, d], as
    transformers returns them, and input_ids [B, n]. The last state is after the final norm; one
    from before it is recognised.
    """
    words: Any = read_texts(text, column, quiet)
    with progress("comparing", quiet=quiet) as report:
        from lipscope.models.loading import load
        from lipscope.probes.budget.comparing import check_format, check_run, recorded_path
        from lipscope.report.budgets import comparison_table

        check_format(format)  # before a model is loaded, which may take a while
        reference = load(a, tokenizer, dtype=dtype, device=device, random_init=random_init)
        run: Any = recorded_path(b)
        if run is None:
            run = load(b, dtype=dtype, device=device, random_init=random_init)
        found = check_run(
            reference,
            run,
            words,
            format=format,
            probes=probes,
            length=length,
            samples=samples,
            seed=seed,
            progress=report,
        )
    if as_json:
        show_json(found.as_dict())
    else:
        show_table(comparison_table(found), quiet)
    if not found.ok:
        raise typer.Exit(ExitCode.ANSWER_IS_NO)
