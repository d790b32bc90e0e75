"""Record one forward pass of a model: the calls of its blocks and attention modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lipscope.models.anatomy import Layer
from lipscope.models.running import Call, Host


@dataclass(frozen=True, eq=False)
class Seen:
    """A call for the whole batch and for its first member alone.

    Arguments whose shapes differ between the two carry the batch.
    """

    call: Call
    single: Call

    @property
    def batch(self) -> int:
        """The number of samples."""
        return self.call.hidden.shape[0] // self.single.hidden.shape[0]


@dataclass(frozen=True, eq=False)
class Trace:
    """The calls behind one input: the model itself, and each layer's attention module and block."""

    inputs: Seen
    cores: list[Seen | None]
    blocks: list[Seen | None]


def record(host: Host, layers: list[Layer], inputs: Call, single: Call) -> Trace:
    """Run the model on `inputs`, and on `single`, its first member, unless that is all there is."""
    whole = _record(host, layers, inputs)
    alone = (
        whole if inputs.hidden.shape[0] == single.hidden.shape[0] else _record(host, layers, single)
    )
    seen = [
        [None if a is None or b is None else Seen(a, b) for a, b in zip(*pair, strict=True)]
        for pair in zip(whole, alone, strict=True)
    ]
    return Trace(Seen(inputs, single), seen[0], seen[1])


def _record(
    host: Host, layers: list[Layer], inputs: Call
) -> tuple[list[Call | None], list[Call | None]]:
    calls: dict[nn.Module, list[Call]] = {
        m: [] for layer in layers for m in (layer.core, layer.block) if m is not None
    }
    with torch.no_grad(), host.ready(), _noting(calls):
        host.run(host.trunk, inputs)
    # A module that serves several layers (ALBERT) has one call per layer, in the order of layers.
    taken: Counter[nn.Module] = Counter()

    def next_call(module: nn.Module | None) -> Call | None:
        if module is None:
            return None
        taken[module] += 1
        return calls[module][taken[module] - 1]

    pairs = [
        (next_call(layer.core), next_call(layer.block) if layer.block is not layer.core else None)
        for layer in layers
    ]
    return [core for core, _ in pairs], [block for _, block in pairs]


@contextmanager
def _noting(calls: dict[nn.Module, list[Call]]) -> Iterator[None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[module].append(Call.seen(args, kwargs))

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in calls]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
