"""Replace attention in a live torch module, all layers or none, measured before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lipscope._display import html_table, text_table
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.estimate import Estimate, as_single
from lipscope.linalg.local import local_lipschitz
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.contractive import ATTENTIONS, CONTRACTIVE
from lipscope.nn.l2_attention import L2SelfAttention
from lipscope.nn.wrapped import evaluating
from lipscope.train.replacement import (
    TorchReplacement,
    constant_part,
    is_causal_mask,
    left_behind,
    make_layer,
)
from lipscope.train.watched_modules import ModuleWatch

SUPPORTED = (
    "nn.MultiheadAttention used as self-attention, lipscope's attention layers, and transformers "
    "models whose attention is plain (BERT, RoBERTa, DistilBERT, GPT-2, OPT, GPT-NeoX, Llama, "
    "Cohere, ViT and the like)"
)

T = TypeVar("T")
Progress = Callable[[float, float], None]

Run = Callable[[], Any]
"""One forward pass of the model on the sample."""


@dataclass(frozen=True)
class Target:
    """The new attention: a name in ATTENTIONS, a constant if contractive, fresh weights or old."""

    to: str
    constant: float | None = None
    fresh: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.to, str) or self.to not in ATTENTIONS:
            raise UserError(
                f"there is no attention {self.to!r} to convert to; "
                f"choose one of {', '.join(ATTENTIONS)}"
            )
        if self.constant is not None and self.to not in CONTRACTIVE:
            raise UserError(
                f"constant={self.constant!r} is for {' and '.join(CONTRACTIVE)} attention; "
                f"{self.to} attention does not take one"
            )


HEAD = ("layer", "from", "to", "sigma before", "sigma after", "bound", "left behind")
"""Columns of the table of a conversion."""


@dataclass(frozen=True, eq=False)
class ConvertedLayer:
    """One layer, at the tokens it reads in the old model and in the new one.

    before, after: ||D_X f||_2 with its certificate
    bound:         bound on the new layer over all inputs of this length; infinity if there is none
    left:          what the old layer had and the new one lacks
    """

    name: str
    old: str
    new: str
    before: Estimate
    after: Estimate
    bound: float
    left: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Conversion:
    """The model, converted in place, and the constants of each layer before and after."""

    model: nn.Module
    tokens: int
    layers: list[ConvertedLayer]

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                x.name,
                x.old,
                x.new,
                f"{x.before.value:.4g}",
                f"{x.after.value:.4g}",
                _shown_bound(x.bound),
                ", ".join(x.left),
            )
            for x in self.layers
        ]

    def __str__(self) -> str:
        return f"local constants at {self.tokens} tokens\n{text_table([HEAD, *self._rows()])}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = html_table(HEAD, self._rows())
        return f"<div><p>local constants at {self.tokens} tokens</p>{table}</div>"


@dataclass(frozen=True, eq=False)
class Slot:
    """A layer to be replaced: the old map with its constant, and the modules to exchange."""

    name: str
    old: nn.Module
    f: SelfAttention
    before: Estimate
    layer: AttentionLayer
    changes: tuple[tuple[nn.Module, nn.Module], ...]


def convert_module(
    model: nn.Module,
    target: Target,
    inputs: Any,
    layers: Sequence[str | nn.Module] | None,
    progress: Progress | None,
) -> Conversion:
    """Replace nn.MultiheadAttention and lipscope's own layers; the model is run on `inputs`."""
    _check_call(model, inputs, layers)
    watch = ModuleWatch(model, layers)
    with _watching(watch, model, lambda: _first_run(model, inputs)):
        slots = [_slot(watch, name, target) for name in reported(watch.names, progress, half=0)]
    return exchange(model, slots, lambda: call(model, inputs), progress)


def _check_call(model: nn.Module, inputs: Any, layers: Sequence[str | nn.Module] | None) -> None:
    if layers is None and not any(
        isinstance(m, AttentionLayer | nn.MultiheadAttention) for m in model.modules()
    ):
        raise UserError(
            f"{type(model).__name__} has no attention that can be converted; "
            f"supported are {SUPPORTED}"
        )
    if not isinstance(inputs, Tensor | tuple | Mapping):
        raise UserError(
            f"inputs must be a tensor, a tuple of the model's arguments or a dictionary of them, "
            f"got {type(inputs).__name__}; if the model takes such an object, pass (inputs,)"
        )


def _first_run(model: nn.Module, inputs: Any) -> None:
    """Run the unchanged model: an error here is due to the inputs."""
    try:
        call(model, inputs)
    except UserError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"{type(model).__name__} does not run on the inputs ({why}); "
            "give a sample it can be called with"
        ) from error


def reported(items: Sequence[T], progress: Progress | None, half: int) -> Iterator[T]:
    """The items of one half of the work, 0 before the exchange and 1 after it, with progress."""
    for i, item in enumerate(items):
        if progress is not None:
            progress(half + i / len(items), 2)
        yield item


def exchange(
    model: nn.Module, slots: Sequence[Slot], run: Run, progress: Progress | None
) -> Conversion:
    """Install every replacement, run the model and measure; if anything fails, undo it all."""
    changes = [change for slot in slots for change in slot.changes]
    places = [(parent, name, new) for old, new in changes for parent, name in _places(model, old)]
    before = [(parent, name, parent._modules[name]) for parent, name, _ in places]
    nesting = _nesting(model)
    try:
        for slot in slots:
            trained = any(p.requires_grad for old, _ in slot.changes for p in old.parameters())
            for _, new in slot.changes:
                new.requires_grad_(trained)
        for parent, name, new in places:
            new.train(parent.training)
            parent._modules[name] = new
        for encoder, _ in nesting:
            # torch's fast path reads the weights of nn.MultiheadAttention, which are gone.
            encoder.use_nested_tensor = False
        watch = ModuleWatch(model, [slot.layer for slot in slots])
        with _watching(watch, model, run):
            after = [_measured(watch, name) for name in reported(watch.names, progress, half=1)]
    except BaseException:
        for parent, name, old in before:
            parent._modules[name] = old
        for encoder, flag in nesting:
            encoder.use_nested_tensor = flag
        raise
    rows = [_row(slot, *found) for slot, found in zip(slots, after, strict=True)]
    return Conversion(model, after[0][0], rows)


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on its inputs, positional or by keyword."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def check_two_tokens(n: int) -> None:
    """Raise UserError for a single token: it cannot tell causal attention from any other."""
    if n < 2:
        raise UserError(
            f"the first sample has {n} token{'s' * (n != 1)} without padding; "
            "give a sample of at least two"
        )


def measure_map(f: Any, X: Tensor) -> Estimate:
    """The constant in float64, with both bounds."""
    return as_single(local_lipschitz(f, X, precision="exact"))


def _slot(watch: ModuleWatch, name: str, target: Target) -> Slot:
    module = watch.module(name)
    if not isinstance(module, AttentionLayer | nn.MultiheadAttention):
        raise UserError(
            f"{name} is a {type(module).__name__}, which cannot be converted; "
            f"supported are {SUPPORTED}"
        )
    try:
        found = watch.measured_map(name)
        if found is None:
            raise UserError(
                "it did not run on the sample; select the layers that do with layers=[...]"
            )
        g, X = found
        f = g if isinstance(g, SelfAttention) else _weights_alone(module, X.shape[0])
        f, X = _plain(f, X)
        check_two_tokens(X.shape[0])
        before = measure_map(f if isinstance(g, SelfAttention) else g, X)
        layer = make_layer(f.to(_dtype(module)), target.to, target.constant, target.fresh)
    except UserError as error:
        raise UserError(f"{name} ({type(module).__name__}) cannot be converted: {error}") from error
    new: nn.Module = layer
    if isinstance(module, nn.MultiheadAttention):
        bias = None if target.fresh else constant_part(f, module.out_proj.bias)
        bias = None if bias is None else bias.detach().to(_dtype(module), copy=True)
        new = TorchReplacement(layer, bias, module.batch_first)
    return Slot(name=name, old=module, f=f, before=before, layer=layer, changes=((module, new),))


def _plain(f: SelfAttention, X: Tensor) -> tuple[SelfAttention, Tensor]:
    """f with its mask expressed by `causal`, and X without padding."""
    if f.mask is not None:
        hidden = ~f.mask if f.mask.dtype == torch.bool else f.mask
        f = replace(f, mask=None, causal=is_causal_mask(hidden, X.shape[0]))
    if f.padding is not None:
        f, X = replace(f, padding=None), X[f.padding]
    return f, X


def _weights_alone(module: nn.Module, n: int) -> SelfAttention:
    """The projections of a layer that has no closed form (cosine attention, QK-norm, a ball)."""
    assert isinstance(module, AttentionLayer)
    if isinstance(module, L2SelfAttention):
        return module.unprojected(n)
    Q, K, V, O = (
        module.get_parameter(f"{name}.weight").detach() for name in ("query", "key", "value", "out")
    )
    return SelfAttention(Q, K, V, O, heads=module.heads, causal=module.causal)


def _measured(watch: ModuleWatch, name: str) -> tuple[int, Estimate]:
    found = watch.measured_map(name)
    assert found is not None, f"{name} did not run after the conversion"
    return found[1].shape[0], measure_map(*found)


def _row(slot: Slot, n: int, after: Estimate) -> ConvertedLayer:
    return ConvertedLayer(
        name=slot.name,
        old=type(slot.old).__name__,
        new=type(slot.layer).__name__,
        before=slot.before,
        after=after,
        bound=slot.layer.lipschitz_bound(n),
        left=left_behind(slot.f, slot.layer),
    )


@contextmanager
def _watching(watch: ModuleWatch, model: nn.Module, run: Run) -> Iterator[None]:
    """One pass in evaluation mode, recorded by the watch, without nested tensors."""
    nesting = _nesting(model)
    watch.arm()
    try:
        for encoder, _ in nesting:
            encoder.use_nested_tensor = False
        with torch.no_grad(), evaluating(model):
            run()
        yield
    finally:
        watch.release()
        for encoder, flag in nesting:
            encoder.use_nested_tensor = flag


def _nesting(model: nn.Module) -> list[tuple[nn.TransformerEncoder, bool]]:
    """torch's encoders, each with its setting for packing padded batches into nested tensors."""
    return [
        (m, m.use_nested_tensor) for m in model.modules() if isinstance(m, nn.TransformerEncoder)
    ]


def _places(model: nn.Module, old: nn.Module) -> list[tuple[nn.Module, str]]:
    """All places of the module; it may have several parents."""
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is old
    ]
    if not found:
        raise UserError(
            f"the model itself is a {type(old).__name__} and cannot be replaced in place; "
            "create a layer of lipscope.nn instead, or pass the model around it"
        )
    return found


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def _shown_bound(x: float) -> str:
    return "none" if x == float("inf") else f"{x:.4g}"
