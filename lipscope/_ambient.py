"""Entry points: public functions give the same numbers whatever their caller has set in torch.

Inference mode, autocast and a default device would otherwise reach into every computation. The
default dtype is left alone, since torch keeps one for all threads: code in lipscope names the dtype
of each floating-point tensor that it creates.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipscope._checks import bad_argument
from lipscope._torch_internals import autocasts, default_device
from lipscope._types import UserError
from lipscope.fused._torch_internals import is_transformed

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

_callers_device: ContextVar[torch.device | None] = ContextVar("lipscope_device", default=None)

_building = RLock()

live_modules = RLock()
"""Held while the settings, hooks or tensors of a live module are not its owner's.

One lock for the process: two models may share modules, and a lock for each module would have to be
taken in an order that nested measurements do not know in advance. It is held for one forward pass
at a time; backward passes and the solver run without it.
"""

_measuring: ContextVar[bool] = ContextVar("lipscope_measuring", default=False)


def entry_point(function: Callable[P, T]) -> Callable[P, T]:
    """Make a public function independent of the caller's torch settings, and its errors helpful."""
    return unaffected(function, helpful=True)


def cause_of(name: str, error: str) -> str | None:
    """What an error of torch means if the caller's settings or another thread caused it."""
    if "nference tensor" in error:
        return (
            f"{name} uses a tensor that was created under torch.inference_mode() and cannot be "
            "differentiated; create it outside, or outside make a copy (clone, copy.deepcopy)"
        )
    if "modified by an inplace operation" in error:
        return (
            f"a tensor changed in place while {name} was running, perhaps in a training loop of "
            "another thread; measure between its steps, or a copy made with copy.deepcopy"
        )
    if is_transformed():
        return (
            f"{name} cannot run inside this transform of torch.func or level of forward-mode "
            "autograd; call it outside"
        )
    if (device := default_device()) is not None:
        return (
            f"{name} failed with the default device {device} ({' '.join(error.split())[:120]}); "
            "unset it with torch.set_default_device(None)"
        )
    return None


def unaffected(function: Callable[P, T], helpful: bool = False) -> Callable[P, T]:
    """Run a function outside inference mode and autocast, without a default device.

    Tensors among the arguments that were created in inference mode are replaced by copies. Whether
    gradients are recorded is left as it is: code that needs a graph asks for one. With `helpful`,
    errors name the wrong argument (`bad_argument`) or setting (`cause_of`).
    """

    @wraps(function)
    def running(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            if torch.is_inference_mode_enabled() or autocasts() or default_device() is not None:
                with _usual_state():
                    return running(*args, **kwargs)
            if any(map(_is_inference, args)) or any(map(_is_inference, kwargs.values())):
                args = tuple(map(ordinary, args))  # type: ignore[assignment]  # same kinds
                kwargs = {name: ordinary(x) for name, x in kwargs.items()}  # type: ignore[assignment]  # as above
            return function(*args, **kwargs)
        except Exception as error:
            reason = bad_argument(function, args, kwargs, error) if helpful else None
            if reason is None and helpful and isinstance(error, RuntimeError):
                reason = cause_of(function.__name__, str(error))
            if reason is None:
                raise
            raise UserError(reason) from error

    return running


@contextmanager
def _usual_state() -> Iterator[None]:
    graph = torch.is_grad_enabled()
    device = default_device()
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))  # which also enables gradients
            stack.enter_context(torch.set_grad_enabled(graph))
        for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if device is not None:
            stack.callback(_callers_device.reset, _callers_device.set(device))
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def own_pass() -> Iterator[None]:
    """Run a live module for a measurement: alone, and unseen by monitors."""
    with live_modules:
        token = _measuring.set(True)
        try:
            yield
        finally:
            _measuring.reset(token)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Use torch's own attention in the form that can be differentiated twice.

    torch has one choice for all threads, so that other measurements wait.
    """
    with live_modules, sdpa_kernel(SDPBackend.MATH):
        yield


def in_own_pass() -> bool:
    """Whether a module is now run by lipscope in this thread, and not by its owner."""
    return _measuring.get()


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Create parameters in float32, whatever the default dtype, so that a seed gives one model.

    torch has one default dtype for all threads: keep what runs inside short.
    """
    with _building:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def callers_device() -> AbstractContextManager[Any]:
    """Restore the caller's default device, which the caller's own functions may rely on."""
    device = _callers_device.get()
    return nullcontext() if device is None else device


def ordinary(x: Any) -> Any:
    """x with copies of the tensors that were created in inference mode; modules are kept."""
    if not _is_inference(x):
        return x
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, dict):
        return type(x)((key, ordinary(value)) for key, value in x.items())
    if isinstance(x, list | tuple):
        return type(x)(map(ordinary, x))
    record = copy.copy(x)
    for field in fields(x):
        object.__setattr__(record, field.name, ordinary(getattr(x, field.name)))
    return record


def ordinary_module(module: M) -> M:
    """The module, or a copy of it if some of its weights were created in inference mode."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module) if any(map(_is_inference, tensors)) else module


def _is_inference(x: Any) -> bool:
    """Whether a tensor, or one in a record or a short list, was created in inference mode."""
    if isinstance(x, Tensor):
        return x.is_inference()
    if isinstance(x, dict):
        return any(map(_is_inference, x.values()))
    if isinstance(x, list | tuple):
        # The first entry tells a list of tensors from one of a million token ids.
        return bool(x) and not isinstance(x[0], int | float | str) and any(map(_is_inference, x))
    if is_dataclass(x) and not isinstance(x, type):
        return any(_is_inference(getattr(x, field.name)) for field in fields(x))
    return False
