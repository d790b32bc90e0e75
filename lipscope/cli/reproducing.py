"""The command `reproduce`: the claims of both papers, each with a verdict."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipscope.cli import options as opt
from lipscope.cli.terminal import ExitCode, progress, show_json, warn

if TYPE_CHECKING:
    from lipscope.papers.running import Outcome


def reproduce(
    paper: Annotated[
        str | None, typer.Argument(help="castin2024 or kim2021.", show_default="both")
    ] = None,
    only: Annotated[
        str | None, opt.option("Claims by commas, for example C25,K1-K3.", metavar="IDS")
    ] = None,
    list_claims: Annotated[bool, opt.option("List the claims; run none.", name="--list")] = False,
    models: Annotated[
        Path | None, opt.option("Directory with bert-base-uncased and gpt2.", metavar="DIR")
    ] = None,
    text_dir: Annotated[
        Path | None, opt.option("Directory with the papers' texts.", metavar="DIR")
    ] = None,
    quick: Annotated[bool, opt.option("Run each claim in seconds.", name="--quick")] = False,
    device: Annotated[str, opt.option("Device for large runs, for example cuda.")] = "cpu",
    seed: opt.Seed = 0,
    workers: opt.Workers = 1,
    cluster: opt.Cluster = None,
    shard: opt.ShardOption = None,
    out: Annotated[
        Path | None, opt.option("Directory for numbers and page; rerun to resume.", metavar="DIR")
    ] = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Test the claims of the two papers and give a verdict on each.

    Exit code 0 whatever the verdicts; 3 if a claim could not be run.
    """
    names = None if only is None else only.split(",")
    with progress("reproducing", quiet=quiet or list_claims) as report:
        from lipscope.papers.running import chosen, reproduce_papers

        listed = chosen(paper, names)
        engine = opt.parallel(workers, cluster, shard)
        if list_claims:
            if as_json:
                fields = ("id", "paper", "says", "needs")
                show_json([{name: getattr(claim, name) for name in fields} for claim in listed])
            for claim in () if as_json or quiet else listed:
                typer.echo(f"{claim.id:<4} {claim.paper:<10}  {claim.says}  [{claim.needs}]")
            return
        outcomes = reproduce_papers(
            paper,
            names,
            models=models,
            texts=text_dir,
            quick=quick,
            device=device,
            seed=seed,
            **engine,
            out=out,
            progress=report,
        )
    if as_json:
        show_json([one.as_dict() for one in outcomes])
    elif not quiet:
        for one in outcomes:
            typer.echo(_line(one))
        counts = Counter(one.word for one in outcomes)
        typer.echo(", ".join(f"{word} {count}" for word, count in sorted(counts.items())))
        if out is not None:
            typer.echo(f"The page: {out / 'reproduce.html'}")
    failed = [one.claim.id for one in outcomes if one.verdict is None]
    if failed:
        warn(f"{len(failed)} of {len(outcomes)} claims could not be run: {', '.join(failed)}")
        raise typer.Exit(ExitCode.INCOMPLETE)


def _line(one: Outcome) -> str:
    """One claim in one line, starting with its id."""
    from lipscope._files import for_terminal

    verdict = one.verdict
    found = verdict.interval if verdict is not None else None
    between = "" if found is None else f"  [{found[0]:.3g}, {found[1]:.3g}]"
    reason = one.error if verdict is None else verdict.reason
    return for_terminal(f"{one.claim.id:<4} {one.word:<20} {one.claim.says}{between}  {reason}")
