"""Hidden states that another engine wrote into a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.models.model_files import on_one_line
from lipscope.probes.budget.formats import DTYPES

SUFFIXES = (".safetensors", ".npz", ".npy")
"""Files that hold hidden states."""

LAYOUT = "hidden_states.0 to hidden_states.L of shape [B, n, d] and input_ids [B, n]"
HOW = (
    f"save {LAYOUT}, as transformers returns them with output_hidden_states=True, "
    "with safetensors.torch.save_file or numpy.savez"
)


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """The hidden states of a run.

    states: [B, n, d] each, from the embeddings to the last one
    ids:    the token ids [B, n], if the file has them
    """

    path: Path
    states: list[Tensor]
    ids: Tensor | None

    @property
    def format(self) -> str:
        """The narrowest format that holds all states without error.

        NumPy has no bf16, so a run in bf16 is often stored as float32.
        """
        for name in ("bf16", "fp16", "fp32"):
            kinds = {h.dtype for h in self.states}
            held = (torch.equal(h.to(DTYPES[name]).to(h.dtype), h) for h in self.states)
            if kinds == {DTYPES[name]} or all(held):
                return name
        return str(self.states[0].dtype).removeprefix("torch.")


def recorded_path(b: Any) -> Path | None:
    """The path of a file of hidden states; None if `b` is a model."""
    if not isinstance(b, str | Path):
        return None
    path = Path(b)
    if path.suffix in SUFFIXES:
        return path
    if path.is_file():
        raise UserError(
            f"{path} is a file, and hidden states are read from {', '.join(SUFFIXES)} files; {HOW}"
        )
    return None


def read_recorded(path: Path) -> RecordedRun:
    """The run that a file holds."""
    tensors = _tensors(path)
    states: list[Tensor] = []
    while f"hidden_states.{len(states)}" in tensors:
        states.append(tensors[f"hidden_states.{len(states)}"])
    stacked = tensors.get("hidden_states")
    if not states and stacked is not None and stacked.ndim == 4:
        states = list(stacked)
    if not states:
        raise UserError(
            f"{path} must hold {LAYOUT}; it holds {', '.join(sorted(tensors)[:8]) or 'nothing'}"
        )
    for i, h in enumerate(states):
        if h.ndim != 3 or not h.is_floating_point() or len(h) != len(states[0]):
            raise UserError(
                f"hidden_states.{i} in {path} must be floating-point numbers of shape [B, n, d] "
                f"with B = {len(states[0])}, got {_kind(h)}"
            )
    ids = tensors.get("input_ids")
    if ids is not None:
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.is_floating_point() or ids.shape != states[0].shape[:2]:
            raise UserError(
                f"input_ids in {path} must be integers of shape "
                f"{list(states[0].shape[:2])}, as the hidden states are, got {_kind(ids)}"
            )
    return RecordedRun(path=path, states=states, ids=ids)


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; nothing in it is executed."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        import numpy as np

        # Pickled objects can run code; NumPy refuses them by itself.
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return {"hidden_states": _from_numpy(found)}
        with found:
            return {name: _from_numpy(found[name]) for name in found.files}
    except Exception as error:  # each library and each kind of damage raises a class of its own
        remedy = "; numpy.savez writes arrays that need no pickle" if "pickle" in str(error) else ""
        raise UserError(
            f"cannot read {path} as {path.suffix.removeprefix('.')} ({on_one_line(error)}){remedy}"
        ) from error


def _from_numpy(array: Any) -> Tensor:
    # bfloat16 of ml_dtypes, as JAX has it: NumPy stores the two bytes without their meaning.
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return (
            torch.from_numpy(array.view("uint16").astype("int32"))
            .to(torch.int16)
            .view(torch.bfloat16)
        )
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
