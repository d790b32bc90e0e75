"""The commands `budget` and `check`: predicted numerical error, and whether a run is correct."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lipscope.cli.options import AsJson, ModelName, Quiet, Seed, StudyOut, Texts
from lipscope.cli.terminal import ExitCode, progress, read_texts, show_json, show_table

Length = Annotated[int, typer.Option(help="Maximum number of tokens per sequence.")]
Samples = Annotated[int, typer.Option(help="Sequences taken from the text.")]
Probes = Annotated[int, typer.Option(help="Backward passes per sequence.")]


def budget(
    model: ModelName = None,
    text: Texts = None,
    format: Annotated[
        str,
        typer.Option(help="Some of bf16, fp16, int8, int4:32, fp8, w8a8, kv8, kv4, by commas."),
    ] = "bf16,int8",
    metric: Annotated[
        str, typer.Option(help="output (last hidden state) or kl (next token).")
    ] = "output",
    probes: Probes = 16,
    observe: Annotated[bool, typer.Option("--observe", help="Run every format as well.")] = False,
    scores: Annotated[
        bool,
        typer.Option("--scores", help="Compare published scores of weights and key-value heads."),
    ] = False,
    length: Length = 128,
    samples: Samples = 4,
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Round embeddings and a tied head as well.")
    ] = False,
    worst: Annotated[
        bool,
        typer.Option("--worst", help="Measure σ after every site, for the worst case. Takes long."),
    ] = False,
    seed: Seed = 0,
    out: StudyOut = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all rows as CSV.")] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the layers to keep high as JSON for llm-compressor, ModelOpt and MLX.",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Predict what low precision costs, and which layers and heads it comes from."""
    words: Any = read_texts(text)
    with progress("propagating", quiet=quiet) as report:
        from lipscope.budget.layer_lists import layer_lists
        from lipscope.budget.prediction import error_budget
        from lipscope.budget.scores import compare_scores
        from lipscope.report.budgets import budget_table, score_table, shares_table

        found = error_budget(
            model,
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
            out=out,
            command=_line(
                model,
                text,
                {
                    "--format": format,
                    "--metric": metric,
                    "--probes": probes,
                    "--length": length,
                    "--samples": samples,
                    "--seed": seed,
                },
                {"--observe": observe, "--embeddings": embeddings},
            ),
            progress=report,
        )
        ranked = (
            compare_scores(
                model,
                words,
                formats=[f for f in found.formats if f.startswith(("int", "fp8", "kv"))],
                probes=probes,
                metric=metric,
                length=length,
                samples=samples,
                seed=seed,
            )
            if scores
            else None
        )
    if csv is not None:
        found.to_csv(csv)
    if keep is not None:
        from lipscope._files import whole_file

        stored = [f for f in found.formats if f.startswith(("int", "fp8", "w"))]
        lists = {name: layer_lists(found, name) for name in stored or found.formats}
        with whole_file(keep) as draft:
            draft.write_text(json.dumps(lists, indent=1), encoding="utf-8")
    if as_json:
        rows = [] if ranked is None else [row._asdict() for row in ranked.rows]
        show_json({**found.as_dict(), "scores": rows})
        return
    show_table(budget_table(found), quiet)
    show_table("", quiet)
    show_table(shares_table(found), quiet)
    if ranked is not None:
        show_table("", quiet)
        show_table(score_table(ranked), quiet)


def _line(
    model: str | None,
    text: list[str] | None,
    options: Mapping[str, object],
    flags: Mapping[str, bool],
) -> str:
    """The command line that a study notes."""
    texts = [word for name in text or () for word in ("--text", name)]
    given = [word for name, value in options.items() for word in (name, str(value))]
    given += [name for name, on in flags.items() if on]
    return shlex.join(["lipscope", "budget", *([model] if model else []), *texts, *given])


def check(
    a: Annotated[str, typer.Argument(metavar="A", help="The reference: model id or directory.")],
    b: Annotated[
        str,
        typer.Argument(metavar="B", help="Model id, directory, or safetensors of hidden states."),
    ],
    text: Texts = None,
    format: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32.", show_default="of the file, or bf16")
    ] = None,
    probes: Probes = 8,
    length: Length = 128,
    samples: Samples = 4,
    seed: Seed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check whether rounding explains how B differs from A; exit code 1 if it does not.

    A file holds hidden_states.0 to hidden_states.L of shape [B, n, d], and input_ids [B, n].
    """
    words: Any = read_texts(text)
    with progress("comparing", quiet=quiet):
        from lipscope.budget.comparing import compare_runs
        from lipscope.report.budgets import comparison_table

        found = compare_runs(
            a,
            b,
            words,
            format=format,
            probes=probes,
            length=length,
            samples=samples,
            seed=seed,
        )
    if as_json:
        show_json(found.as_dict())
    else:
        show_table(comparison_table(found), quiet)
    if not found.ok:
        raise typer.Exit(ExitCode.ANSWER_IS_NO)
