"""Locate the blocks, attention modules and output projections of a model by watching it run once.

The same run on lipscope's attention is compared with one on eager attention: the preflight.

Modules are recognised by the values that flow through them, not by their names: names differ from
architecture to architecture, while "this tensor equals s X + c a" means the same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lipscope._files import on_one_line
from lipscope._types import UserError
from lipscope.models.attention import AttentionCall, listening
from lipscope.models.capture import (
    Captured,
    RecordedCall,
    Tap,
    capture,
    first_tensor,
    has_tokens,
    leaves,
    tensors_of,
)
from lipscope.models.maps import ModelRunner, run_to

ENTRIES = 4096
"""Maximum number of entries of an activation that are compared with another one."""


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Relative difference from eager attention that rounding explains."""


@dataclass(frozen=True)
class Layer:
    """One block. A module may serve several layers (ALBERT): layer i is the i-th call.

    core:       the module that calls the attention function; None if the model uses its own
                attention code
    projection: the output projection, which may lie outside the core (BERT)
    residual:   where the output of the sub-layer can be read, residual and normalisation included;
                None if there is no such place
    prenorm:    whether the block normalises its input before attention
    alone:      whether the core reads only these tokens and calls the attention function once
    attends:    False for a block without attention (hybrids), which has a number but is no layer
                that can be measured
    """

    block: nn.Module | None
    core: nn.Module | None
    heads: int
    projection: nn.Module | None = None
    residual: Tap | None = None
    prenorm: bool = False
    alone: bool = True
    attends: bool = True


@dataclass(frozen=True, eq=False)
class Event:
    """A value at a module's "input" or "output", or the unprojected "heads" of its attention.

    value:   some entries of the tokens; none if nothing there is floating-point
    company: whether other arguments of the module depend on the block's tokens as well
    heads:   the number of heads, for attention
    """

    module: nn.Module
    side: str
    value: Tensor
    company: bool = False
    heads: int = 0


@contextmanager
def watching(modules: Iterable[nn.Module]) -> Iterator[list[Event]]:
    """List what passes through modules, and the heads of every attention call, in order."""
    events: list[Event] = []

    def note(found: Captured) -> None:
        value = torch.empty(0, dtype=torch.float32)
        company = False
        if has_tokens(found.value):
            inward = found.side == "input"
            tokens = found.value.hidden if inward else first_tensor(found.value)
            value = _sample(tokens)
            # With `leaves`, the block's tokens are a leaf that requires a gradient, so whatever
            # else requires one here was computed from them: the module has company.
            others = (t for t in tensors_of(found.value) if t is not tokens)
            company = inward and any(t.requires_grad for t in others)
        events.append(Event(found.module, found.side, value, company))

    def attend(call: AttentionCall) -> Tensor:
        heads = call.output()
        value = _sample(heads.transpose(1, 2).flatten(2))
        events.append(Event(call.module, "heads", value, heads=call.q.shape[1]))
        return heads

    with capture(dict.fromkeys(modules, "both"), note), listening(attend):
        yield events


def routed_layers(trunk: nn.Module, events: list[Event]) -> list[Layer]:
    """The blocks of a model that calls the attention function, from a pass on a batch of one.

    The pass was watched at all modules, with `leaves` at the members of all lists of modules.
    """
    cores: dict[nn.Module, int] = {}
    for event in events:
        if event.side == "heads":
            cores.setdefault(event.module, event.heads)
    blocks = {core: _block_of(core, set(cores), trunk) for core in cores}
    # Without blocks nothing shows whether an attention module reads these tokens alone.
    if None in blocks.values():
        return [
            Layer(block=None, core=core, heads=heads, alone=False) for core, heads in cores.items()
        ]
    # Blocks without attention (hybrids) are counted, as `block_calls` does it. Blocks may share the
    # module that attends (Zamba).
    known = set(blocks.values())
    lists = [m for m in trunk.modules() if isinstance(m, nn.ModuleList) and known & set(m)]
    inner = {member: len(set(member.modules()) & set(cores)) for one in lists for member in one}
    layers: list[Layer] = []
    block: nn.Module | None = None
    inside: list[Event] = []
    for event in events:
        count = inner.get(event.module, 2)  # of modules that attend: a stage contains several
        if event.side == "input" and (count == 1 or (count == 0 and block is None)):
            block = event.module
            inside = []
        if block is not None and event.value.numel():
            inside.append(event)
        if event.side == "output" and event.module is block:
            if any(e.side == "heads" for e in inside):
                layers.append(_read_block(block, cores, inside))
            else:
                layers.append(Layer(block=block, core=None, heads=0, attends=False))
            block = None
    return layers


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
    with watching({m for one in lists for m in one}) as events:
        run()
    calls: list[_BlockCall] = []
    inside: list[_BlockCall] = []
    cores: list[tuple[nn.Module, list[_BlockCall]]] = []
    for event in events:
        match event.side:
            case "input":
                nothing = torch.empty(0, dtype=torch.float32)
                calls.append(_BlockCall(event.module, list(inside), event.value, exit=nothing))
                inside.append(calls[-1])
            case "output":
                inside.pop().exit = event.value
            case "heads":
                cores.append((event.module, list(inside)))
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
            chain = [call for call in calls if call.module in set(one) and call.entry.numel()]
            if len(chain) >= len(one) - isinstance(one, nn.Sequential) and all(
                a.exit.numel() and _same(b.entry, a.exit) for a, b in pairwise(chain)
            ):
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
    entry: Tensor
    exit: Tensor


def _block_of(core: nn.Module, cores: set[nn.Module], trunk: nn.Module) -> nn.Module | None:
    """The largest member of a list of modules that contains this attention module and no other."""
    for parent in trunk.modules():
        for member in parent if isinstance(parent, nn.ModuleList) else ():
            inside = set(member.modules())
            if core in inside and len(inside & cores) == 1:
                return member
    return None


def _read_block(block: nn.Module, cores: dict[nn.Module, int], events: list[Event]) -> Layer:
    """Recognise projection, normalisation and residual by their values."""
    (first, *more) = (i for i, event in enumerate(events) if event.side == "heads")
    core = events[first].module
    entry = events[0].value
    # The last input of the core before its heads: a core may be entered more than once.
    own = next(e for e in reversed(events[:first]) if e.module is core and e.side == "input")
    prenorm = not _same(own.value, entry)
    # The first linear map after the heads, if it reads them. Inside the core the heads may be gated
    # first, so values need not match; outside they must.
    linear = next(
        (
            e
            for e in events[first + 1 :]
            if e.side == "input" and getattr(getattr(e.module, "weight", None), "ndim", 0) == 2
        ),
        None,
    )
    reads = linear is not None and (
        linear.module in set(core.modules()) or _same(linear.value, events[first].value)
    )
    return Layer(
        block=block,
        core=core,
        heads=cores[core],
        projection=linear.module if linear is not None and reads else None,
        residual=_residual(entry, events[first + 1 :], prenorm),
        prenorm=prenorm,
        alone=not more and not own.company,
    )


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


@dataclass(frozen=True)
class Preflight:
    """A forward pass with lipscope's attention compared with an eager one, on n tokens.

    calls:      how often the model called lipscope's attention
    routed:     whether the model can be measured on lipscope's attention; if not, `reason` says
                why, and its blocks are measured on eager attention
    difference: ||y - y_eager|| / ||y_eager|| of the last hidden state, where y is computed with the
                attention that is measured
    hidden:     whether the output has an axis of tokens, as hidden states do; scores have none
    """

    n: int
    calls: int
    difference: float
    routed: bool
    reason: str = ""
    hidden: bool = True


def preflight(
    runner: ModelRunner, inputs: RecordedCall, watched: Iterable[nn.Module]
) -> tuple[Preflight, list[Event]]:
    """Run the model twice on `inputs`, a batch of one.

    Returns:
        The comparison, and what passed through `watched` modules on lipscope's attention.
    """
    name = type(runner.trunk).__name__
    try:
        with torch.no_grad():
            eager = run_to(replace(runner, implementation="eager"), runner.trunk, inputs)
    except Exception as error:  # each model raises its own kind of error
        raise UserError(
            f"{name} does not run on {', '.join(inputs.kwargs)} ({on_one_line(error)}); "
            "if it needs more inputs, give them all: load(...).sites(inputs={...})"
        ) from error
    if eager.ndim < 2:
        raise UserError(
            f"{name} gives a tensor of shape {tuple(eager.shape)}, not hidden states of tokens; "
            "choose a model with a transformer trunk"
        )
    if not eager.isfinite().all():
        raise UserError(
            f"{name} gives non-finite values: some of its weights are missing or too large; "
            "check its weight files"
        )
    if not eager.any():
        raise UserError(
            f"{name} maps every token to zero: its weights are all 0; check its weight files"
        )
    members = [
        m for parent in runner.trunk.modules() if isinstance(parent, nn.ModuleList) for m in parent
    ]
    ours = None
    difference = 0.0
    # With gradients on, as in a measurement: a mask that depends on the input then shows here.
    with leaves(members), watching(watched) as events:
        try:
            ours = run_to(runner, runner.trunk, inputs).detach()
        except Exception as error:
            reason = f"{name} does not run on lipscope's attention ({on_one_line(error)})"
    calls = sum(event.side == "heads" for event in events)
    if ours is not None and not calls:
        reason = f"{name} uses its own attention code, which lipscope cannot replace"
    elif ours is not None:
        difference = float((ours - eager).double().norm() / eager.double().norm())
        reason = f"{name} on lipscope's attention differs from eager attention by {difference:.1e}"
    routed = ours is not None and calls > 0 and difference <= TOLERANCE[runner.dtype]
    check = Preflight(
        n=eager.shape[1],
        calls=calls,
        difference=difference if routed else 0.0,
        routed=routed,
        reason="" if routed else reason,
        hidden=eager.ndim > 2,
    )
    return check, events
