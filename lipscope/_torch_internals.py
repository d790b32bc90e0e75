"""Private interfaces of torch that lipscope relies on, in one place.

None of them is promised to stay. Each was tested with torch 2.11 and 2.13; on an upgrade, this is
the file to look at first.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map


def is_wrapped(x: Tensor) -> bool:
    """Whether x stands for a batch or a dual number inside torch.func, without data of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_dropout(module: nn.Module) -> bool:
    """Whether this is one of torch's dropout modules; their common base class is private."""
    return isinstance(module, nn.modules.dropout._DropoutNd)


def will_run_backward(node: Any) -> bool:
    """Whether the backward pass now running will execute this node of the graph."""
    return torch._C._will_engine_execute_node(node)


def in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def compiled_module_class() -> type[nn.Module] | None:
    """The class of modules that torch.compile returns, or None while no compiler is loaded."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return None if compiler is None else compiler.OptimizedModule
