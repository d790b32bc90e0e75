"""The commands `bounds` and `attack`: theorems beside measurements, and worst-case inputs."""

from __future__ import annotations

from typing import Annotated

import typer

from lipscope._types import UserError
from lipscope.cli.options import (
    AsJson,
    Cluster,
    Column,
    Device,
    Layers,
    ModelName,
    Quiet,
    RandomInit,
    Revision,
    Seed,
    ShardOption,
    StudyOut,
    Texts,
    Tokenizer,
    Workers,
    check_parallel,
)
from lipscope.cli.studies import write_page
from lipscope.cli.terminal import numbers, progress, read_texts, show_json, show_table, warn

Dtype = Annotated[
    str | None,
    typer.Option(help="float64 is most accurate.", show_default="float64; compare: float32"),
]


def bounds(
    model: ModelName = None,
    text: Texts = None,
    column: Column = None,
    layers: Layers = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens per sample.", show_default="64")
    ] = None,
    radius: Annotated[
        float | None, typer.Option(help="Radius of the ball of inputs.", show_default="the text's")
    ] = None,
    random_init: RandomInit = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="float64 is most accurate.")] = "float64",
    seed: Seed = 0,
    workers: Workers = 1,
    cluster: Cluster = None,
    shard: ShardOption = None,
    out: StudyOut = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare every theorem with the measured constant of each head and the worst input found."""
    sizes = numbers("lengths", lengths)
    where = numbers("layers", layers)
    words = read_texts(text, column, quiet)
    with progress(quiet=quiet) as report:
        part = check_parallel(workers, cluster, shard)  # before a model is loaded
        from lipscope.models.loading import load
        from lipscope.probes.bounds import audit_model
        from lipscope.report.bounds import bound_summary

        loaded = load(
            model,
            tokenizer,
            dtype=dtype,
            device=device,
            revision=revision,
            random_init=random_init,
        )
        found = audit_model(
            loaded,
            words,
            sizes,
            where,
            radius=radius,
            seed=seed,
            workers=workers,
            cluster=cluster,
            shard=part,
            out=out,
            progress=report,
        )
    if as_json:
        from lipscope.study.export import as_dict

        show_json({**as_dict(found.study), "not_offered": found.not_offered})
    else:
        show_table(bound_summary(found), quiet)
    if out is not None:
        write_page(out, quiet)


def attack(
    kind: Annotated[str, typer.Option(help="One of construction, ascent, direction, tokens.")],
    model: ModelName = None,
    text: Texts = None,
    column: Column = None,
    layers: Layers = None,
    length: Annotated[int, typer.Option(help="Number of tokens taken from the text.")] = 32,
    swaps: Annotated[int, typer.Option(help="Maximum number of tokens to replace.")] = 3,
    seconds: Annotated[
        float | None,
        typer.Option(help="Time limit of --kind tokens.", show_default="no limit"),
    ] = None,
    random_init: RandomInit = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    workers: Workers = 1,
    cluster: Cluster = None,
    shard: ShardOption = None,
    out: StudyOut = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Search for inputs, or replacement words, that attention is most sensitive to."""
    if seconds is not None and kind != "tokens":
        raise UserError("--seconds limits the searches of --kind tokens; leave it out")
    where = numbers("layers", layers)
    words = read_texts(text, column, quiet)
    with progress("attacking", quiet) as report:
        from lipscope.models.loading import load
        from lipscope.probes.attack import AttackPlan, attack_model, attack_table

        # Settings are checked before a model is loaded, which may take a while.
        part = check_parallel(workers, cluster, shard)
        plan = AttackPlan(kind, length, swaps, where, seed, seconds)
        loaded = load(
            model,
            tokenizer,
            dtype=dtype or "float64",
            device=device,
            revision=revision,
            random_init=random_init,
        )
        study, lines = attack_model(
            loaded,
            words,
            plan,
            workers=workers,
            cluster=cluster,
            shard=part,
            out=out,
            progress=report,
        )
    if not lines and shard is None and not quiet:
        warn("the searches ended before a text was measured; give more --seconds")
    if as_json:
        show_json([line._asdict() for line in lines])
    else:
        show_table(attack_table(study, lines), quiet)
    if out is not None:
        write_page(out, quiet)
