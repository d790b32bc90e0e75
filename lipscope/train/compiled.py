"""Layers inside torch.compile: record the input of the compiled part, then rerun it uncompiled.

Hooks inside would be traced into the graph and change it, or be ignored by a graph that was
compiled before they were registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lipscope._torch_internals import (
    compiled_call,
    set_compiled_call,
    tree_map,
    unless_gone,
)
from lipscope._types import UserError
from lipscope.models.capture import watch_calls
from lipscope.nn.wrapped import evaluating, is_compiled_copy, unwrapped
from lipscope.train.seen_call import to_be_kept


class Entry:
    """The outermost compiled part around some layers.

    It is either a module returned by torch.compile or one that was compiled in place.
    """

    def __init__(self, part: nn.Module) -> None:
        self._part = ref(part)
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | UserError | None = None
        self._hooks = ExitStack()

    @property
    def part(self) -> nn.Module:
        """The compiled module; an empty one if it no longer exists."""
        part = self._part()
        return nn.Module() if part is None else part

    def arm(self) -> None:
        """Start recording calls."""
        self._hooks.callback(hook(self.part, self._keep))

    def release(self) -> None:
        """Stop recording and forget the recorded call."""
        self._hooks.close()
        self._call = None

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not to_be_kept():
            return
        # The whole batch, since it is not known here which arguments have a row per sample; cloned,
        # since the model may modify its inputs in place.
        try:
            self._call = tree_map(
                lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs)
            )
        except Exception as error:  # reported when the layers inside are measured
            self._call = UserError(str(error))

    def rerun(self) -> None:
        """Repeat the last call, if any, in evaluation mode on copies of the buffers."""
        if self._call is None:
            return
        if isinstance(self._call, UserError):
            raise self._call
        (args, kwargs), self._call = self._call, None
        self._hooks.close()  # the pass below is not the training's
        original = unwrapped(self.part)
        buffers = {name: b.clone() for name, b in original.named_buffers()}
        with torch.no_grad(), evaluating(original), uncompiled(self.part):
            functional_call(original, buffers, args, kwargs)


def entries(model: nn.Module) -> Iterator[Entry]:
    """The compiled parts of a model that are not inside another one."""
    if is_compiled_copy(model) or compiled_call(model) is not None:
        yield Entry(model)
        return
    for child in model.children():
        yield from entries(child)


def hook(
    part: nn.Module, tap: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
) -> Callable[[], None]:
    """Show `tap` the calls of a module, outside the compiler; return a function that removes it."""
    # A module compiled in place runs its hooks inside the graph, so the call itself is wrapped.
    call = compiled_call(part)
    if call is None:
        return watch_calls(part, tap)
    if not isinstance(call, _TappedCall):
        call = _TappedCall(part, call)
        set_compiled_call(part, call)
    call.taps.append(tap)

    def remove(part: nn.Module) -> None:
        call = compiled_call(part)
        if isinstance(call, _TappedCall) and tap in call.taps:
            call.taps.remove(tap)
            if not call.taps:
                set_compiled_call(part, call.inner)

    return unless_gone(part, remove)


class _TappedCall:
    """The compiled call of a module, shown to taps first; several monitors share one."""

    def __init__(self, part: nn.Module, inner: Callable[..., Any]) -> None:
        self.part = part
        self.inner = inner
        self.taps: list[Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for tap in tuple(self.taps):
            tap(self.part, args, kwargs)
        return self.inner(*args, **kwargs)


def uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Run the compiled parts of the module eagerly."""
    return torch.compiler.set_stance("force_eager") if any(entries(module)) else nullcontext()
