"""Pickled weights rewritten as safetensors, without running what a pickle may contain."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lipscope._files import for_terminal, whole_file
from lipscope._types import UserError
from lipscope.models.model_files import checked_file, memory_here, on_one_line, read_json

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
SHARD = "pytorch_model-*-of-*.bin"


def to_safetensors(folder: str | os.PathLike[str]) -> list[Path]:
    """Write the pickled weights of a model folder as safetensors files beside them.

    Pickles are read with torch's `weights_only` loader, which builds tensors and refuses everything
    else. Existing files are never replaced, and the pickles stay.

    Args:
        folder: A folder with `pytorch_model.bin`, or with shards and their index.

    Returns:
        The files that were written.

    Raises:
        UserError: If there are no pickled weights, there are safetensors files already, or a
            pickle contains something other than tensors.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from lipscope.models.pickled_weights import to_safetensors
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"a.weight": torch.ones(2)}, Path(folder) / "pytorch_model.bin")
        ...     [path.name for path in to_safetensors(folder)]
        ['model.safetensors']
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise UserError(f"{for_terminal(str(folder), 200)} is not a folder; give a model's folder")
    present = sorted(path.name for path in place.glob("model*.safetensors*"))
    if present:
        raise UserError(f"{folder} has {present[0]} already, and no file is replaced")
    if (place / SINGLE).exists():
        _rewrite(place / SINGLE, place / "model.safetensors", str(folder))
        return [place / "model.safetensors"]
    if not (place / INDEX).exists():
        raise UserError(
            f"{folder} has no {SINGLE} and no {INDEX}; "
            "only weights that transformers saved can be converted"
        )
    return _rewrite_shards(place, str(folder))


def _rewrite_shards(place: Path, name: str) -> list[Path]:
    index = read_json(place / INDEX, name)
    shards = index.get("weight_map")
    names: list[Any] = list(shards.values()) if isinstance(shards, dict) else [shards]
    for shard in names:
        if not isinstance(shard, str) or not fnmatch(shard, SHARD) or "/" in shard:
            raise UserError(
                f"{name}: {INDEX} names {for_terminal(repr(shard), 60)}, expected files such as "
                "pytorch_model-00001-of-00002.bin in the same folder"
            )
    written = []
    where = {}
    size = 0
    for shard in sorted(set(names)):
        target = place / shard.replace("pytorch_model", "model").replace(".bin", ".safetensors")
        for key, bytes_of_key in _rewrite(place / shard, target, name).items():
            where[key] = target.name
            size += bytes_of_key
        written.append(target)
    # The index last: until it is there, nobody takes the shards for a whole model.
    target = place / "model.safetensors.index.json"
    content = {"metadata": {"total_size": size}, "weight_map": where}
    with whole_file(target) as draft:
        draft.write_text(json.dumps(content, indent=1))
    return [*written, target]


def _rewrite(source: Path, target: Path, name: str) -> dict[str, int]:
    """One file; returns the bytes of each tensor."""
    checked_file(source, name, limit=memory_here())
    try:
        content: Any = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(
            f"{name}: {source.name} contains more than tensors, or is damaged "
            f"({on_one_line(error)[:120]}); only plain weights are converted"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    odd = not isinstance(content, dict) or not content
    for key, value in {} if odd else content.items():
        odd = odd or not isinstance(key, str) or type(value) not in (Tensor, torch.nn.Parameter)
    if odd:
        raise UserError(
            f"{name}: {source.name} is not a table of weights by name; "
            "save the model's state_dict, or use save_pretrained"
        )
    # Tied weights share memory, which safetensors cannot express: each gets its own copy.
    tensors = {key: value.detach().clone().contiguous() for key, value in content.items()}
    try:
        with whole_file(target) as draft:
            save_file(tensors, draft, metadata={"format": "pt"})
    except UserError:
        raise
    except Exception as error:  # dtypes that safetensors does not have
        raise UserError(
            f"{name}: the weights in {source.name} cannot be written as safetensors "
            f"({on_one_line(error)})"
        ) from error
    return {key: value.numel() * value.element_size() for key, value in tensors.items()}
