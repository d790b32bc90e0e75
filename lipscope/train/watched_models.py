"""The layers of a transformers model, watched while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipscope._ambient import entry_point, live_modules, ordinary_module
from lipscope._torch_internals import give
from lipscope._types import UserError
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.models.scopes import SCOPES
from lipscope.models.sites import Survey
from lipscope.nn.wrapped import attributes_kept, check_whole, evaluating, unwrapped
from lipscope.train.watched_modules import (
    GoneError,
    LastCall,
    MeasuredMap,
    WeakAttribute,
    entries,
    hook,
    listed,
    uncompiled,
    wide,
)

WATCHED = tuple(name for name, kind in SCOPES.items() if kind.per == "layer" and not kind.last)
INPUTS = ("input_ids", "inputs_embeds", "pixel_values")


@entry_point
def watch(
    model: nn.Module, layers: Sequence[int] | None = None, scope: str = "attention"
) -> ModelWatch:
    """Select the layers of a live transformers model that a SmoothnessMonitor measures.

    Args:
        model: A transformers model; it may be wrapped or compiled.
        layers: Layer numbers, from 0. Default: all layers with attention.
        scope: The map to measure at each layer: ``"attention"`` (all heads and the output
            projection), ``"normed"``, ``"residual"`` or ``"block"``; see docs/scopes.md.

    Returns:
        A watch to pass to :class:`SmoothnessMonitor` in place of the model.

    Raises:
        UserError: If the model is not a transformers model, or lacks the layers or the scope.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> from transformers import LlamaConfig, LlamaModel
        >>> _ = torch.manual_seed(0)
        >>> model = LlamaModel(LlamaConfig(
        ...     vocab_size=99, hidden_size=32, intermediate_size=48,
        ...     num_hidden_layers=2, num_attention_heads=4))
        >>> monitor = ls.SmoothnessMonitor(ls.watch(model), every=1)
        >>> _ = model(torch.arange(8)[None])
        >>> [(reading.layer, reading.tokens) for reading in monitor.step()]
        [('attention.0', 8), ('attention.1', 8)]
    """
    called = model
    model = unwrapped(model) if isinstance(model, nn.Module) else model
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"watch takes a transformers model, got {type(model).__name__}; "
            "pass any other module to SmoothnessMonitor directly"
        )
    check_whole(model)
    check_trainable(model)
    if scope not in WATCHED:
        raise UserError(
            f"there is no scope {scope!r} to watch; the scopes are {', '.join(WATCHED)}"
        )
    with uncompiled(model), live_modules:  # another thread may have lent it other weights
        loaded = load(model, dtype=wide(model.dtype))
        loaded.check_scopes([scope])
    chosen = numbered(layers, loaded)
    return ModelWatch(loaded, called, chosen, scope)


def numbered(layers: Sequence[int] | None, model: Model) -> tuple[int, ...]:
    """The requested layer numbers, checked; by default all layers with attention."""
    count = model.layers
    chosen = model.attending if layers is None else tuple(listed(layers))
    for i in chosen:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count:
            raise UserError(f"layer {i!r} does not exist: the model has layers 0 to {count - 1}")
        if chosen.count(i) > 1:
            raise UserError(f"layer {i} is listed {chosen.count(i)} times; list it once")
    model.check_layers(chosen, model.card.name)
    return chosen


class ModelWatch:
    """A Watch of a transformers model: records its input and reruns one sample when measuring.

    The second pass is in evaluation mode on lipscope's attention. Padding is removed; token types
    and positions passed by the caller are ignored.

    The model is not kept alive.

    model:  owned by its own trunk, to which it refers
    called: the model as the training calls it, including its wrappers
    """

    model = WeakAttribute()
    called = WeakAttribute()

    def __init__(self, model: Model, called: nn.Module, layers: tuple[int, ...], scope: str):
        self._start(model, called, layers, scope)

    def _start(
        self, model: Model | None, called: nn.Module | None, layers: tuple[int, ...], scope: str
    ) -> None:
        self.model = model
        self.called = called
        self.scope = scope
        self._layers = {f"{scope}.{i}": i for i in layers}
        self.names = tuple(self._layers)
        self._hooks = ExitStack()
        self._tap = LastCall(_first_inputs)
        self._survey: Survey | None = None
        self._kept = ExitStack()
        # A model outlives its watch, and must not go on recording for nobody.
        finalize(self, self._hooks.close)
        finalize(self, self._kept.close)
        if model is not None:
            finalize(self, give(model.trunk, model))

    def __getstate__(self) -> tuple[Any, ...]:
        return self.model, self.called, tuple(self._layers.values()), self.scope

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._start(*state)

    def arm(self) -> None:
        self.release()
        self._tap.open = True
        model = self.model
        called = self.called
        if model is None:
            return
        compiled = () if called is None else entries(called)
        around = [entry.part for entry in compiled if model.trunk in set(entry.part.modules())]
        self._hooks.callback(hook(around[0] if around else model.trunk, self._tap))

    def measured_map(self, name: str) -> MeasuredMap | None:
        self._hooks.close()  # the pass below is the measurement's own and must not be recorded
        model = self.model
        if model is None:
            raise GoneError
        trunk = model.trunk
        if self._survey is None:
            inputs = self._tap.take()
            if inputs is None:
                return None
            check_whole(trunk)
            self._kept.enter_context(attributes_kept(trunk))
            with uncompiled(trunk):
                self._survey = model.survey(**one_sample(inputs))
        with evaluating(trunk):  # in training mode, torch's spectral_norm updates its vectors
            site = self._survey.site(self.scope, self._layers[name])
        return site.f, site.X[0]

    def release(self) -> None:
        self._hooks.close()
        self._kept.close()
        self._survey = None
        self._tap.found = None


def _first_inputs(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The first sample of the model's inputs, by name."""
    given = {**dict(zip(INPUTS, args[:1], strict=False)), **kwargs}
    return {
        name: given[name][:1].detach().clone()
        for name in (*INPUTS, "attention_mask")
        if isinstance(given.get(name), Tensor)
    }


def one_sample(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """The sample without its padding, under the name of the model's argument."""
    given = {name: inputs[name] for name in INPUTS if name in inputs}
    if len(given) != 1:
        raise UserError(
            f"the model was called with {', '.join(given) or 'no tokens'}; "
            f"expected exactly one of {', '.join(INPUTS)}"
        )
    mask = inputs.get("attention_mask")
    if mask is None or "pixel_values" in given:
        return given
    if mask.ndim != 2:
        raise UserError(
            f"attention_mask has shape {tuple(mask.shape)}; "
            "a watched model needs a mask [samples, tokens]"
        )
    real = mask[0].to(torch.bool)
    if not real.any():
        raise UserError(
            "the first sample of the batch is padding only; put a sample with tokens first"
        )
    return {name: value[:, real] for name, value in given.items()}


def check_trainable(model: nn.Module) -> None:
    """Raise UserError for a model with weights that were created in inference mode."""
    if ordinary_module(model) is not model:
        raise UserError(
            f"the weights of this {type(model).__name__} were created under "
            "torch.inference_mode(), so it cannot be trained; build the model outside of it"
        )
