"""The weights that a format of weights rounds: parameters that multiply the values of tokens.

Which parameters these are, and along which of their dimensions a product adds up, is read from one
run: the operands of its matrix products and convolutions are traced back to parameters through the
memory they lie in. So the experts of a mixture, stored as one tensor of three dimensions, and
weights used by functions instead of modules are found as well as linear layers. A weight that is
computed from parameters (weight normalisation) cannot be rounded by itself: formats of weights are
refused for such a model, with the names of the parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lipscope._torch_internals import TorchDispatchMode, tree_leaves
from lipscope.probes.budget.formats import Quantiser
from lipscope.probes.budget.tracing import storage_of

Dims = tuple[int, ...]
T = TypeVar("T")

PRODUCTS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "mv": 0, "dot": 0} | {
    "addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1
}  # fmt: skip
"""Products, with the position of their first operand."""

COPIES = ("clone", "_to_copy", "contiguous")
FUSED = re.compile(
    r"(?!upsample).*(mm|mv|linear|conv|rnn|lstm|gru|cdist|multi_head|encoder_layer).*"
)
"""Names of other operations that contain a product; bilinear interpolation does not."""


FUSING = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter that multiplies the values of tokens.

    name:    that of the module for the weight of a linear layer or a convolution, else the
             parameter's own
    outputs: the dimensions that number outputs
    inputs:  the dimensions along which products add up; all others number matrices (experts)
    part:    the module, if `name` is its name
    layer:   the layer it belongs to
    """

    name: str
    parameter: Tensor
    outputs: Dims
    inputs: Dims
    part: nn.Module | None = None
    layer: int | None = None

    def error(self, quantise: Quantiser) -> Tensor:
        """What a format adds, in the shape of the parameter."""
        W = self.parameter.detach()
        rest = tuple(d for d in range(W.ndim) if d not in self.outputs + self.inputs)
        order = rest + self.outputs + self.inputs
        sizes = [math.prod(W.shape[d] for d in dims) for dims in (rest, self.outputs, self.inputs)]
        moved = W.permute(order)
        matrices = moved.reshape(sizes)
        rounded = torch.stack([quantise(matrix) for matrix in matrices])
        back = torch.tensor(order).argsort().tolist()
        return (rounded - matrices).reshape(moved.shape).permute(back)


@dataclass(eq=False)
class Uses:
    """How parameters are used in a run.

    dims:       outputs and inputs of those that are operands of products, by name
    unreadable: those that only enter products through something computed from them
    """

    dims: dict[str, tuple[Dims, Dims]] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _View:
    """Memory that holds entries of a parameter: (stride, size, dimension) of what is laid out."""

    name: str
    layout: tuple[tuple[int, int, int], ...]

    def dims(self, x: Tensor, d: int) -> Dims:
        """The dimensions of the parameter that dimension d of a tensor in this memory runs over."""
        known = {stride: (size, dim) for stride, size, dim in self.layout}
        found: list[int] = []
        stride = x.stride(d)
        covered = 1
        while covered < x.shape[d] and stride in known:
            size, dim = known[stride]
            found.insert(0, dim)
            covered = covered * size
            stride = stride * size
        return tuple(found)


class ProductTrace(TorchDispatchMode):
    """Note which parameters are operands of matrix products while a model runs."""

    def __init__(
        self, parameters: Mapping[str, Tensor], data: Sequence[Tensor], layers: set[str]
    ) -> None:
        super().__init__()
        self.uses = Uses()
        self._layers = layers
        # By memory: a parameter's, names of the parameters that it was computed from, or None for
        # values that depend on the tokens. Constants are not listed. Tensors are kept, so that
        # their memory is not given to others.
        self._known: dict[int, _View | frozenset[str] | None] = {storage_of(x): None for x in data}
        self._kept: list[Tensor] = []
        for name, x in parameters.items():
            layout = zip(x.stride(), x.shape, range(x.ndim), strict=True)
            self._known[storage_of(x)] = _View(name, tuple(e for e in layout if e[1] > 1))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self._kept += made
        self._see(func.overloadpacket.__name__, list(args), given, made)
        return result

    def _see(self, name: str, args: list[Any], given: list[Tensor], made: list[Tensor]) -> None:
        operands = list(_operands(name, args))
        for x, outputs, inputs in operands:
            self._use(x, outputs, inputs, [y for y, *_ in operands if y is not x])
        if not operands and FUSED.fullmatch(name):
            views = [self._of(x) for x in given if x.ndim > 1]
            self.uses.unreadable |= {v.name for v in views if isinstance(v, _View)}
        source = self._of(args[0]) if args and isinstance(args[0], Tensor) else None
        if isinstance(source, _View) and (dims := _kept_dims(name, args)) is not None:
            for x in made:
                self._known.setdefault(storage_of(x), _copied(source, args[0], dims, x))
            return
        kinds = [self._of(x) for x in given if storage_of(x) in self._known]
        # A linear layer turns a parameter (latents, relative positions) into values, as it does
        # with tokens. Any other product of parameters only (LoRA) may be a weight.
        factors = [self._of(x) for x, *_ in operands]
        layer = any(isinstance(f, _View) and f.name in self._layers for f in factors)
        if layer or name == "embedding" or None in kinds:
            state: frozenset[str] | None = None
        elif kinds:
            names = [{k.name} if isinstance(k, _View) else k for k in kinds if k is not None]
            state = frozenset().union(*names)
        else:
            return
        for x in made:
            old = self._known.get(storage_of(x), frozenset())
            if not isinstance(old, _View) and old is not None:
                self._known[storage_of(x)] = state if state is None else state | old

    def _of(self, x: Tensor) -> _View | frozenset[str] | None:
        return self._known.get(storage_of(x), frozenset())

    def _use(self, x: Tensor, outputs: Dims, inputs: Dims, others: list[Tensor]) -> None:
        found = self._of(x)
        if isinstance(found, _View):
            if any(isinstance(self._of(y), _View) for y in others):
                return  # a product of parameters only
            out, inner = (
                tuple(k for d in dims for k in found.dims(x, d)) for dims in (outputs, inputs)
            )
            self.uses.dims.setdefault(found.name, (out, inner))
        elif found and any(self._of(y) is None for y in others):
            self.uses.unreadable |= found


def _operands(name: str, args: list[Any]) -> Iterator[tuple[Tensor, Dims, Dims]]:
    """The operands of a product, each with the dimensions of its outputs and of its sum."""
    if name == "convolution":
        x = args[0]
        w = args[1]
        transposed = args[6]
        out = 1 if transposed else 0
        yield x, (), ()
        yield w, (out,), tuple(d for d in range(w.ndim) if d != out)
    elif name == "linear":
        yield args[0], (), (-1,)
        yield args[1], (0,), (1,)
    elif name in PRODUCTS:
        a, b = args[PRODUCTS[name] : PRODUCTS[name] + 2]
        yield a, (a.ndim - 2,) if a.ndim > 1 else (), (a.ndim - 1,)
        yield b, (b.ndim - 1,) if b.ndim > 1 else (), (max(b.ndim - 2, 0),)


def _kept_dims(name: str, args: list[Any]) -> list[int | None] | None:
    """Which dimension of its first argument each one of a copy is; None if it is no copy."""
    ndim = args[0].ndim
    if name in (*COPIES, "index_select"):
        return list(range(ndim))
    if name == "index":
        chosen = [d for d, i in enumerate(args[1]) if i is not None]
        if len(chosen) == 1:
            (at,) = chosen
            new: list[int | None] = [None] * args[1][at].ndim
            return [*range(at), *new, *range(at + 1, ndim)]
    return None


def _copied(source: _View, x: Tensor, dims: list[int | None], copy: Tensor) -> _View:
    """The memory of a copy of x, which lies in `source`."""
    layout: list[tuple[int, int, int]] = []
    for d, from_d in enumerate(dims):
        stride = copy.stride(d)
        for dim in reversed(() if from_d is None else source.dims(x, from_d)):
            size = next(size for _, size, known in source.layout if known == dim)
            layout.append((stride, min(size, copy.shape[d]), dim))
            stride *= size
    return _View(source.name, tuple(layout))


def find_uses(module: nn.Module, data: Sequence[Tensor], run: Callable[[], T]) -> tuple[Uses, T]:
    """How a module uses its parameters in a run, and what the run returns."""
    parameters = dict(module.named_parameters())
    named = module.named_modules(remove_duplicate=False)
    layers = {f"{name}.weight" for name, part in named if _dims_of(part) is not None}
    trace = ProductTrace(parameters, data, layers)
    # Without gradients, torch's own attention modules hand all their weights to one fused kernel.
    fused = [part for part in module.modules() if isinstance(part, FUSING)]
    for part in fused:
        part.requires_grad_(True)
    try:
        with torch.set_grad_enabled(bool(fused)), trace:
            result = run()
    finally:
        for part in fused:
            part.requires_grad_(False)
    return trace.uses, result


def find_weights(module: nn.Module, uses: Uses, embeddings: bool = False) -> list[Weight]:
    """The weights that a format rounds, each once; embeddings and tied heads only if asked."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    found: dict[int, Weight] = {}
    for name, part in module.named_modules():
        weight = dict(part.named_parameters(recurse=False)).get("weight")
        dims = _dims_of(part)
        if weight is not None and dims is not None and (embeddings or id(weight) not in tables):
            found.setdefault(id(weight), Weight(name, weight, *dims, part=part))
    for name, parameter in module.named_parameters():
        if name in uses.dims and id(parameter) not in tables:
            found.setdefault(id(parameter), Weight(name, parameter, *uses.dims[name]))
    return list(found.values())


def is_linear(part: nn.Module | None) -> bool:
    """Whether a module multiplies its input by a weight: a linear layer or transformers' Conv1D."""
    return isinstance(part, nn.Linear) or (
        type(part).__name__ == "Conv1D" and getattr(getattr(part, "weight", None), "ndim", 0) == 2
    )


def _dims_of(part: nn.Module) -> tuple[Dims, Dims] | None:
    """Outputs and inputs of the weight of a module whose kind says it."""
    if is_linear(part):
        return ((1,), (0,)) if type(part).__name__ == "Conv1D" else ((0,), (1,))
    if isinstance(part, nn.Embedding):
        return (0,), (1,)
    if isinstance(part, nn.modules.conv._ConvNd):
        rest = tuple(range(2, part.weight.ndim))
        return ((1,), (0, *rest)) if part.transposed else ((0,), (1, *rest))
    return None
