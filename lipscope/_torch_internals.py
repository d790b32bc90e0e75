"""Private interfaces of torch that lipscope relies on, in one place.

None of them is promised to stay. Each was tested with torch 2.11 and 2.13; on an upgrade, this is
the file to look at first.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._functorch.utils import unwrap_dead_wrappers
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.jit._builtins import _register_builtin
from torch.overrides import _get_overloaded_args
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

kernel_watchers: list[Callable[[Tensor], None]] = []
"""Called with every tensor of numbers that a kernel of lipscope is going to fill."""


def is_pointwise(operator: Any) -> bool:
    """Whether an operator computes each number from one of each argument."""
    return torch.Tag.pointwise in operator.tags


def decomposed(operator: Any) -> Callable[..., Any]:
    """An operator as a sequence of simpler ones."""
    return decomposition_table[operator]


def set_version(x: Tensor, version: int) -> None:
    """Set the number of changes in place by which autograd knows that a saved tensor is intact."""
    torch._C._autograd._unsafe_set_version_counter((x,), (version,))


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


def autocasts() -> bool:
    """Whether autocast is enabled for any kind of device."""
    return torch._C._is_any_autocast_enabled()


def default_device() -> torch.device | None:
    """Where tensors are created that name no device; None for the CPU."""
    if torch._C._len_torch_function_stack():  # a default device is a mode of torch functions
        device = torch.get_default_device()
    else:
        device = torch.device(torch._C._get_default_device())  # of torch.set_default_tensor_type
    return None if device.type == "cpu" else device


def traced() -> bool:
    """Whether operations are being recorded into a graph (torch.func.linearize, make_fx)."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


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


def with_tangent(value: Tensor, tangent: Tensor) -> Tensor:
    """The dual number that `read_tangents` takes apart."""
    return forward_ad.make_dual(value, tangent)


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


def is_dropout(module: nn.Module) -> bool:
    """Whether this is one of torch's dropout modules; their common base class is private."""
    return isinstance(module, nn.modules.dropout._DropoutNd)


def will_run_backward(node: Any) -> bool:
    """Whether the backward pass now running will execute this node of the graph."""
    return torch._C._will_engine_execute_node(node)


def in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What `module.compile()` put in place of the module's call, if anything."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace what `module.compile()` put in place of the module's call."""
    module._compiled_call_impl = call


class _Additions:
    """What lipscope adds to one module: hooks, and objects that live as long as the module.

    Stands in for the `__reduce_ex__` of the module, so that its copies and pickles lack them. Both
    copy and pickle look it up on the instance. Only here can a hook be left out: once the copy
    exists, the handle that would remove the hook belongs to the original.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.hooks: set[int] = set()
        self.objects: list[object] = []

    @classmethod
    def to(cls, module: nn.Module) -> _Additions:
        """The additions to a module, which may be the first ones."""
        return vars(module).setdefault("__reduce_ex__", cls(module))

    def drop_if_empty(self) -> None:
        attributes = vars(self.module())
        if not self.hooks and not self.objects and attributes.get("__reduce_ex__") is self:
            del attributes["__reduce_ex__"]

    def __call__(self, protocol: int) -> Any:
        module: Any = self.module()
        kind: Any = type(module)
        reduced = kind.__reduce_ex__(module, protocol)
        if len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced  # a class with a way of its own
        state = {name: value for name, value in reduced[2].items() if value is not self}
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            state[name] = type(state[name])(
                (key, value) for key, value in state[name].items() if key not in self.hooks
            )
        return (*reduced[:2], state, *reduced[3:])


def hook_calls(module: nn.Module, hook: Callable[..., None]) -> Callable[[], None]:
    """Register a forward pre-hook that copies of the module do not have; return its removal."""
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    _Additions.to(module).hooks.add(handle.id)

    def remove(module: nn.Module) -> None:
        handle.remove()
        additions = _Additions.to(module)
        additions.hooks.discard(handle.id)
        additions.drop_if_empty()

    return unless_gone(module, remove)


def give(module: nn.Module, thing: object) -> Callable[[], None]:
    """Let a module own an object that its copies do not have; return a function that takes it back.

    For objects that refer to the module: any other owner would keep the module alive.
    """
    _Additions.to(module).objects.append(thing)
    number = id(thing)

    def take_back(module: nn.Module) -> None:
        additions = _Additions.to(module)
        additions.objects = [one for one in additions.objects if id(one) != number]
        additions.drop_if_empty()

    return unless_gone(module, take_back)


def unless_gone(module: nn.Module, work: Callable[[nn.Module], None]) -> Callable[[], None]:
    """A function that does something to a module if it still exists, and does not keep it alive."""
    reference = weakref.ref(module)

    def call() -> None:
        alive = reference()
        if alive is not None:
            work(alive)

    return call


def reads_one_input(module: nn.MultiheadAttention) -> bool:
    """Whether queries, keys and values have one size, so that one input can serve for all."""
    return module._qkv_same_embed_dim


def compiled_module_class() -> type[nn.Module] | None:
    """The class of modules that torch.compile returns, or None while no compiler is loaded."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return None if compiler is None else compiler.OptimizedModule
