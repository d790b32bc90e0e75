"""The options that several commands share, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def option(
    help: str, default: str | None = None, name: str | None = None, metavar: str | None = None
) -> Any:
    """Declare an option by its help, and what the help shows as its default."""
    names = () if name is None else (name,)
    return typer.Option(*names, help=help, metavar=metavar, show_default=default or True)


ModelName = Annotated[
    str | None, typer.Argument(help="Model id or directory.", show_default="all-MiniLM-L6-v2")
]
Texts = Annotated[
    list[str] | None,
    option("UTF-8 text; repeatable; - reads stdin.", "embedded prose", metavar="FILE|-"),
]
Column = Annotated[
    str | None, option("Column of a CSV, TSV or JSONL text, by name or number.", metavar="NAME")
]
Layers = Annotated[str | None, option("For example 0,2 or 0-5.", "all")]
RandomInit = Annotated[int | None, option("Use random weights.", metavar="SEED")]
Tokenizer = Annotated[
    str | None, option("Tokenizer id or directory.", "the model's", metavar="ID|DIR")
]
Revision = Annotated[str | None, option("Branch, tag or commit on the hub.")]
Device = Annotated[str | None, option("For example cpu, cuda or cuda:1.", "cpu")]
Dtype = Annotated[str, option("float64 is most accurate; float32 is faster.")]
Seed = Annotated[int, option("Seed of samples and searches.")]
StudyOut = Annotated[
    Path | None, option("Directory to save the study in; rerun to resume.", metavar="DIR")
]
StudyDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Directory that `measure --out` wrote.")
]
AsJson = Annotated[bool, option("Print JSON instead of a table.", name="--json")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no tables, progress or warnings.")
]
Workers = Annotated[int, option("Number of worker processes on this machine.")]
Cluster = Annotated[
    str | None,
    option("Workers elsewhere: tcp://host:port, a batch system.", metavar="ADDRESS|slurm:N"),
]
ShardOption = Annotated[
    str | None, option("Measure only part K of N.", name="--shard", metavar="K/N")
]


def parallel(workers: int, cluster: str | None, shard: str | None) -> dict[str, Any]:
    """Check these options before a model is loaded; return them with the shard as numbers."""
    from lipscope.study.jobs import check_engine, parse_shard

    check_engine(workers, cluster)
    part = None if shard is None else parse_shard(shard)
    numbers = None if part is None else (part.number, part.count)
    return {"workers": workers, "cluster": cluster, "shard": numbers}
