"""Follow numbers through memory and through the graph of gradients.

Gradients of many probes take few backward passes: that of a small model takes as long as it takes
to launch its operations, and `torch.func.vmap` launches each of them once for many probes.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lipscope._torch_internals import tree_leaves
from lipscope._types import UserError
from lipscope.models.model_files import on_one_line

IN_PLACE = re.compile(r"__setitem__|__i(add|sub|mul|(true|floor)?div|mod|pow|matmul)__|.*[^_]_")
"""Names of functions that write into an argument."""

WITHOUT_VALUES = re.compile(
    r"(new_)?empty(_like|_strided|_permuted)?|new|rand.*|normal_?|bernoulli_?|uniform_|"
    r"exponential_|cauchy_|geometric_|log_normal_|random_"
)
"""Names of functions that return memory never written, or numbers drawn at random: no errors."""

RESIZING = ("resize_", "resize_as_")

DETACHING = (Tensor.detach, inspect.getattr_static(Tensor, "data").__get__)
"""Functions that end the graph of gradients; errors stay, as the memory is the same."""

LEAVING = (Tensor.numpy, Tensor.__array__)
"""Functions that take numbers out of torch."""


def storage_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def part_of(x: Tensor) -> tuple[Any, ...]:
    """What a tensor shows of its memory."""
    return x.dtype, x.storage_offset(), x.shape, x.stride(), x.is_conj(), x.is_neg()


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def floats_of(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if is_float(x)]


def writes_argument(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a function is one that changes its argument: x += y, x.add_(y), relu(x, True)."""
    if IN_PLACE.fullmatch(name):
        return True
    at = _place_of_in_place(func) if isinstance(func, FunctionType) else None
    return at is not None and bool(kwargs.get("inplace", args[at] if at < len(args) else False))


@lru_cache
def _place_of_in_place(func: FunctionType) -> int | None:
    names = list(inspect.signature(func, follow_wrapped=False).parameters)
    return names.index("inplace") if "inplace" in names else None


def overwritten(x: Tensor, exact: Tensor, written: Tensor, values: Tensor) -> Tensor:
    """The reference of x, after `values` became that of a tensor which may share entries with x."""
    if x.is_complex():
        return torch.view_as_complex(
            overwritten(torch.view_as_real(x), torch.view_as_real(exact), written, values)
        )
    if written.is_complex():
        written = torch.view_as_real(written)
        values = torch.view_as_real(values)
    own = _places(x)
    theirs = _places(written)
    if not x.numel() or not written.numel():
        return exact
    found = theirs.new_full((int(max(own.max(), theirs.max())) + 1,), -1)
    found[theirs.reshape(-1)] = torch.arange(written.numel(), device=x.device)
    entry = found[own]
    if not bool((entry >= 0).any()):
        return exact
    return torch.where(entry >= 0, values.reshape(-1)[entry.clamp_min(0)].to(exact), exact)


def _places(x: Tensor) -> Tensor:
    """Where the entries of a tensor lie in its memory, in the shape of the tensor."""
    found = torch.full((), int(x.storage_offset()), device=x.device)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        found = found[..., None] + stride * torch.arange(size, device=x.device)
    return found


BYTES = 2**30
"""Memory for the gradients of the probes of one backward pass; more on a GPU with more to spare."""

SPARE = 8
"""On a GPU, one part in this many of the free memory may hold these gradients."""


class Connected(TorchFunctionMode):
    """Build the graph also where the model does not want it, under no_grad or after detach.

    An error passes there like everywhere else.
    """

    def __init__(self) -> None:
        super().__init__()
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let hooks compute values without a graph."""
        self._paused = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._paused = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        with torch.enable_grad():
            if func in DETACHING and not args[0].is_leaf:
                return args[0].view_as(args[0])
            if func in LEAVING:
                args = (args[0].detach(), *args[1:])
            return func(*args, **(kwargs or {}))


def batches(count: int, tensors: Sequence[Tensor]) -> Iterator[range]:
    """Split `count` probes into ranges whose gradients fit into memory together."""
    each = sum(x.numel() * x.element_size() for x in tensors)
    room = BYTES
    if tensors and tensors[0].is_cuda:
        room = max(room, torch.cuda.mem_get_info(tensors[0].device)[0] // SPARE)
    # What cannot be batched below is not collected either.
    batched = all(x.dtype == torch.float64 for x in tensors)
    step = max(1, room // max(each, 1)) if batched else 1
    for first in range(0, count, step):
        yield range(first, min(first + step, count))


def gradients(
    outputs: Sequence[Tensor], probes: Sequence[Tensor], tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of sum_o <v_o, y_o> with respect to every tensor x, [K, *x.shape].

    Args:
        outputs: Tensors y_o of one graph, which is retained.
        probes: v_o [K, *y_o.shape].
        tensors: Tensors of the graph. The gradient is None where no output depends on the tensor.
    """
    if not any(y.requires_grad for y in outputs):
        return [None] * len(tensors)
    used: list[bool] = []

    def one(*v: Tensor) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(outputs, tensors, v, retain_graph=True, allow_unused=True)
        used[:] = [g is not None for g in found]
        return tuple(g for g in found if g is not None)

    found: Sequence[Tensor] | None = None
    # In float32 and below attention may run on kernels that do not take a batch of gradients.
    if len(probes[0]) > 1 and all(y.dtype == torch.float64 for y in outputs):
        # Otherwise an operation cannot be batched at all, or there is too little memory.
        with suppress(RuntimeError), warnings.catch_warnings():
            # Operations without a batching rule run one probe after another; that is all.
            warnings.filterwarnings("ignore", "There is a performance drop")
            found = torch.func.vmap(one)(*probes)
    if found is None:
        try:
            parts = zip(*(one(*v) for v in zip(*probes, strict=True)), strict=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a function without a derivative, gradient checkpointing
            raise UserError(
                f"the model cannot be differentiated ({on_one_line(error)}); run it without that"
            ) from error
        found = [torch.stack(part) for part in parts]
    rest = iter(found)
    return [next(rest) if hit else None for hit in used]
