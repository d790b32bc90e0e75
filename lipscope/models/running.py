"""Run one module of a model on given tokens, and read a value from inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache, PreTrainedModel

from lipscope._ambient import live_modules
from lipscope.models.masks import PlainMask
from lipscope.models.plug import NAME, AttentionCall, listening, plugged
from lipscope.models.precision import Float64


@dataclass(frozen=True)
class Host:
    """The model whose modules are run; a borrowed one lends its weights, cast and detached."""

    trunk: PreTrainedModel
    dtype: torch.dtype
    owned: bool
    implementation: str = NAME

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Set attention, mode and arithmetic for a measurement."""
        arithmetic = Float64() if self.dtype == torch.float64 else nullcontext()
        with plugged(self.trunk, self.implementation), arithmetic:
            yield

    def run(self, module: nn.Module, call: ModuleCall) -> Any:
        """The module's own output for this call."""
        if self.owned:
            return module(*call.args, **call.kwargs)
        # A borrowed model keeps its own tensors: cast copies are substituted for this call only.
        tensors = [*module.named_parameters(), *module.named_buffers()]
        lent = {
            name: t.detach().to(self.dtype) if t.is_floating_point() else t.detach()
            for name, t in tensors
        }
        return functional_call(module, lent, call.args, call.kwargs)


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """The arguments of a module call; `hidden` is the tensor among them that carries the tokens."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor

    @staticmethod
    def seen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCall:
        """The call as a hook sees it; caches are dropped so that the call can be repeated."""
        args, kwargs = _map((args, kwargs), lambda x: None if isinstance(x, Cache) else x)
        return ModuleCall(args, kwargs, first_tensor((args, kwargs.get("hidden_states"), kwargs)))

    def at(self, x: Tensor) -> ModuleCall:
        """The same call with other tokens wherever the old ones occurred."""
        old = self.hidden
        args, kwargs = _map((self.args, self.kwargs), lambda leaf: x if leaf is old else leaf)
        return ModuleCall(args, kwargs, x)

    def of_first(self) -> ModuleCall:
        """The call for the first member of its batch; samples come first in all its tensors."""
        batch = len(self.hidden)
        first = self.hidden[:1]
        # The trunk is called with keyword arguments alone.
        kwargs = {
            name: x[:1] if isinstance(x, Tensor) and x.ndim > 0 and len(x) == batch else x
            for name, x in self.kwargs.items()
        }
        kwargs |= {name: first for name, x in self.kwargs.items() if x is self.hidden}
        return ModuleCall((), kwargs, first)

    def of_members(self, members: Tensor, single: ModuleCall) -> ModuleCall:
        """The call for some members of its batch.

        `single` is the same call for a batch of one: the arguments whose shape differs from it are
        the ones that carry the batch. Their first dimension alone would not tell, since some models
        flatten the batch into it.
        """
        batch = self.hidden.shape[0] // single.hidden.shape[0]

        def pick(leaf: Any, alone: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.shape == alone.shape:
                return leaf
            if isinstance(leaf, PlainMask):
                return leaf.of_members(members)
            return leaf.unflatten(0, (batch, -1))[members.to(leaf.device)].flatten(0, 1)

        hidden = pick(self.hidden, single.hidden)

        def choose(leaf: Any, alone: Any) -> Any:
            return hidden if leaf is self.hidden else pick(leaf, alone)

        args, kwargs = _map((self.args, self.kwargs), choose, (single.args, single.kwargs))
        return ModuleCall(args, kwargs, hidden)


@dataclass(frozen=True)
class Tap:
    """Where a value is read: at the input or the output of a module."""

    module: nn.Module
    side: str


class _Found(Exception):  # noqa: N818 (it ends a forward pass early and is not an error)
    """Carries the requested value out of a forward pass whose rest is not needed."""


def run_to(
    host: Host,
    module: nn.Module,
    call: ModuleCall,
    tap: Tap | None = None,
    entry: tuple[nn.Module, Tensor] | None = None,
    entry_call: int = 0,
) -> Tensor:
    """The value at `tap` (by default the output) of `module`, called like this.

    With `entry` = (module, x), x replaces the tokens at one call of that module: a shared block
    (ALBERT) runs once per layer.
    """
    calls = count()

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = ModuleCall.seen(args, kwargs)
        if entry is not None and next(calls) == entry_call:
            call = call.at(entry[1])
        return call.args, call.kwargs

    def stop_at_input(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> NoReturn:
        raise _Found(ModuleCall.seen(args, kwargs).hidden)

    def stop_at_output(module: nn.Module, args: Any, output: Any) -> NoReturn:
        raise _Found(first_tensor(output))

    with ExitStack() as hooks:
        hooks.enter_context(host.ready())
        if tap is not None and tap.side == "input":
            hooks.enter_context(hooked([tap.module], enter=stop_at_input))
        elif tap is not None:
            hooks.enter_context(hooked([tap.module], leave=stop_at_output))
        if entry is not None:
            hooks.enter_context(hooked([entry[0]], enter=enter))
        try:
            return first_tensor(host.run(module, call))
        except _Found as found:
            return found.args[0]


@contextmanager
def hooked(
    modules: Iterable[nn.Module],
    enter: Callable[[nn.Module, Any, Any], Any] | None = None,
    leave: Callable[[nn.Module, Any, Any], Any] | None = None,
) -> Iterator[None]:
    """Call enter(module, args, kwargs) before, leave(module, args, output) after each call."""
    modules = list(modules)
    handles = []
    with live_modules:
        if enter is not None:
            handles += [m.register_forward_pre_hook(enter, with_kwargs=True) for m in modules]
        if leave is not None:
            handles += [m.register_forward_hook(leave) for m in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def leaves(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make the tokens entering these modules require a gradient, and so all computed from them."""

    def make_leaf(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not has_tokens((args, kwargs)):
            return None
        call = ModuleCall.seen(args, kwargs)
        call = call.at(call.hidden.detach().requires_grad_(True))
        return call.args, call.kwargs

    with torch.enable_grad(), hooked(modules, enter=make_leaf):
        yield


def has_tokens(tree: Any) -> bool:
    """Whether nested arguments contain a floating-point tensor."""
    return any(tensor.is_floating_point() for tensor in tensors_of(tree))


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in nested arguments but empty ones: some models pass those for absent parts."""
    if isinstance(tree, Tensor):
        return [tree] if tree.numel() else []
    parts = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    )
    return [tensor for part in parts for tensor in tensors_of(part)]


def first_tensor(tree: Any) -> Tensor:
    """The tokens among a module's arguments or outputs: the first floating-point one."""
    return next(tensor for tensor in tensors_of(tree) if tensor.is_floating_point())


def attention_call(host: Host, module: nn.Module, call: ModuleCall) -> AttentionCall:
    """The arguments that `module`, called like this, passes to the attention function."""

    def stop(attention: AttentionCall) -> NoReturn:
        raise _Found(attention)

    with host.ready(), listening(stop):
        try:
            host.run(module, call)
        except _Found as found:
            return found.args[0]
    raise AssertionError(f"{type(module).__name__} made no attention call")


def _map(tree: Any, change: Callable[..., Any], *others: Any) -> Any:
    """`change` applied to every leaf of nested tuples, lists and dictionaries of arguments."""
    if isinstance(tree, dict):
        return {key: _map(value, change, *(o[key] for o in others)) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_map(value, change, *(o[i] for o in others)) for i, value in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return change(tree, *others)
