"""Locate the blocks, attention modules and output projections of a model by watching it run once.

Modules are recognised by the values that flow through them, not by their names: names differ from
architecture to architecture, while "this tensor equals s X + c a" means the same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lipscope.models.plug import AttentionCall, listening
from lipscope.models.running import (
    Host,
    ModuleCall,
    Tap,
    first_tensor,
    has_tokens,
    hooked,
    leaves,
    tensors_of,
)

ENTRIES = 4096
"""Maximum number of entries of an activation that are compared with another one."""


@dataclass(frozen=True)
class Layer:
    """One attention layer. A module may serve several layers (ALBERT): layer i is the i-th call.

    core:       the module that calls the attention function; None if the model uses its own
                attention code
    projection: the output projection, which may lie outside the core (BERT)
    residual:   where the output of the sub-layer can be read, residual and normalisation included;
                None if there is no such place
    prenorm:    whether the block normalises its input before attention
    alone:      whether the core reads only these tokens and calls the attention function once
    """

    block: nn.Module | None
    core: nn.Module | None
    heads: int
    projection: nn.Module | None = None
    residual: Tap | None = None
    prenorm: bool = False
    alone: bool = True


@dataclass(frozen=True)
class Event:
    """Tokens seen inside a block: at a module's "input" or "output", or its unprojected "heads".

    company: whether other arguments of the module depend on the block's tokens as well
    """

    module: nn.Module
    side: str
    value: Tensor
    company: bool = False


def routed_layers(host: Host, inputs: ModuleCall, cores: dict[nn.Module, int]) -> list[Layer]:
    """The layers of a model that calls the attention function; `inputs` is a batch of one.

    `cores` are the modules that call it, with their numbers of heads.
    """
    blocks = {core: _block_of(core, set(cores), host.trunk) for core in cores}
    # Without blocks nothing shows whether an attention module reads these tokens alone.
    if None in blocks.values():
        return [
            Layer(block=None, core=core, heads=heads, alone=False) for core, heads in cores.items()
        ]
    inside = _watch(host, inputs, {block for block in blocks.values() if block is not None})
    return [_read_block(blocks, cores, events) for events in inside]


def bypassing_layers(host: Host, inputs: ModuleCall) -> list[Layer]:
    """The blocks of a model with its own attention code: the first list of chained modules."""
    for module in host.trunk.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            chain = _chain(host, inputs, set(module))
            if len(chain) == len(module):
                return [Layer(block, None, 0) for block in chain]
    return []


def block_calls(trunk: nn.Module, run: Callable[[], Any]) -> tuple[list[nn.Module], list[int]]:
    """The blocks in the order of their calls, and for every attention call the number of its block.

    Blocks are the members of the lists whose members attend, those without attention (hybrids)
    included; without calls of the attention function, the members of the first list in which each
    one reads the output of the one before. A shared block occurs once per call.
    """
    lists = [
        m
        for m in trunk.modules()
        if isinstance(m, nn.ModuleList | nn.Sequential)
        and not isinstance(m, ParametrizationList)  # their members compute weights
        and len(m)
    ]
    calls: list[_BlockCall] = []
    inside: list[_BlockCall] = []
    cores: list[tuple[nn.Module, list[_BlockCall]]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = _BlockCall(module, list(inside))
        if has_tokens((args, kwargs)):
            call.entry = _sample(ModuleCall.seen(args, kwargs).hidden)
        calls.append(call)
        inside.append(call)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = inside.pop()
        call.exit = _sample(first_tensor(output)) if has_tokens(output) else None

    def note(call: AttentionCall) -> Tensor:
        cores.append((call.module, list(inside)))
        return call.output()

    with hooked({m for one in lists for m in one}, enter, leave), listening(note):
        run()
    modules = {core for core, _ in cores}
    attending = {_block_of(core, modules, trunk) for core in modules}
    chain: list[_BlockCall] = []
    if attending and None not in attending:
        members = {m for one in lists if attending & set(one) for m in one}
        chain = [
            call
            for call in calls
            if call.module in members and not any(outer.module in members for outer in call.inside)
        ]
    else:
        for one in sorted(lists, key=lambda one: isinstance(one, nn.Sequential)):
            # Members that read no tokens are embeddings.
            chain = [call for call in calls if call.module in set(one) and call.entry is not None]
            if len(chain) >= len(one) - isinstance(one, nn.Sequential) and _chained(chain):
                break
            chain = []
    numbers = {id(call): i for i, call in enumerate(chain)}
    at = [[numbers[id(c)] for c in around if id(c) in numbers] for _, around in cores]
    return [call.module for call in chain], [found[0] if found else -1 for found in at]


@dataclass(eq=False)
class _BlockCall:
    """A call of a member of some list, the calls around it, and the tokens it read and returned."""

    module: nn.Module
    inside: list[_BlockCall]
    entry: Tensor | None = None
    exit: Tensor | None = None


def _chained(calls: list[_BlockCall]) -> bool:
    """Whether each call reads what the one before returned."""
    return all(
        a.exit is not None and b.entry is not None and _same(b.entry, a.exit)
        for a, b in pairwise(calls)
    )


def _block_of(core: nn.Module, cores: set[nn.Module], trunk: nn.Module) -> nn.Module | None:
    """The largest member of a list of modules that contains this attention module and no other."""
    for parent in trunk.modules():
        for member in parent if isinstance(parent, nn.ModuleList) else ():
            inside = set(member.modules())
            if core in inside and len(inside & cores) == 1:
                return member
    return None


def _watch(host: Host, inputs: ModuleCall, blocks: set[nn.Module]) -> list[list[Event]]:
    """Run the model once and list, per block call that attends, the events inside, input first."""
    finished: list[list[Event]] = []
    current: list[Event] | None = None

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal current
        if module in blocks:
            current = []
        if current is not None and has_tokens((args, kwargs)):
            tokens = ModuleCall.seen(args, kwargs).hidden
            # The block's tokens were made a leaf that requires a gradient (see `leaves` below), so
            # whatever else requires one here was computed from them: the module has company.
            company = any(t.requires_grad for t in tensors_of((args, kwargs)) if t is not tokens)
            event = Event(module=module, side="input", value=_sample(tokens), company=company)
            current.append(event)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal current
        if current is not None and has_tokens(output):
            current.append(Event(module, "output", _sample(first_tensor(output))))
        if module in blocks and current is not None:
            # Blocks without attention (pure feed-forward or convolution) are not layers here.
            if any(event.side == "heads" for event in current):
                finished.append(current)
            current = None

    def note(call: AttentionCall) -> Tensor:
        heads = call.output()
        if current is not None:
            current.append(Event(call.module, "heads", _sample(heads.transpose(1, 2).flatten(2))))
        return heads

    inside = {module for block in blocks for module in block.modules()}
    with host.ready(), leaves(blocks), hooked(inside, enter, leave), listening(note):
        host.run(host.trunk, inputs)
    return finished


def _read_block(
    blocks: dict[nn.Module, nn.Module | None], cores: dict[nn.Module, int], events: list[Event]
) -> Layer:
    """Recognise projection, normalisation and residual by their values."""
    (first, *more) = (i for i, event in enumerate(events) if event.side == "heads")
    core = events[first].module
    entry = events[0].value
    # The last input of the core before its heads: a core may be entered more than once.
    own = next(e for e in reversed(events[:first]) if e.module is core and e.side == "input")
    prenorm = not _same(own.value, entry)
    return Layer(
        block=blocks[core],
        core=core,
        heads=cores[core],
        projection=_projection(core, events, first),
        residual=_residual(entry, events[first + 1 :], prenorm),
        prenorm=prenorm,
        alone=not more and not own.company,
    )


def _projection(core: nn.Module, events: list[Event], at: int) -> nn.Module | None:
    """The first linear map after the heads, if it reads them."""
    # Inside the core the heads may be gated first, so values need not match; outside they must.
    inside = set(core.modules())
    for event in events[at + 1 :]:
        if event.side == "input" and getattr(getattr(event.module, "weight", None), "ndim", 0) == 2:
            if event.module in inside or _same(event.value, events[at].value):
                return event.module
            return None
    return None


def _residual(entry: Tensor, events: list[Event], prenorm: bool) -> Tap | None:
    """The first place after the heads that holds s X + c a.

    X entered the block and a left one of its modules. In a post-norm block that sum is the input of
    a normalisation, whose output is the output of the sub-layer.
    """
    outputs: list[Tensor] = []
    for event in events:
        if any(_combines(event.value, entry, a) for a in outputs):
            post = (
                not prenorm
                and event.side == "input"
                and "norm" in type(event.module).__name__.lower()
            )
            return Tap(event.module, "output" if post else event.side)
        if event.side == "output":
            outputs.append(event.value)
    return None


def _combines(u: Tensor, x: Tensor, a: Tensor) -> bool:
    """Whether u = s x + c a with s and c not zero, and u not merely one of them."""
    if not u.shape == x.shape == a.shape:
        return False
    # s and c are fitted because models scale the residual or the branch (Granite does).
    basis = torch.stack([x, a], dim=1)
    weights = torch.linalg.lstsq(basis, u[:, None]).solution
    both = bool((weights.abs() > 1e-3).all())
    return both and not _same(x, a) and _same((basis @ weights)[:, 0], u)


def _same(a: Tensor, b: Tensor) -> bool:
    # Between eps, which a sum in another order exceeds, and 1, which unrelated tensors differ by.
    tolerance = torch.finfo(b.dtype).eps ** 0.6
    return a.shape == b.shape and bool((a - b).norm() <= tolerance * b.norm())


def _sample(x: Tensor) -> Tensor:
    """At most ENTRIES evenly spaced entries; tensors of different sizes give different counts."""
    flat = x.detach().reshape(-1)
    step = 1 + (flat.numel() - 1) // ENTRIES
    flat = flat[::step]
    return flat.double() if flat.dtype == torch.float64 else flat.float()


def _chain(host: Host, inputs: ModuleCall, members: set[nn.Module]) -> list[nn.Module]:
    """Those of `members` that the model calls in sequence, each reading the previous output."""
    chain: list[nn.Module] = []
    last: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if has_tokens((args, kwargs)):
            tokens = _sample(ModuleCall.seen(args, kwargs).hidden)
            if not last or _same(tokens, last[-1]):
                chain.append(module)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if has_tokens(output):
            last.append(_sample(first_tensor(output)))

    with torch.no_grad(), host.ready(), hooked(members, enter, leave):
        host.run(host.trunk, inputs)
    return chain
