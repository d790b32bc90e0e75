"""Layers inside torch.compile: what enters the compiled part is seen from outside, then run again without the compiler.

Hooks inside would be traced into the graph and change it, or be overlooked where the graph is older than they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from lipscope._types import UserError
from lipscope.monitor.seen_call import to_be_kept
from lipscope.nn.evaluating import evaluating
from lipscope.nn.wrapped import is_compiled_copy, unwrapped


class Entry:
    """The outermost compiled part around some layers: a module that torch.compile made, or one compiled in place."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | UserError | None = None
        self._remove: Callable[[], None] | None = None

    def arm(self) -> None:
        self._remove = hook(self.part, self._keep)

    def release(self) -> None:
        if self._remove is not None:
            self._remove()
        self._remove = self._call = None

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not to_be_kept():
            return
        # The whole batch: which argument has a row a sample is not known here. A copy, as it may be added to in place.
        try:
            self._call = tree_map(
                lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs)
            )
        except Exception as error:  # told when the layers inside are measured
            self._call = UserError(str(error))

    def rerun(self) -> None:
        """The last call again, in evaluation mode on copies of the buffers; nothing where there was none."""
        if self._call is None:
            return
        if isinstance(self._call, UserError):
            raise self._call
        (args, kwargs), self._call = self._call, None
        if self._remove is not None:
            self._remove()
            self._remove = None
        original = unwrapped(self.part)
        buffers = {name: b.clone() for name, b in original.named_buffers()}
        with torch.no_grad(), evaluating(original), uncompiled(self.part):
            functional_call(original, buffers, args, kwargs)


def entries(model: nn.Module) -> Iterator[Entry]:
    """The compiled parts of a model that are in no other."""
    if is_compiled_copy(model) or model._compiled_call_impl is not None:
        yield Entry(model)
        return
    for child in model.children():
        yield from entries(child)


def hook(
    part: nn.Module, tap: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
) -> Callable[[], None]:
    """Have `tap` see the calls of a compiled part, on this side of the compiler; returns what takes it off."""
    inner = part._compiled_call_impl
    if inner is None:
        return part.register_forward_pre_hook(tap, with_kwargs=True).remove

    def calling(*args: Any, **kwargs: Any) -> Any:
        tap(part, args, kwargs)
        return inner(*args, **kwargs)

    part._compiled_call_impl = calling
    return lambda: setattr(part, "_compiled_call_impl", inner)


def uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Compiled parts of the module run as they are written."""
    return torch.compiler.set_stance("force_eager") if any(entries(module)) else nullcontext()
