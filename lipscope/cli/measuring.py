"""The commands `measure`, `bounds` and `attack`: one model on a text, layer by layer."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lipscope._types import UserError
from lipscope.cli import options as opt
from lipscope.cli.studies import REPORT, print_study, save_page, write_page
from lipscope.cli.terminal import (
    ExitCode,
    numbers,
    progress,
    read_texts,
    show_json,
    show_table,
    tell,
    warn,
)

if TYPE_CHECKING:
    from lipscope.study.study import Study


class MeasureCommand(TyperCommand):
    """Appends the table of scopes and their formulas to the help text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from lipscope.models.scopes import SCOPES

        super().format_help(ctx, formatter)
        typer.echo(" Scopes: the map f whose constant is measured at X, one token per row.\n")
        for name, scope in SCOPES.items():
            typer.echo(f"   {name:<10} {scope.formula}\n{'':<14}{scope.description}")


def on_ranks(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command that takes `device` and `workers` run on all processes of torchrun."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # not started by torchrun
            return command(*args, **kwargs)
        from lipscope.linalg.space import LostRankError
        from lipscope.study.ranks import follow, joined

        if os.environ["RANK"] != "0":
            # One process speaks for all.
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the end)
        if kwargs.get("workers", 1) != 1:
            raise UserError(
                "under torchrun all processes share one solve, so --workers does not apply; omit it"
            )
        try:
            with joined(kwargs["device"]) as (world, kwargs["device"]):
                return command(*args, **kwargs) if world.rank == 0 else follow(world)
        except LostRankError as error:
            # torchrun is about to end the other ranks; the reason is printed once, not twice.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            code = tell(f"{error}; what was measured is saved", ExitCode.INCOMPLETE)
            raise typer.Exit(code) from error

    return run


@on_ranks
def measure(
    model: opt.ModelName = None,
    text: opt.Texts = None,
    column: opt.Column = None,
    lengths: Annotated[str | None, opt.option("Tokens per sample.", "8,16,...,256")] = None,
    samples: Annotated[int, opt.option("Samples per length.")] = 3,
    layers: opt.Layers = None,
    heads: Annotated[str | None, opt.option("For example 0,2 or 0-5.", "all")] = None,
    scope: Annotated[
        list[str] | None,
        opt.option("Map to measure, listed below; repeatable.", "heads, attention"),
    ] = None,
    random_init: opt.RandomInit = None,
    special_tokens: Annotated[
        bool, opt.option("Add special tokens to samples.", name="--special-tokens")
    ] = False,
    tokenizer: opt.Tokenizer = None,
    revision: opt.Revision = None,
    tol: Annotated[float, opt.option("Relative residual at which the solver stops.")] = 1e-6,
    gap: Annotated[
        float | None,
        opt.option(
            "Iterate until upper / lower - 1 is at most this: 0.1 by default in float64; "
            "inf takes bounds as they come."
        ),
    ] = None,
    device: opt.Device = None,
    dtype: opt.Dtype = "float64",
    seed: opt.Seed = 0,
    workers: opt.Workers = 1,
    cluster: opt.Cluster = None,
    shard: opt.ShardOption = None,
    out: opt.StudyOut = None,
    no_report: Annotated[
        bool, opt.option("Write no report.html beside the study.", name="--no-report")
    ] = False,
    fail_above: Annotated[
        float | None, opt.option("Exit with 1 if a measured σ is above X.", metavar="X")
    ] = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure how smooth every attention layer of a model is, and how that changes with length."""
    if fail_above is not None and not fail_above > 0:  # negated: NaN is no threshold either
        raise UserError(f"--fail-above takes a positive number, got {fail_above}")
    sizes = numbers("lengths", lengths)
    where = numbers("layers", layers)
    which = numbers("heads", heads)
    words = read_texts(text, column, quiet)
    with progress(quiet=quiet) as report:
        engine = opt.parallel(workers, cluster, shard)  # before a model is loaded
        from lipscope.models.loading import load
        from lipscope.study.run import measure as run

        study = run(
            load(
                model,
                tokenizer,
                dtype=dtype,
                device=device,
                revision=revision,
                random_init=random_init,
            ),
            words,
            sizes,
            samples,
            where,
            which,
            scope or ("heads", "attention"),
            tol=tol,
            gap=gap,
            seed=seed,
            **engine,
            out=out,
            special_tokens=special_tokens,
            progress=report,
        )
    print_study(study, as_json, quiet)
    # After the table: a failure to draw must not hide the numbers.
    if out is not None and not no_report:
        save_page(study, out / REPORT, quiet=quiet)
    _end(study, fail_above)


def _end(study: Study, fail_above: float | None) -> None:
    """End with the exit code of a threshold, or with 3 if rows failed."""
    from lipscope.report.formats import place_name

    above = [row for row in study.sigma if row.value > (fail_above or math.inf)]
    if above:
        worst = max(above, key=lambda row: row.value)
        place = f"{place_name(worst.layer)} ({worst.scope}) at n = {worst.n}"
        tell(
            f"{len(above)} of {len(study.sigma)} measured σ are above {fail_above:g}; the largest "
            f"is {worst.value:.4g}, of {place}",
            0,
        )
        raise typer.Exit(ExitCode.ANSWER_IS_NO)
    if fail_above is not None and (study.failed or not study.sigma):
        missing = f"{len(study.failed)} rows have no value" if study.failed else "the part is empty"
        measured = "not everything" if study.sigma else "nothing"
        tell(f"{measured} was measured ({missing}), so --fail-above has no answer", 0)
        raise typer.Exit(ExitCode.INCOMPLETE)
    if any(row.status == "failed" for row in study.failed):
        raise typer.Exit(ExitCode.INCOMPLETE)


def bounds(
    model: opt.ModelName = None,
    text: opt.Texts = None,
    column: opt.Column = None,
    layers: opt.Layers = None,
    lengths: Annotated[str | None, opt.option("Tokens per sample.", "64")] = None,
    radius: Annotated[
        float | None, opt.option("Radius of the ball of inputs.", "the text's")
    ] = None,
    random_init: opt.RandomInit = None,
    tokenizer: opt.Tokenizer = None,
    revision: opt.Revision = None,
    device: opt.Device = None,
    dtype: Annotated[str, opt.option("float64 is most accurate.")] = "float64",
    seed: opt.Seed = 0,
    workers: opt.Workers = 1,
    cluster: opt.Cluster = None,
    shard: opt.ShardOption = None,
    out: opt.StudyOut = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Compare every theorem with the measured constant of each head and the worst input found."""
    sizes = numbers("lengths", lengths)
    where = numbers("layers", layers)
    words = read_texts(text, column, quiet)
    with progress(quiet=quiet) as report:
        engine = opt.parallel(workers, cluster, shard)  # before a model is loaded
        from lipscope.models.loading import load
        from lipscope.probes.bounds import audit_model
        from lipscope.report.bounds import bound_summary

        loaded = load(
            model, tokenizer, dtype=dtype, device=device, revision=revision, random_init=random_init
        )
        found = audit_model(
            loaded,
            words,
            sizes,
            where,
            radius=radius,
            seed=seed,
            **engine,
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
    kind: Annotated[str, opt.option("One of construction, ascent, direction, tokens.")],
    model: opt.ModelName = None,
    text: opt.Texts = None,
    column: opt.Column = None,
    layers: opt.Layers = None,
    length: Annotated[int, opt.option("Number of tokens taken from the text.")] = 32,
    swaps: Annotated[int, opt.option("Maximum number of tokens to replace.")] = 3,
    seconds: Annotated[float | None, opt.option("Time limit of --kind tokens.", "no limit")] = None,
    random_init: opt.RandomInit = None,
    tokenizer: opt.Tokenizer = None,
    revision: opt.Revision = None,
    device: opt.Device = None,
    dtype: Annotated[str | None, opt.option("float64 is most accurate.", "float64")] = None,
    seed: opt.Seed = 0,
    workers: opt.Workers = 1,
    cluster: opt.Cluster = None,
    shard: opt.ShardOption = None,
    out: opt.StudyOut = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
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
        engine = opt.parallel(workers, cluster, shard)
        plan = AttackPlan(kind, length, swaps, where, seed, seconds)
        loaded = load(
            model,
            tokenizer,
            dtype=dtype or "float64",
            device=device,
            revision=revision,
            random_init=random_init,
        )
        study, lines = attack_model(loaded, words, plan, **engine, out=out, progress=report)
    if not lines and shard is None and not quiet:
        warn("the searches ended before a text was measured; give more --seconds")
    if as_json:
        show_json([line._asdict() for line in lines])
    else:
        show_table(attack_table(study, lines), quiet)
    if out is not None:
        write_page(out, quiet)
