"""Watch layers while their model trains: the last tokens each one read, and its map."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lipscope._ambient import own_pass
from lipscope._torch_internals import reads_one_input
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import Map
from lipscope.models.capture import RecordedCall, watch_calls
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.wrapped import check_whole, evaluating, named_layers, unwrapped
from lipscope.train.recording import (
    Entry,
    entries,
    first_sample,
    real_tokens,
    to_be_kept,
    uncompiled,
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
        self._taps = {name: _Tap() for name in self.names}
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
        call = self._taps[name].call
        if isinstance(call, UserError):
            raise call
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
            tap.call = None

    def _shut(self) -> None:
        self._hooks.close()
        for tap in self._taps.values():
            tap.open = False


def _unhook(hooks: ExitStack, entries: Sequence[Entry]) -> None:
    hooks.close()
    for entry in entries:
        entry.release()


class _Tap:
    """A hook that, while open, keeps the last call of its module.

    A copied or pickled module gets a closed one. One tap serves all steps: with a new one per step,
    a compiled module would be compiled again.
    """

    def __init__(self) -> None:
        self.open = False
        self.call: RecordedCall | UserError | None = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # Without keyword arguments it is being added or removed while another thread runs.
        if kwargs is None or not to_be_kept() or not self.open:
            return
        try:
            with torch.no_grad():
                self.call = first_sample(module, args, kwargs)
        # A forward pass must not fail because it is watched: report the error when measuring.
        except Exception as error:
            self.call = UserError(str(error))

    def __reduce__(self) -> tuple[type[_Tap], tuple[()]]:
        return _Tap, ()


@dataclass(frozen=True, eq=False)
class Frozen:
    """x [n, d] -> the layer's output, in evaluation mode on detached weights and copied buffers."""

    module: nn.Module
    call: RecordedCall
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        lent = {name: _lend(t, self.dtype) for name, t in tensors}
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
        found = {name: m for name, m in known.items() if _is_attention(m)}
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


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, AttentionLayer | nn.MultiheadAttention)


def _read(module: nn.Module, call: RecordedCall) -> MeasuredMap:
    """The closed form if the layer has one, else the layer itself, for autograd."""
    X = call.args[0][0]
    dtype = wide(next((p.dtype for p in module.parameters()), X.dtype))
    X = X.to(dtype)
    if isinstance(module, nn.MultiheadAttention):
        padding, mask = (call.kwargs.get(name) for name in ("key_padding_mask", "attn_mask"))
        return attention_map(module, mask, None if padding is None else real_tokens(padding[0])), X
    f = _closed_form(module, X.shape[0])
    return (Frozen(module, call, dtype) if f is None else f.to(dtype)), X


def _closed_form(module: nn.Module, n: int) -> SelfAttention | None:
    """The map that the module states for n tokens; None if it has no closed form."""
    try:
        return module.as_map(n) if isinstance(module, AttentionLayer) else None
    except UserError:
        return None


def _lend(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach()
    return tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
