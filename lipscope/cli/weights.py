"""The command `to-safetensors`: pickled weights rewritten as safetensors, without running them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipscope._files import for_terminal


def to_safetensors(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Model directory with pytorch_model.bin.")
    ],
) -> None:
    """Write the pickled weights of a model as safetensors beside them; nothing is replaced."""
    from lipscope.models.pickled_weights import to_safetensors as rewrite

    for path in rewrite(directory):
        typer.echo(f"wrote {for_terminal(str(path))}")
