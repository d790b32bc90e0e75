"""Causal and sliding-window masks, represented by their rule instead of by n^2 numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipscope._torch_internals import tree_map
from lipscope.attention.pattern import Pattern
from lipscope.models._transformers_internals import sdpa_mask

ROWS = 1 << 26
"""Maximum number of mask entries that are materialised at a time."""


class PlainMask(Tensor):
    """A boolean mask [B, 1, n, n'] known by its rule.

    It becomes an ordinary tensor only when a model computes with it.
    """

    pattern: Pattern

    @staticmethod
    def __new__(cls, shape: torch.Size, device: torch.device, pattern: Pattern) -> PlainMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.pattern = pattern
        return mask

    def __init__(self, *_: Any) -> None:
        """Everything is in __new__."""

    def of_batch(self, members: int) -> PlainMask:
        """The same rule for a batch of another size."""
        return PlainMask(torch.Size((members, *self.shape[1:])), self.device, self.pattern)

    def written(self) -> Tensor:
        """The mask as an ordinary tensor."""
        n, keys = self.shape[-2:]
        seen = self.pattern.visible(n, keys, self.device)
        return (
            torch.ones((), dtype=torch.bool, device=self.device) if seen is None else seen
        ).expand(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares another signature
        cls,
        operation: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map(_written, (args, kwargs or {}))
        return operation(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's also takes the contents
        return f"PlainMask({tuple(self.shape)}, {self.pattern})"


def _written(leaf: Any) -> Any:
    return leaf.written() if isinstance(leaf, PlainMask) else leaf


def lipscope_mask(**arguments: Any) -> Tensor | None:
    """The registered mask function: transformers' own mask, True where a query may attend.

    The result is a PlainMask if the mask follows one of the rules it knows. Rows are compared with
    every candidate rule, a block of rows at a time. None means that everything is visible.
    """
    n, keys, start = arguments["q_length"], arguments["kv_length"], arguments.get("q_offset", 0)
    window, candidates = arguments.get("local_size"), [Pattern(), Pattern(causal=True)]
    if window:
        candidates.append(Pattern(causal=True, window=window))
    height = max(1, ROWS // (keys * arguments["batch_size"]))
    # With a cache (n != keys, or an offset on the device) the rules below would be shifted.
    if n != keys or isinstance(start, Tensor):
        return _rows(arguments, start, n)
    device = torch.device(arguments.get("device", "cpu"))
    for first in range(0, n, height):
        last = min(n, first + height)
        part = _rows(arguments, start + first, last - first)
        if part is None:
            return None
        candidates = [
            c for c in candidates if _agree(part, c.tile(slice(first, last), slice(0, keys)))
        ]
        if not candidates:  # packed sequences, padding or an unknown rule: write the mask down
            return part if last - first == n else _rows(arguments, start, n)
    return PlainMask(torch.Size((arguments["batch_size"], 1, n, keys)), device, candidates[0])


def _rows(arguments: dict[str, Any], start: Any, count: int) -> Tensor | None:
    """Some rows of the mask that transformers would create."""
    # transformers may skip a plain causal mask and rely on is_causal; lipscope needs the mask.
    return sdpa_mask(
        **{**arguments, "q_length": count, "q_offset": start, "allow_is_causal_skip": False}
    )


def _agree(mask: Tensor, pattern: Pattern) -> bool:
    n, keys = mask.shape[-2:]
    seen = pattern.visible(n, keys, mask.device)
    return bool(mask.all()) if seen is None else torch.equal(mask, seen.expand_as(mask))
