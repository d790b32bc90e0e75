"""What operations write into memory, and which tensors show it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lipscope._torch_internals import tree_leaves

IN_PLACE = re.compile(r"__setitem__|__i(add|sub|mul|(true|floor)?div|mod|pow|matmul)__|.*[^_]_")
"""Names of functions that write into an argument."""

WITHOUT_VALUES = re.compile(
    r"(new_)?empty(_like|_strided|_permuted)?|new|rand.*|normal_?|bernoulli_?|uniform_|"
    r"exponential_|cauchy_|geometric_|log_normal_|random_"
)
"""Names of functions that return memory never written, or numbers drawn at random: no errors."""

RESIZING = ("resize_", "resize_as_")

DETACHING = (Tensor.detach, inspect.getattr_static(Tensor, "data").__get__)
"""Functions that end the graph of gradients; errors stay, as the memory is the same."""

LEAVING = (Tensor.numpy, Tensor.__array__)
"""Functions that take numbers out of torch."""


def storage_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def part_of(x: Tensor) -> tuple[Any, ...]:
    """What a tensor shows of its memory."""
    return x.dtype, x.storage_offset(), x.shape, x.stride(), x.is_conj(), x.is_neg()


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def floats_of(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if is_float(x)]


def writes_argument(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a function is one that changes its argument: x += y, x.add_(y), relu(x, True)."""
    if IN_PLACE.fullmatch(name):
        return True
    at = _place_of_in_place(func) if isinstance(func, FunctionType) else None
    return at is not None and bool(kwargs.get("inplace", args[at] if at < len(args) else False))


@lru_cache
def _place_of_in_place(func: FunctionType) -> int | None:
    names = list(inspect.signature(func, follow_wrapped=False).parameters)
    return names.index("inplace") if "inplace" in names else None


def overwritten(x: Tensor, exact: Tensor, written: Tensor, values: Tensor) -> Tensor:
    """The reference of x, after `values` became that of a tensor which may share entries with x."""
    if x.is_complex():
        return torch.view_as_complex(
            overwritten(torch.view_as_real(x), torch.view_as_real(exact), written, values)
        )
    if written.is_complex():
        written = torch.view_as_real(written)
        values = torch.view_as_real(values)
    own = _places(x)
    theirs = _places(written)
    if not x.numel() or not written.numel():
        return exact
    found = theirs.new_full((int(max(own.max(), theirs.max())) + 1,), -1)
    found[theirs.reshape(-1)] = torch.arange(written.numel(), device=x.device)
    entry = found[own]
    if not bool((entry >= 0).any()):
        return exact
    return torch.where(entry >= 0, values.reshape(-1)[entry.clamp_min(0)].to(exact), exact)


def _places(x: Tensor) -> Tensor:
    """Where the entries of a tensor lie in its memory, in the shape of the tensor."""
    found = torch.full((), int(x.storage_offset()), device=x.device)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        found = found[..., None] + stride * torch.arange(size, device=x.device)
    return found
