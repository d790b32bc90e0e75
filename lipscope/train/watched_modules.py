"""Watch layers while their model trains: the last tokens each one read, and its map.

A part that torch.compile compiled is recorded at its input and rerun without the compiler. Hooks
inside would be traced into the graph and change it, or be ignored by a graph that was compiled
before they were registered.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lipscope._ambient import in_own_pass, own_pass
from lipscope._torch_internals import (
    compiled_call,
    in_backward,
    reads_one_input,
    set_compiled_call,
    tree_map,
    unless_gone,
)
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import Map
from lipscope.models.capture import RecordedCall, watch_calls
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.wrapped import (
    check_whole,
    evaluating,
    is_compiled_copy,
    named_layers,
    unwrapped,
)

MeasuredMap = tuple[Map, Tensor]
"""A map and the tokens [n, d] to measure it at."""


@runtime_checkable
class Watch(Protocol):
    """Layers by name; between `arm` and `release`, the last call of each layer is recorded."""

    @property
    def names(self) -> Sequence[str]: ...

    def arm(self) -> None: ...

    def measured_map(self, name: str) -> MeasuredMap | None:
        """The layer as a map at the current weights, and the tokens it read.

        None if the layer has not run since `arm`. After the first call nothing more is recorded,
        because what runs then is the measurement itself.
        """
        ...

    def release(self) -> None: ...


class GoneError(UserError):
    """A watched layer no longer exists: a watch does not keep its model alive."""

    def __init__(self) -> None:
        super().__init__(
            "the model was deleted, or layers of it were replaced; "
            "create a new monitor for the new model"
        )


class WeakAttribute:
    """An attribute that does not keep its object alive; None once the object is gone."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        reference = vars(instance)[self._name]
        return None if reference is None else reference()

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = None if value is None else ref(value)


class LastCall:
    """A hook that, while open, keeps what `read` makes of the last call of its module.

    Only calls of the training's own forward pass count: not those that a compiler traces, since
    watching must not change the graph, nor those of a backward pass, where gradient checkpointing
    reruns layers in another order, nor those of a measurement.

    A copied or pickled module gets a closed one. One hook serves all steps: with a new one per
    step, a compiled module would be compiled again.
    """

    def __init__(self, read: Callable[[nn.Module, Any, Any], Any]) -> None:
        self.read = read
        self.open = False
        self.found: Any = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # Without keyword arguments it is being added or removed while another thread runs.
        if kwargs is None or torch.compiler.is_compiling() or in_backward() or in_own_pass():
            return
        if not self.open:
            return
        try:
            with torch.no_grad():
                self.found = self.read(module, args, kwargs)
        # A forward pass must not fail because it is watched: report the error when measuring.
        except Exception as error:
            self.found = UserError(str(error))

    def take(self) -> Any:
        """What was kept, or None; an error of keeping it is raised."""
        if isinstance(self.found, UserError):
            raise self.found
        return self.found

    def __reduce__(self) -> tuple[type[LastCall], tuple[Any]]:
        return LastCall, (self.read,)


class ModuleWatch:
    """The layers of any module, by forward pre-hooks that exist only while armed.

    One sample of each batch is kept. The model is not kept alive.

    called: the model as the training calls it; layers in a compiled part of it are recorded when
            that part is rerun without the compiler
    """

    called = WeakAttribute()

    def __init__(self, model: nn.Module, layers: Sequence[str | nn.Module] | None = None):
        self._start(model, _chosen(model, layers))

    def _start(self, called: nn.Module | None, modules: Mapping[str, nn.Module | None]) -> None:
        self.called = called
        self._modules = WeakValueDictionary(
            {name: module for name, module in modules.items() if module is not None}
        )
        self.names = tuple(modules)
        self._taps = {name: LastCall(first_sample) for name in self.names}
        self._hooks = ExitStack()
        self._entries: list[Entry] = []
        # A model outlives its watch, and must not go on recording for nobody.
        finalize(self, _unhook, self._hooks, self._entries)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.called, {name: self._modules.get(name) for name in self.names}

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._start(*state)

    def arm(self) -> None:
        self.release()
        wanted = set(self._modules.values())
        compiled = () if self.called is None else entries(self.called)
        self._entries[:] = [entry for entry in compiled if wanted & set(entry.part.modules())]
        for entry in self._entries:
            entry.arm()
        inside = {module for entry in self._entries for module in entry.part.modules()}
        self._hook(wanted - inside)

    def _hook(self, modules: set[nn.Module]) -> None:
        for name in self.names:
            module = self._modules.get(name)
            if module in modules:
                self._taps[name].open = True
                self._hooks.callback(watch_calls(module, self._taps[name]))

    def measured_map(self, name: str) -> MeasuredMap | None:
        self._shut()  # a layer that is run for its measurement may contain other watched layers
        module = self.module(name)
        check_whole(module)
        for entry in self._entries:
            if module in set(entry.part.modules()):
                self._hook(set(entry.part.modules()))
                entry.rerun()
                self._shut()
        call = self._taps[name].take()
        if call is None:
            return None
        # In training mode, torch's spectral_norm changes every time the weight is read.
        with evaluating(module):
            return _read(module, call)

    def module(self, name: str) -> nn.Module:
        """The layer of this name; raises GoneError if it no longer exists."""
        module = self._modules.get(name)
        if module is None:
            raise GoneError
        return module

    def release(self) -> None:
        self._shut()
        for entry in self._entries:
            entry.release()
        for tap in self._taps.values():
            tap.found = None

    def _shut(self) -> None:
        self._hooks.close()
        for tap in self._taps.values():
            tap.open = False


def _unhook(hooks: ExitStack, entries: Sequence[Entry]) -> None:
    hooks.close()
    for entry in entries:
        entry.release()


@dataclass(frozen=True, eq=False)
class Frozen:
    """x [n, d] -> the layer's output, in evaluation mode on detached weights and copied buffers."""

    module: nn.Module
    call: RecordedCall
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        lent = {
            name: t.detach().to(self.dtype, copy=True)
            if t.is_floating_point()
            else t.detach().clone()
            for name, t in tensors
        }
        args = tuple(x[None] if i == 0 else self._cast(arg) for i, arg in enumerate(self.call.args))
        kwargs = {key: self._cast(value) for key, value in self.call.kwargs.items()}
        with evaluating(self.module), uncompiled(self.module), own_pass():
            output = functional_call(self.module, lent, args, kwargs)
        y = output[0] if isinstance(output, tuple | list) else output
        return y[0]

    def double(self) -> Frozen:
        return replace(self, dtype=torch.float64)

    def _cast(self, value: Any) -> Any:
        return (
            value.to(self.dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
        )


def attention_map(
    module: nn.MultiheadAttention, mask: Tensor | None, padding: Tensor | None
) -> SelfAttention:
    """torch's attention in the papers' convention, at the current weights, in float32 or finer.

    `mask` is additive or boolean in torch's sense (True = hidden); `padding` [n] is boolean in
    lipscope's sense (True = a real token).
    """
    if not reads_one_input(module) or module.bias_k is not None or module.add_zero_attn:
        raise UserError(
            "this nn.MultiheadAttention uses kdim, vdim, bias_k or add_zero_attn: "
            "it is not a map of a single input and cannot be measured"
        )
    dtype = wide(module.out_proj.weight.dtype)
    Q, K, V = module.in_proj_weight.detach().to(dtype).chunk(3)
    biases = None
    if module.in_proj_bias is not None:
        bq, bk, bv = module.in_proj_bias.detach().to(dtype).chunk(3)
        biases = (bq, bk, bv)
    if mask is not None:
        mask = ~mask if mask.dtype == torch.bool else mask.to(dtype)
    O = module.out_proj.weight.detach().to(dtype)
    return SelfAttention(
        Q, K, V, O, heads=module.num_heads, biases=biases, mask=mask, padding=padding
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to measure in: in bfloat16, singular values would be those of the rounding."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chosen(model: nn.Module, layers: Sequence[str | nn.Module] | None) -> dict[str, nn.Module]:
    """The requested layers (names, patterns or modules) by name; by default all attention."""
    known = named_layers(model)
    model = unwrapped(model)
    if layers is None:
        attention = AttentionLayer | nn.MultiheadAttention
        found: dict[str, nn.Module]
        found = {name: m for name, m in known.items() if isinstance(m, attention)}
        if not found:
            raise UserError(
                f"{type(model).__name__} has no attention that is recognised automatically "
                "(lipscope's modules and nn.MultiheadAttention are); name its layers, e.g. "
                "layers=['blocks.*'], or, for a transformers model, use "
                "SmoothnessMonitor(lipscope.watch(model))"
            )
        return {name or type(model).__name__: m for name, m in found.items()}
    chosen: dict[str, nn.Module] = {}
    for layer in listed(layers):
        if not isinstance(layer, str | nn.Module):
            raise UserError(
                f"layers of {type(model).__name__} must be names or modules, got {layer!r}; "
                "numbers are for transformers models, with lipscope.watch and "
                "lipscope.convert_model"
            )
        if isinstance(layer, str):
            found = {
                name: m for name, m in known.items() if name == layer or fnmatchcase(name, layer)
            }
        else:
            found = {name: m for name, m in known.items() if m is unwrapped(layer)}
        if not found:
            close = difflib.get_close_matches(layer, known) if isinstance(layer, str) else []
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            asked = repr(layer) if isinstance(layer, str) else f"this {type(layer).__name__}"
            raise UserError(f"{type(model).__name__} has no layer {asked}{hint}")
        chosen |= {name or type(model).__name__: m for name, m in found.items()}
    return chosen


def listed(layers: Iterable[Any]) -> list[Any]:
    """The requested layers as a list of at least one."""
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        given = f"[{layers!r}]" if isinstance(layers, str | int) else "[...]"
        raise UserError(
            f"layers must be a list of layers, as in layers={given}, got {type(layers).__name__}"
        )
    chosen = list(layers)
    if not chosen:
        raise UserError("layers is empty; name at least one, or omit it for all attention")
    return chosen


def _read(module: nn.Module, call: RecordedCall) -> MeasuredMap:
    """The closed form if the layer has one, else the layer itself, for autograd."""
    X = call.args[0][0]
    dtype = wide(next((p.dtype for p in module.parameters()), X.dtype))
    X = X.to(dtype)
    if isinstance(module, nn.MultiheadAttention):
        padding, mask = (call.kwargs.get(name) for name in ("key_padding_mask", "attn_mask"))
        return attention_map(module, mask, None if padding is None else real_tokens(padding[0])), X
    if isinstance(module, AttentionLayer):
        try:
            return module.as_map(X.shape[0]).to(dtype), X
        except UserError:  # it has no closed form
            pass
    return Frozen(module, call, dtype), X


def first_sample(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall:
    """The call for the first sample of the batch."""
    if isinstance(module, nn.MultiheadAttention):
        return _first_of_torch(module, args, kwargs)
    if isinstance(module, AttentionLayer):
        return _first_of_ours(**dict(zip(("X", "padding"), args, strict=False)), **kwargs)
    if not args or not isinstance(args[0], Tensor) or args[0].ndim not in (2, 3):
        raise UserError(
            f"{type(module).__name__} is not called with tokens [B, n, d] or [n, d] as its first "
            "argument, so it cannot be measured"
        )
    X, *others = args
    X = X if X.ndim == 3 else X[None]
    B, n = X.shape[:2]

    def sample(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # Guessing wrong would measure the layer at arguments it never saw.
        if n == B > 1 and value.shape[:1] == (B,):
            raise UserError(
                f"{type(module).__name__} reads a tensor of shape {tuple(value.shape)} in addition "
                f"to its {B} samples of {n} tokens: it could have one row per sample or one per "
                "token; use another batch size"
            )
        return _kept(value[:1] if B > 1 and value.shape[:1] == (B,) else value)

    rest = tuple(sample(value) for value in others)
    return RecordedCall(
        (_kept(X[:1]), *rest), {key: sample(value) for key, value in kwargs.items()}
    )


def _first_of_ours(X: Tensor, padding: Tensor | None = None) -> RecordedCall:
    """The same for lipscope's attention: its real tokens, since padding is not part of the map."""
    X, padding = (X[0], None if padding is None else padding[0]) if X.ndim == 3 else (X, padding)
    if padding is not None and not padding.any():
        raise UserError(
            "the first sample of the batch is padding only; put a sample with tokens first"
        )
    return RecordedCall((_kept(X if padding is None else X[padding])[None],), {})


def _first_of_torch(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RecordedCall:
    """The same for nn.MultiheadAttention, whose arguments are known by name."""
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query = given["query"]
    if query.is_nested:
        raise UserError(
            "nn.MultiheadAttention is called with nested tensors, which cannot be measured; "
            "set use_nested_tensor to False in the encoder"
        )
    if given["key"] is not query or given["value"] is not query:
        raise UserError(
            "nn.MultiheadAttention is called with a key or value other than its query: "
            "it is not self-attention and cannot be measured"
        )
    batched = query.ndim == 3
    if batched and not module.batch_first:
        query = query.transpose(0, 1)
    padding = given.get("key_padding_mask")
    mask = given.get("attn_mask")
    if mask is not None and mask.ndim == 3:
        if not (mask[: module.num_heads] == mask[0]).all():
            raise UserError("attn_mask differs from head to head; use one mask for all heads")
        mask = mask[0]
    padding = None if padding is None else _kept(padding[:1] if batched else padding[None])
    mask = None if mask is None else _kept(mask)
    return RecordedCall(
        (_kept(query[:1] if batched else query[None]),),
        {"key_padding_mask": padding, "attn_mask": mask},
    )


def real_tokens(padding: Tensor) -> Tensor:
    """Which tokens are real, from torch's key_padding_mask (True or -inf for padding)."""
    if padding.dtype == torch.bool:
        return ~padding
    if not ((padding == 0) | (padding == -torch.inf)).all():
        raise UserError(
            "key_padding_mask must be boolean or contain only 0 and -inf, got other numbers"
        )
    return padding == 0


def _kept(x: Tensor) -> Tensor:
    return x.detach().clone()


class Entry:
    """The outermost compiled part around some layers.

    It is either a module returned by torch.compile or one that was compiled in place.
    """

    def __init__(self, part: nn.Module) -> None:
        self._part = ref(part)
        # The whole batch, since it is not known here which arguments have a row per sample.
        self._last = LastCall(_whole_call)
        self._hooks = ExitStack()

    @property
    def part(self) -> nn.Module:
        """The compiled module; an empty one if it no longer exists."""
        part = self._part()
        return nn.Module() if part is None else part

    def arm(self) -> None:
        """Start recording calls."""
        self._last.open = True
        self._hooks.callback(hook(self.part, self._last))

    def release(self) -> None:
        """Stop recording and forget the recorded call."""
        self._hooks.close()
        self._last.found = None

    def rerun(self) -> None:
        """Repeat the last call, if any, in evaluation mode on copies of the buffers."""
        call = self._last.take()
        if call is None:
            return
        self.release()  # the pass below is not the training's
        original = unwrapped(self.part)
        buffers = {name: b.clone() for name, b in original.named_buffers()}
        with torch.no_grad(), evaluating(original), uncompiled(self.part):
            functional_call(original, buffers, *call)


def _whole_call(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The arguments, cloned, since the model may modify its inputs in place."""
    return tree_map(lambda x: _kept(x) if isinstance(x, Tensor) else x, (args, kwargs))


def entries(model: nn.Module) -> Iterator[Entry]:
    """The compiled parts of a model that are not inside another one."""
    if is_compiled_copy(model) or compiled_call(model) is not None:
        yield Entry(model)
        return
    for child in model.children():
        yield from entries(child)


def hook(part: nn.Module, tap: LastCall) -> Callable[[], None]:
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
        self.taps: list[LastCall] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for tap in tuple(self.taps):
            tap(self.part, args, kwargs)
        return self.inner(*args, **kwargs)


def uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Run the compiled parts of the module eagerly."""
    return torch.compiler.set_stance("force_eager") if any(entries(module)) else nullcontext()
