"""A second device without its hardware: CPU tensors that are labelled with where they would live.

Inside `other_device()`, `device="xpu"` makes an ordinary CPU tensor whose storage carries a label.
Labels follow every operation, below autograd and torch.func, and what a real device would refuse is
refused: tensors of two devices in one operation, a generator of the wrong one, NumPy.
"""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, _functorch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

HERE = torch.device("cpu")
ELSEWHERE = torch.device("xpu:0")  # no code of lipscope has a branch for it

ACROSS = {"copy_", "_to_copy"}
"""Operations that move data between devices."""

INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""Operations of a device that accept indices on the CPU."""

SCALARS = {
    *("add", "sub", "mul", "div", "pow", "remainder", "maximum", "minimum", "atan2", "hypot"),
    *("eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "fill", *INDEXED),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or"),
}
"""Operations of a device that accept a number on the CPU; those in place too, unless it is the
number that they would write to."""


def _storage(x: Tensor) -> Any:
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x.untyped_storage() if x.layout == torch.strided else None


def place(x: Tensor) -> torch.device | None:
    """Where a tensor would live; None for one made inside an operation, and yet to be decided."""
    return getattr(_storage(x), "place", None)


def _label(x: Tensor, where: torch.device | None) -> None:
    storage = _storage(x)
    if storage is not None:
        storage.place = where


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [y for part in x for y in _tensors(part)] if isinstance(x, (list, tuple)) else []


def _common(places: set[torch.device | None]) -> torch.device | None:
    return ELSEWHERE if ELSEWHERE in places else HERE if HERE in places else None


@cache
def _described(operation: Any) -> tuple[str, list[int]]:
    """The name of an operation, and which arguments it writes to."""
    arguments = operation._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    return operation._schema.name.removeprefix("aten::"), written


class _Operations(TorchDispatchMode):
    """Refuse operations on tensors of two devices, and label the results of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with DisableTorchFunction():
            kwargs = kwargs or {}
            given = [(x, place(x)) for x in _tensors((*args, *kwargs.values()))]
            places = {where for _, where in given}
            if HERE in places and ELSEWHERE in places:
                self._check(func, args, kwargs)
            result = func(*args, **kwargs)
            for x in _tensors(result):
                if place(x) is None:
                    _label(x, _common(places))
            return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, written = _described(func)
        targets = {id(x) for x in _tensors([args[i] for i in written if i < len(args)])}
        given = args[:1] + args[2:] if name in INDEXED else args
        for x in () if name in ACROSS else _tensors((*given, *kwargs.values())):
            number = x.ndim == 0 and id(x) not in targets and name.removesuffix("_") in SCALARS
            if place(x) == HERE and not number:
                self.refused.append(name)
                raise RuntimeError(f"{name} got tensors on two devices, {HERE} and {ELSEWHERE}")


class _Functions(TorchFunctionMode):
    """Translate the other device in calls of torch, and in the attributes of tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func.__name__
        if name == "__get__":
            name = func.__self__.__name__
            if name not in ANSWERS:
                return func(*args, **kwargs)
        given = _tensors((*args, *kwargs.values()))
        for x in given:
            if place(x) is None:
                _label(x, HERE)
        # A list of numbers on a device becomes a tensor on the CPU.
        sources = args[:1] if name in ("tensor", "as_tensor") else given
        where = _common({place(x) for x in sources if isinstance(x, Tensor)})
        if where == ELSEWHERE and name in ANSWERS:
            return ANSWERS[name](args[0])
        args, kwargs, asked = _translated(name, args, kwargs)
        where = asked or where or HERE
        g = kwargs.get("generator")
        if g is not None and getattr(g, "place", HERE) != where:
            raise RuntimeError(f"Expected a {where} device type for generator, but found {g.place}")
        result = func(*args, **kwargs)
        if asked and any(_storage(x) is _storage(result) for x in given if place(x) != asked):
            result = result.clone()
        for x in _tensors(result):
            if asked or place(x) is None:
                _label(x, where)
        return result


def _refuse_numpy(x: Tensor) -> Any:
    raise TypeError(f"can't convert {ELSEWHERE} device type tensor to numpy")


ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "device": lambda x: ELSEWHERE,
    "is_cpu": lambda x: False,
    "get_device": lambda x: 0,
    "numpy": _refuse_numpy,
    "__array__": _refuse_numpy,
}
"""What a tensor that lives elsewhere answers."""


def _translated(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], torch.device | None]:
    """The arguments for the CPU, and the device that they ask for."""
    asked = HERE if name == "cpu" else None
    for i, x in enumerate(args) if name == "to" else ():
        if isinstance(x, Tensor) and i == 1:
            asked, args = place(x), (args[0], x.dtype, *args[2:])
        elif isinstance(x, str | torch.device):
            asked, args = _device(x), (*args[:i], _real(x), *args[i + 1 :])
    if kwargs.get("device") is not None and name != "device":
        asked = _device(kwargs["device"])
        kwargs["device"] = _real(kwargs["device"])
    return args, kwargs, asked


def _device(x: str | torch.device) -> torch.device | None:
    return {HERE.type: HERE, ELSEWHERE.type: ELSEWHERE}.get(torch.device(x).type)


def _real(x: str | torch.device) -> torch.device:
    return HERE if _device(x) == ELSEWHERE else torch.device(x)


class _Generator(torch.Generator):
    def __new__(cls, device: str | torch.device = "cpu") -> _Generator:
        g = super().__new__(cls)
        g.place = _device(device)
        return g


@contextmanager
def other_device() -> Iterator[list[str]]:
    """Let torch have a device called xpu; yields the operations that were refused."""
    operations, functions, engine = _Operations(), _Functions(), torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with functions:  # torch has left it for the call of grad
            return engine(*args, **kwargs)

    with (
        unittest.mock.patch("torch.autograd._engine_run_backward", backward),
        unittest.mock.patch("torch.Generator", _Generator),
        operations,
        functions,
    ):
        yield operations.refused
