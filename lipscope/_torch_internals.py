"""Private interfaces of torch that lipscope relies on, in one place.

None of them is promised to stay. Each was tested with torch 2.11 and 2.13; on an upgrade, this is
the file to look at first.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map


def is_pointwise(operator: Any) -> bool:
    """Whether an operator computes each number from one of each argument."""
    return torch.Tag.pointwise in operator.tags


def decomposed(operator: Any) -> Callable[..., Any]:
    """An operator as a sequence of simpler ones."""
    return decomposition_table[operator]


def set_version(x: Tensor, version: int) -> None:
    """Set the number of changes in place by which autograd knows that a saved tensor is intact."""
    torch._C._autograd._unsafe_set_version_counter((x,), (version,))


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


def is_dropout(module: nn.Module) -> bool:
    """Whether this is one of torch's dropout modules; their common base class is private."""
    return isinstance(module, nn.modules.dropout._DropoutNd)


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


def kept_out_of_copies(module: nn.Module, handle: Any) -> Callable[[], None]:
    """Let copies of a module lack one of its forward pre-hooks; return the removal of the hook."""
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
