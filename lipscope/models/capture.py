"""Record or change what flows through the modules of a live model.

No other file of the package registers hooks on forward or backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipscope._ambient import live_modules
from lipscope._torch_internals import kept_out_of_copies


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """The arguments of a module call, with which it can be repeated.

    main:   the keyword argument that carries the tokens; by default they are the first
            floating-point tensor
    single: the same call for the first member of the batch only; arguments whose shapes differ
            between the two carry the batch. None if the batch has one member
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    main: str | None = None
    single: RecordedCall | None = None

    @cached_property
    def hidden(self) -> Tensor:
        """The tensor among the arguments that carries the tokens."""
        if self.main is not None:
            return self.kwargs[self.main]
        return first_tensor((self.args, self.kwargs.get("hidden_states"), self.kwargs))

    @property
    def samples(self) -> tuple[tuple[int, None], ...]:
        """(sample, None) for each sample: the members of a site with all heads together."""
        rows = (self.single or self).hidden.shape[0]
        return tuple((i, None) for i in range(self.hidden.shape[0] // rows))

    def at(self, x: Tensor) -> RecordedCall:
        """The same call with other tokens wherever the old ones occurred."""
        old = self.hidden
        args, kwargs = _map((self.args, self.kwargs), lambda leaf: x if leaf is old else leaf)
        return replace(self, args=args, kwargs=kwargs)

    def of_first(self) -> RecordedCall:
        """The call for the first member of its batch; samples come first in all its tensors."""
        batch = len(self.hidden)
        # The trunk is called with keyword arguments alone.
        kwargs = {
            name: x[:1] if isinstance(x, Tensor) and x.ndim > 0 and len(x) == batch else x
            for name, x in self.kwargs.items()
        }
        return replace(self, args=(), kwargs=kwargs)

    def of_members(self, members: Tensor) -> RecordedCall:
        """The call for some members of its batch.

        The first dimension of an argument would not tell whether it carries the batch, since some
        models flatten the batch into it: `single` tells.
        """
        if self.single is None:
            return self
        batch = self.hidden.shape[0] // self.single.hidden.shape[0]
        picked: dict[int, Tensor] = {}

        def pick(leaf: Any, alone: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.shape == alone.shape:
                return leaf
            if hasattr(leaf, "of_members"):  # a mask known by its rule
                return leaf.of_members(members)
            if id(leaf) not in picked:  # tokens that occur twice stay one tensor
                rows = leaf.unflatten(0, (batch, -1))[members.to(leaf.device)]
                picked[id(leaf)] = rows.flatten(0, 1)
            return picked[id(leaf)]

        alone = (self.single.args, self.single.kwargs)
        args, kwargs = _map((self.args, self.kwargs), pick, alone)
        return replace(self, args=args, kwargs=kwargs)


class Tap(NamedTuple):
    """Where a value is read: at the "input" or the "output" of a module."""

    module: nn.Module
    side: str


class Captured(NamedTuple):
    """A value at the "input" of a module (a RecordedCall) or at its "output" (what it returned)."""

    module: nn.Module
    side: str
    value: Any


@contextmanager
def capture(
    sides: Mapping[nn.Module, str], change: Callable[[Captured], Any] | None = None
) -> Iterator[list[Captured]]:
    """Record what flows through modules in the passes inside, in order.

    Args:
        sides: For every module "input", "output" or "both".
        change: Called with every value instead of recording it; what it returns, unless None,
            replaces the value.
    """
    from transformers import Cache

    recorded: list[Captured] = []
    visit = change or recorded.append

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Without its caches a call can be repeated.
        args, kwargs = _map((args, kwargs), lambda x: None if isinstance(x, Cache) else x)
        new = visit(Captured(module, "input", RecordedCall(args, kwargs)))
        return None if new is None else (new.args, new.kwargs)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return visit(Captured(module, "output", output))

    handles = []
    with live_modules:
        for module, side in sides.items():
            if side != "output":
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            if side != "input":
                handles.append(module.register_forward_hook(leave))
        try:
            yield recorded
        finally:
            for handle in handles:
                handle.remove()


def watch_calls(module: nn.Module, watcher: Callable[..., None]) -> Callable[[], None]:
    """Show watcher(module, args, kwargs) the calls of a module; return a function that ends it.

    For modules that others run meanwhile. Copies of the module are not watched.
    """
    return kept_out_of_copies(module, module.register_forward_pre_hook(watcher, with_kwargs=True))


@contextmanager
def leaves(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make the tokens entering these modules require a gradient, and so all computed from them."""

    def make_leaf(found: Captured) -> RecordedCall | None:
        call: RecordedCall = found.value
        if not has_tokens((call.args, call.kwargs)):
            return None
        return call.at(call.hidden.detach().requires_grad_(True))

    with torch.enable_grad(), capture(dict.fromkeys(modules, "input"), make_leaf):
        yield


def has_tokens(tree: Any) -> bool:
    """Whether nested arguments contain a floating-point tensor."""
    return any(tensor.is_floating_point() for tensor in tensors_of(tree))


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in nested arguments but empty ones: some models pass those for absent parts."""
    if isinstance(tree, Tensor):
        return [tree] if tree.numel() else []
    if isinstance(tree, RecordedCall):
        tree = (tree.args, tree.kwargs)
    parts = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    )
    return [tensor for part in parts for tensor in tensors_of(part)]


def first_tensor(tree: Any) -> Tensor:
    """The tokens among a module's arguments or outputs: the first floating-point one."""
    return next(tensor for tensor in tensors_of(tree) if tensor.is_floating_point())


def _map(tree: Any, change: Callable[..., Any], *others: Any) -> Any:
    """`change` applied to every leaf of nested tuples, lists and dictionaries of arguments."""
    if isinstance(tree, dict):
        return {key: _map(value, change, *(o[key] for o in others)) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_map(value, change, *(o[i] for o in others)) for i, value in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return change(tree, *others)
