"""A whole training in one file, tensors and metadata, which is written completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipscope._files import whole_file
from lipscope._types import UserError

FILE = "training.safetensors"
LOCK = "training.lock"
FACTS = "lipscope.training"
"""The key of the facts in the metadata of the file."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None
) -> None:
    """Write a safetensors file atomically: readers see either the old file or the new one."""
    from safetensors.torch import save

    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": "pt"} if facts is None else {"format": "pt", FACTS: json.dumps(facts)}
    with whole_file(path) as draft:
        draft.write_bytes(save(content, metadata))


def read_checkpoint(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and facts of the checkpoint in a directory, or None if there is no checkpoint."""
    from safetensors import safe_open

    path = directory / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})[FACTS])
            names = file.keys()  # not a dict: it cannot be iterated over itself
            return {name: file.get_tensor(name) for name in names}, facts
    except Exception as error:  # safetensors raises its own classes
        raise UserError(
            f"{path} is not a checkpoint of lipscope train ({error}); give another --out"
        ) from error


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """The state of an optimizer, keyed by parameter name and quantity."""
    state = optimizer.state_dict()["state"]
    return {
        f"{names[i]}/{quantity}": value
        for i, held in state.items()
        for quantity, value in held.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: Mapping[str, Tensor]
) -> None:
    # Only the state is restored: the hyperparameters come from the recipe, which was compared.
    whole = optimizer.state_dict()
    held: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, quantity = key.rsplit("/", 1)
        held.setdefault(names.index(name), {})[quantity] = value
    optimizer.load_state_dict({"state": held, "param_groups": whole["param_groups"]})
