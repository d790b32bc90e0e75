"""The commands `merge` and `sweep`: parts of one study, and many studies."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from lipscope.cli.options import Cluster, Quiet, ShardOption, Workers
from lipscope.cli.terminal import ExitCode, progress, tell, warn


def merge(
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Directory to write to; new, or of an earlier merge."),
    ],
    parts: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Parts of one study, in any order.")
    ],
    quiet: Quiet = False,
) -> None:
    """Join parts of one study, as `measure --shard` writes them."""
    from lipscope.study.study import merge_directories as join

    found = join(out, parts)
    if not quiet:
        tell(f"{found.content} are in {out}", 0)
    if found.disputed and not quiet:
        warn(
            f"{found.disputed} rows were measured more than once, with different results; one of "
            "each was kept"
        )
    for sentence in found.damaged:
        tell(sentence, ExitCode.INCOMPLETE)
    if found.damaged:
        raise typer.Exit(ExitCode.INCOMPLETE)


def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="TOML file: models, texts and settings.")
    ],
    workers: Workers = 1,
    cluster: Cluster = None,
    shard: ShardOption = None,
    quiet: Quiet = False,
) -> None:
    """Measure models x texts x settings, one study each; rerun to resume."""
    with progress(quiet=quiet) as report:
        from lipscope.study.engines import open_engine
        from lipscope.study.jobs import check_engine, parse_shard
        from lipscope.study.run import Progress
        from lipscope.study.sweep import Entry, read_sweep

        check_engine(workers, cluster)
        wanted = read_sweep(file)
        if shard is not None:
            wanted = wanted.part(parse_shard(shard))
        numbers = {entry.out: i for i, entry in enumerate(wanted.entries, 1)}

        def progress_of(entry: Entry) -> Progress:
            report.doing = f"{numbers[entry.out]} of {len(numbers)}, {entry.out.name}"
            return report

        count = Counter[str]()
        # One cluster for all studies: its workers keep the model from one to the next.
        with open_engine(workers, cluster) as engine:
            for ending in wanted.run(lambda: nullcontext(engine), progress_of):
                count["failed" if ending.failed else ending.how] += 1
                if ending.failed or not quiet:
                    tell(f"{ending.entry.out}: {ending.how}", 0)
    if not quiet:
        tell(", ".join(f"{number} {how}" for how, number in count.items()) or "nothing to do", 0)
    if count["failed"]:
        raise typer.Exit(ExitCode.INCOMPLETE)
