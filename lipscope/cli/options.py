"""The options that several commands share, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

ModelName = Annotated[
    str | None, typer.Argument(help="Model id or directory.", show_default="all-MiniLM-L6-v2")
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE|-",
        help="UTF-8 text; repeatable; - reads stdin.",
        show_default="embedded prose",
    ),
]
Column = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Column of a CSV, TSV or JSONL text, by name or number."),
]
Layers = Annotated[str | None, typer.Option(help="For example 0,2 or 0-5.", show_default="all")]
RandomInit = Annotated[int | None, typer.Option(metavar="SEED", help="Use random weights.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="ID|DIR", help="Tokenizer id or directory.", show_default="the model's"),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
Device = Annotated[
    str | None, typer.Option(help="For example cpu, cuda or cuda:1.", show_default="cpu")
]
Dtype = Annotated[str, typer.Option(help="float64 is most accurate; float32 is faster.")]
Seed = Annotated[int, typer.Option(help="Seed of samples and searches.")]
StudyOut = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Directory to save the study in; rerun to resume."),
]
StudyDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Directory that `measure --out` wrote.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no tables, progress or warnings.")
]
Workers = Annotated[int, typer.Option(help="Number of worker processes on this machine.")]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS|slurm:N", help="Workers elsewhere: tcp://host:port, a batch system."
    ),
]
ShardOption = Annotated[
    str | None, typer.Option("--shard", metavar="K/N", help="Measure only part K of N.")
]


def parallel(workers: int, cluster: str | None, shard: str | None) -> dict[str, Any]:
    """Check these options before a model is loaded; return them with the shard as numbers."""
    from lipscope.study.jobs import check_engine, parse_shard

    check_engine(workers, cluster)
    part = None if shard is None else parse_shard(shard)
    numbers = None if part is None else (part.number, part.count)
    return {"workers": workers, "cluster": cluster, "shard": numbers}
