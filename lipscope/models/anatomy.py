"""Where a model keeps its blocks, its attention and its output projections, found by watching it run once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models.plug import AttentionCall, listening
from lipscope.models.running import Call, Host, Tap, first_tensor, has_tokens, leaves, tensors_of

ENTRIES = 4096
"""Entries of an activation that are looked at when two of them are compared."""


@dataclass(frozen=True)
class Layer:
    """One attention layer. A module may serve several layers (ALBERT): layer i is the i-th call.

    core:       the module that calls the attention function; None where the model has its own attention code
    projection: the output projection, which may lie outside the core (BERT)
    residual:   where the sub-layer comes out, residual and normalisation included; None where it does not
    prenorm:    whether the block normalises its input before attention
    alone:      whether the core reads these tokens alone, and calls the attention function once
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
    """Tokens seen inside a block: at the "input" or "output" of a module, or its "heads" unprojected.

    company: whether other arguments depend on the block's tokens as well
    """

    module: nn.Module
    side: str
    value: Tensor
    company: bool = False


def routed_layers(host: Host, inputs: Call) -> list[Layer]:
    """The layers of a model that calls the attention function; `inputs` has a batch of one."""
    cores = _attention_modules(host, inputs)
    blocks = {core: _block_of(core, set(cores), host.trunk) for core in cores}
    if None in blocks.values():
        return [Layer(None, core, heads, alone=False) for core, heads in cores.items()]
    inside = _watch(host, inputs, {block for block in blocks.values() if block is not None})
    return [_read_block(blocks, cores, events) for events in inside]


def bypassing_layers(host: Host, inputs: Call) -> list[Layer]:
    """The blocks of a model with its own attention code: the first list of modules that pass tokens on."""
    for module in host.trunk.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            chain = _chain(host, inputs, set(module))
            if len(chain) == len(module):
                return [Layer(block, None, 0) for block in chain]
    return []


def _attention_modules(host: Host, inputs: Call) -> dict[nn.Module, int]:
    """Every module that calls the attention function, with its number of heads."""
    found: dict[nn.Module, int] = {}

    def note(call: AttentionCall) -> Tensor:
        found.setdefault(call.module, call.q.shape[1])
        return call.output()

    with torch.no_grad(), host.ready(), listening(note):
        host.run(host.trunk, inputs)
    return found


def _block_of(core: nn.Module, cores: set[nn.Module], trunk: nn.Module) -> nn.Module | None:
    """The largest member of a list of modules that contains this attention module and no other."""
    for parent in trunk.modules():
        for member in parent if isinstance(parent, nn.ModuleList) else ():
            inside = set(member.modules())
            if core in inside and len(inside & cores) == 1:
                return member
    return None


def _watch(host: Host, inputs: Call, blocks: set[nn.Module]) -> list[list[Event]]:
    """Run the model once; for each call of a block that attends, what happened inside, first its input."""
    finished: list[list[Event]] = []
    current: list[Event] | None = None

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal current
        if module in blocks:
            current = []
        if current is not None and has_tokens((args, kwargs)):
            tokens = Call.seen(args, kwargs).hidden
            company = any(t.requires_grad for t in tensors_of((args, kwargs)) if t is not tokens)
            current.append(Event(module, "input", _sample(tokens), company))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal current
        if current is not None and has_tokens(output):
            current.append(Event(module, "output", _sample(first_tensor(output))))
        if module in blocks and current is not None:
            if any(event.side == "heads" for event in current):
                finished.append(current)
            current = None

    def note(call: AttentionCall) -> Tensor:
        heads = call.output()
        if current is not None:
            current.append(Event(call.module, "heads", _sample(heads.transpose(1, 2).flatten(2))))
        return heads

    inside = {module for block in blocks for module in block.modules()}
    with host.ready(), leaves(blocks), _hooks(inside, enter, leave), listening(note):
        host.run(host.trunk, inputs)
    return finished


def _read_block(
    blocks: dict[nn.Module, nn.Module | None], cores: dict[nn.Module, int], events: list[Event]
) -> Layer:
    """Recognise projection, normalisation and residual by their values."""
    (first, *more) = (i for i, event in enumerate(events) if event.side == "heads")
    core, entry = events[first].module, events[0].value
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
    """The first linear map after the heads, if it reads them; inside the core they may be gated first."""
    inside = set(core.modules())
    for event in events[at + 1 :]:
        if event.side == "input" and getattr(getattr(event.module, "weight", None), "ndim", 0) == 2:
            if event.module in inside or _same(event.value, events[at].value):
                return event.module
            return None
    return None


def _residual(entry: Tensor, events: list[Event], prenorm: bool) -> Tap | None:
    """The first place after the heads that holds s X + c a: X entered the block, a left one of its modules.

    In a post-norm block that sum goes into a normalisation, whose output is the sub-layer's.
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
    basis = torch.stack([x, a], dim=1)
    weights = torch.linalg.lstsq(basis, u[:, None]).solution
    both = bool((weights.abs() > 1e-3).all())
    return both and not _same(x, a) and _same((basis @ weights)[:, 0], u)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= _tolerance(b) * b.norm())


def _tolerance(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps ** 0.6


def _sample(x: Tensor) -> Tensor:
    """At most ENTRIES entries, evenly spread, with the shape told by their number."""
    flat = x.detach().reshape(-1)
    step = 1 + (flat.numel() - 1) // ENTRIES
    flat = flat[::step]
    return flat.double() if flat.dtype == torch.float64 else flat.float()


def _chain(host: Host, inputs: Call, members: set[nn.Module]) -> list[nn.Module]:
    """Those of `members` that the model calls one after the other, each reading what the last one gave."""
    chain: list[nn.Module] = []
    last: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if has_tokens((args, kwargs)):
            tokens = _sample(Call.seen(args, kwargs).hidden)
            if not last or _same(tokens, last[-1]):
                chain.append(module)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if has_tokens(output):
            last.append(_sample(first_tensor(output)))

    with torch.no_grad(), host.ready(), _hooks(members, enter, leave):
        host.run(host.trunk, inputs)
    return chain


@contextmanager
def _hooks(modules: set[nn.Module], enter: Any, leave: Any) -> Iterator[None]:
    handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in modules]
    handles += [m.register_forward_hook(leave) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
