"""Private interfaces of torch that fused attention relies on, in one place.

None of them is promised to stay. Each was tested with torch 2.11 and 2.13; on an upgrade, this is
the file to look at first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._functorch.utils import unwrap_dead_wrappers
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.jit._builtins import _register_builtin
from torch.overrides import _get_overloaded_args

kernel_watchers: list[Callable[[Tensor], None]] = []
"""Called with every tensor of numbers that a kernel of lipscope is going to fill."""


def is_wrapped(x: Tensor) -> bool:
    """Whether x stands for a batch or a dual number inside torch.func, without data of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def unwrapped(x: Tensor) -> Tensor:
    """The tensor whose memory x shows inside torch.func."""
    while is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def has_memory(x: Tensor) -> bool:
    """Whether the memory of x holds its numbers, for a kernel to read."""
    return not (is_wrapped(x) or sees_operations(x) or x.is_neg() or x._is_zerotensor())


def sees_operations(x: Tensor) -> bool:
    """Whether the class of x carries out every operation itself (`__torch_dispatch__`)."""
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_placeholder(x: Tensor) -> bool:
    """Whether x has a shape and no numbers: torch passes these through a program to trace it."""
    return isinstance(x, FakeTensor | FunctionalTensor)


def classes_to_ask(arguments: Sequence[Any]) -> list[Any]:
    """One argument for each class with a `__torch_function__`, in the order torch asks them."""
    return [x for x in _get_overloaded_args(arguments) if type(x) is not Tensor]


def overrides_functions(x: Any) -> bool:
    """Whether the class of x has a `__torch_function__` of its own, and it is not switched off."""
    own, torchs = (getattr(kind.__torch_function__, "__func__", None) for kind in (type(x), Tensor))
    return own is not torchs and bool(classes_to_ask((x,)))


def as_plain(x: Any) -> Any:
    """x as a tensor of torch's own class, if it holds its numbers as those do."""
    if type(x) in (Tensor, nn.Parameter) or not isinstance(x, Tensor) or sees_operations(x):
        return x
    return x.as_subclass(Tensor)


def causal_bias_class() -> type[Tensor] | None:
    """The class of `causal_upper_left` and `causal_lower_right`, or None while it is not loaded."""
    # Imported here it would load the compiler, which takes seconds.
    module = sys.modules.get("torch.nn.attention.bias")
    return None if module is None else module.CausalBias


def script_as_attention(function: Callable[..., Any]) -> None:
    """Let torch.jit.script take torch's own attention where code calls this function."""
    _register_builtin(function, "aten::scaled_dot_product_attention")


def transforms() -> int:
    """How many transforms of torch.func this call is nested in."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def is_transformed() -> bool:
    """Whether this call is nested in torch.func or in a level of forward-mode autograd."""
    return (
        forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    )


def traced() -> bool:
    """Whether operations are being recorded into a graph (torch.func.linearize, make_fx)."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


def is_observed(x: Tensor) -> bool:
    """Whether a transform, a tracer or forward mode sees what is computed from x."""
    if torch._C._functorch.get_interpreter_stack() or traced():
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


Dual = tuple[Any, Any]
"""A tensor, or None where an argument is not given, and its tangent, or None where it has none."""


def read_tangents(tensors: Sequence[Tensor | None]) -> list[Dual] | None:
    """Each tensor and its tangent, or None if forward mode is not what happens here.

    That is the case if no tensor has a tangent, or if the innermost transform of torch.func is not
    a jvp: tangents of an outer one are not for us to read.
    """
    if forward_ad._current_level < 0:
        return None
    innermost = torch._C._functorch.peek_interpreter_stack()
    if innermost is not None and innermost.key() != torch._C._functorch.TransformType.Jvp:
        return None
    duals = [(None, None) if x is None else tuple(forward_ad.unpack_dual(x)) for x in tensors]
    return None if all(tangent is None for _, tangent in duals) else duals


@contextmanager
def outside_transforms(tensors: Sequence[Tensor | None]) -> Iterator[Sequence[Any]]:
    """Leave a torch.func.jvp whose tangents were read: inside, the tensors are plain tensors."""
    with temporarily_clear_interpreter_stack():
        yield [
            torch._C._functorch.get_unwrapped(x) if x is not None and is_wrapped(x) else x
            for x in tensors
        ]


class TransformFreeFunction(torch.autograd.Function):
    """An autograd function that is fast to call: torch inspects signatures for 0.1 ms each time."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if transforms() or torch.compiler.is_compiling():
            return super().apply(*args)
        fast = super(torch.autograd.Function, cls)
        return fast.apply(*unwrap_dead_wrappers(args))  # type: ignore[attr-defined]  # of a base in C


def will_run_backward(node: Any) -> bool:
    """Whether the backward pass now running will execute this node of the graph."""
    return torch._C._will_engine_execute_node(node)
