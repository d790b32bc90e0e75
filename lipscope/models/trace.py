"""Record one forward pass of a model: the calls of its blocks and attention modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lipscope.models.running import Host, ModuleCall, hooked
from lipscope.models.structure import Layer


@dataclass(frozen=True, eq=False)
class Seen:
    """A call for the whole batch and for its first member alone.

    Arguments whose shapes differ between the two carry the batch.
    """

    call: ModuleCall
    single: ModuleCall

    @property
    def samples(self) -> tuple[tuple[int, None], ...]:
        """(sample, None) for each sample: the members of a site with all heads together."""
        return tuple(
            (i, None) for i in range(self.call.hidden.shape[0] // self.single.hidden.shape[0])
        )


@dataclass(frozen=True, eq=False)
class Trace:
    """The calls behind one input: the model itself, and each layer's attention module and block."""

    inputs: Seen
    cores: list[Seen | None]
    blocks: list[Seen | None]


def record(host: Host, layers: list[Layer], inputs: ModuleCall, single: ModuleCall) -> Trace:
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
    host: Host, layers: list[Layer], inputs: ModuleCall
) -> tuple[list[ModuleCall | None], list[ModuleCall | None]]:
    calls: dict[nn.Module, list[ModuleCall]] = {
        m: [] for layer in layers for m in (layer.core, layer.block) if m is not None
    }

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[module].append(ModuleCall.seen(args, kwargs))

    with torch.no_grad(), host.ready(), hooked(calls, enter=note):
        host.run(host.trunk, inputs)
    # A module that serves several layers (ALBERT) has one call per layer, in the order of layers.
    following = {module: iter(noted) for module, noted in calls.items()}
    cores = []
    blocks = []
    for layer in layers:
        core = layer.core
        block = layer.block
        cores.append(None if core is None else next(following[core]))
        blocks.append(None if block is None or block is core else next(following[block]))
    return cores, blocks
