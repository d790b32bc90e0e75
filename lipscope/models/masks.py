"""Masks of models, represented by their rule instead of by n^2 numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipscope._torch_internals import tree_map
from lipscope.fused.pattern import Pattern
from lipscope.models._transformers_internals import sdpa_mask

ROWS = 1 << 26
"""Maximum number of mask entries that are materialised at a time."""


@dataclass(frozen=True, eq=False)
class Rule:
    """Query i sees key j if all of these allow it.

    causal: j <= i + ahead
    window: j > i + ahead - window
    chunk:  i and j lie in the same chunk of this many tokens
    real:   boolean [B, 1, 1, n], the keys that are not padding
    """

    causal: bool = False
    window: int | None = None
    ahead: int = 0
    chunk: int | None = None
    real: Tensor | None = None

    def visible(self, rows: slice, n: int, device: torch.device) -> Tensor | None:
        """Some rows of the mask for n tokens, [B | 1, 1, rows, n]; None if they see everything."""
        pattern = Pattern(self.causal, self.window, mask=self.real, shift=self.ahead)
        seen = pattern.tile(rows, slice(0, n)).visible(rows.stop - rows.start, n, device)
        if self.chunk is not None:
            chunks = torch.arange(n, device=device) // self.chunk
            same = chunks[rows, None] == chunks
            seen = same if seen is None else seen & same
        return seen


class PlainMask(Tensor):
    """A boolean mask [B, 1, n, n] known by its rule.

    It becomes an ordinary tensor only when a model computes with it.
    """

    rule: Rule

    @staticmethod
    def __new__(cls, shape: torch.Size, device: torch.device, rule: Rule) -> PlainMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.rule = rule
        return mask

    def __init__(self, *_: Any) -> None:
        """Everything is in __new__."""

    def of_members(self, members: Tensor) -> PlainMask:
        """The mask of some members of the batch."""
        real = self.rule.real
        if real is not None and len(real) > 1:
            real = real[members.to(real.device)]
        shape = torch.Size((len(members), *self.shape[1:]))
        return PlainMask(shape, self.device, replace(self.rule, real=real))

    def written(self) -> Tensor:
        """The mask as an ordinary tensor."""
        n = self.shape[-1]
        seen = self.rule.visible(slice(0, n), n, self.device)
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
        return f"PlainMask({tuple(self.shape)}, {self.rule})"


def _written(leaf: Any) -> Any:
    return leaf.written() if isinstance(leaf, PlainMask) else leaf


def lipscope_mask(**arguments: Any) -> Tensor | None:
    """The registered mask function: transformers' own mask, True where a query may attend.

    The result is a PlainMask if the mask follows one of the rules it knows. Rows are compared with
    every candidate rule, a block of rows at a time. None means that everything is visible.
    """
    n = arguments["q_length"]
    keys = arguments["kv_length"]
    start = arguments.get("q_offset", 0)
    # With a cache (n != keys, or an offset on the device) the rules below would be shifted.
    if n != keys or isinstance(start, Tensor):
        return _rows(arguments, start, n)
    device = torch.device(arguments.get("device", "cpu"))
    batch = arguments["batch_size"]
    candidates = _candidates(arguments.get("local_size"), _real(arguments))
    height = max(1, ROWS // (keys * batch))
    for first in range(0, n, height):
        rows = slice(first, min(n, first + height))
        part = _rows(arguments, start + first, rows.stop - first)
        if part is None:
            return None
        candidates = [rule for rule in candidates if _agree(part, rule.visible(rows, n, device))]
        if not candidates:  # packed sequences or an unknown rule: write the mask down
            return part if rows.stop - first == n else _rows(arguments, start, n)
    return PlainMask(torch.Size((batch, 1, n, keys)), device, candidates[0])


def _candidates(size: int | None, real: Tensor | None) -> list[Rule]:
    """Rules that a mask may follow, the simplest first; size is that of windows and chunks."""
    found = [Rule(), Rule(causal=True)]
    if size:
        found += [
            Rule(causal=True, window=size),
            Rule(causal=True, window=2 * size + 1, ahead=size),
            Rule(causal=True, chunk=size),
        ]
    return [replace(rule, real=real) for rule in found]


def _real(arguments: dict[str, Any]) -> Tensor | None:
    """Which keys are not padding, [B, 1, 1, n]; None if all are real, or it is not said by key."""
    given = arguments.get("attention_mask")
    shape = arguments["batch_size"], arguments["kv_length"]
    if not isinstance(given, Tensor) or tuple(given.shape) != shape:
        return None
    real = given.bool()
    return None if bool(real.all()) else real[:, None, None, :]


def _rows(arguments: dict[str, Any], start: Any, count: int) -> Tensor | None:
    """Some rows of the mask that transformers would create."""
    # transformers may skip a plain causal mask and rely on is_causal; lipscope needs the mask.
    return sdpa_mask(
        **{**arguments, "q_length": count, "q_offset": start, "allow_is_causal_skip": False}
    )


def _agree(mask: Tensor, seen: Tensor | None) -> bool:
    return bool(mask.all()) if seen is None else torch.equal(mask, seen.expand_as(mask))
