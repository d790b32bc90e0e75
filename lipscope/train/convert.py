"""Replace the attention of a live module or transformers model, measured before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipscope._ambient import entry_point
from lipscope._display import html_table, text_table, with_bar
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.estimate import Estimate, as_single
from lipscope.linalg.local import local_lipschitz
from lipscope.models.attention import configs
from lipscope.models.closed_form import same
from lipscope.models.loading import load
from lipscope.models.maps import Rerun
from lipscope.models.model_files import on_one_line
from lipscope.models.sites import Survey
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.contractive import ATTENTIONS, CONTRACTIVE
from lipscope.nn.l2_attention import L2SelfAttention
from lipscope.nn.wrapped import check_bare, evaluating
from lipscope.train.converted_attention import (
    ConvertedTorchAttention,
    ConvertedTransformersAttention,
    constant_part,
    is_causal_mask,
    left_behind,
    make_layer,
)
from lipscope.train.watched_models import INPUTS, numbered, one_sample
from lipscope.train.watched_modules import ModuleWatch, listed

SUPPORTED = (
    "nn.MultiheadAttention used as self-attention, lipscope's attention layers, and transformers "
    "models whose attention is plain (BERT, RoBERTa, DistilBERT, GPT-2, OPT, GPT-NeoX, Llama, "
    "Cohere, ViT and the like)"
)

T = TypeVar("T")
Progress = Callable[[float, float], None]


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
                "none" if x.bound == float("inf") else f"{x.bound:.4g}",
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
class Replacement:
    """A layer to be replaced: the old map with its constant, and the modules to exchange."""

    name: str
    old: nn.Module
    f: SelfAttention
    before: Estimate
    layer: AttentionLayer
    changes: tuple[tuple[nn.Module, nn.Module], ...]


@entry_point
@with_bar("converting")
def convert_model(
    model: nn.Module,
    to: str,
    inputs: Any,
    *,
    layers: Sequence[Any] | None = None,
    constant: float | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Replace the attention of a live model, in place.

    All requested layers are replaced, or none if one of them cannot be. What is carried over to the
    new layers and what is not is described in docs/converting.md.

    Args:
        model: A torch module or a transformers model.
        to: The new attention, one of ``lipscope.nn.ATTENTIONS``: ``"dot"``, ``"l2"``, ``"ball"``,
            ``"contractive"``, ``"contractive-ball"`` or ``"cosine"``.
        inputs: A sample to run the model on; every layer is measured at the tokens it reads, before
            and after. A tensor (of token ids, for a transformers model), a tuple of arguments, or a
            dictionary of them (such as a tokenizer's output).
        layers: Layer numbers for a transformers model; names, name patterns or modules for any
            other. Default: all attention.
        constant: The Lipschitz constant of contractive layers.
        fresh: Whether to draw random weights from torch's generator instead of carrying over the
            old ones.
        progress: Called with the work done and the total work. Default: a bar in notebooks,
            nothing elsewhere.

    Returns:
        A :class:`Conversion` with both constants of every layer; print it to see the table.

    Raises:
        UserError: If a layer cannot be converted; the model is then unchanged.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        >>> conversion = ls.convert_model(model, "l2", torch.randn(1, 6, 16))
        >>> [(layer.name, layer.old, layer.new) for layer in conversion.layers]
        [('self_attn', 'MultiheadAttention', 'L2SelfAttention')]
        >>> conversion.layers[0].after.value <= conversion.layers[0].bound
        True
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            f"convert_model takes a torch module, got {type(model).__name__}; "
            "for a loaded model, pass lipscope.load(...).trunk"
        )
    check_bare(model)
    target = Target(to, constant, fresh)
    layers = None if layers is None else listed(layers)
    # A transformers model that was converted before no longer calls the attention function: its
    # lipscope layers are found by name, like those of any torch module.
    own = [name for name, m in model.named_modules() if isinstance(m, AttentionLayer)]
    if not isinstance(model, PreTrainedModel) or own:
        if isinstance(model, PreTrainedModel) and any(
            isinstance(layer, int) for layer in layers or ()
        ):
            raise UserError(
                f"{type(model).__name__} already contains lipscope's attention, which is selected "
                f"by name, as in layers=[{own[0]!r}]; to convert more of its old attention, "
                "start from the original model"
            )
        replacements = _in_module(model, target, inputs, layers, progress)
        return _exchange(model, replacements, lambda: _call(model, inputs), progress)
    sample = _first_sample(inputs, model.device)
    loaded = load(model)
    if not loaded.preflight.routed:
        raise UserError(
            f"{loaded.preflight.reason}, so it cannot be converted; supported are {SUPPORTED}"
        )
    chosen = numbered(layers, loaded.layers)
    survey = loaded.survey(inputs=sample)
    if "pixel_values" not in sample:
        _check_two_tokens(next(iter(sample.values())).shape[1])
    replacements = [_in_model(survey, i, target) for i in _reported(chosen, progress, half=0)]
    with _without_cache(model):
        return _exchange(model, replacements, lambda: model(**sample), progress)


def _in_module(
    model: nn.Module,
    target: Target,
    inputs: Any,
    layers: Sequence[str | nn.Module] | None,
    progress: Progress | None,
) -> list[Replacement]:
    """Replacements of nn.MultiheadAttention and lipscope's layers, at the tokens of one run."""
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

    def first_run() -> None:
        try:
            _call(model, inputs)
        except UserError:
            raise
        except Exception as error:  # the model is unchanged: an error is due to the inputs
            why = " ".join(str(error).split())
            raise UserError(
                f"{type(model).__name__} does not run on the inputs ({why}); "
                "give a sample it can be called with"
            ) from error

    watch = ModuleWatch(model, layers)
    with _watching(watch, model, first_run):
        return [
            _of_module(watch, name, target) for name in _reported(watch.names, progress, half=0)
        ]


def _of_module(watch: ModuleWatch, name: str, target: Target) -> Replacement:
    module = watch.module(name)
    if not isinstance(module, AttentionLayer | nn.MultiheadAttention):
        raise UserError(
            f"{name} is a {type(module).__name__}, which cannot be converted; "
            f"supported are {SUPPORTED}"
        )
    dtype = next(module.parameters()).dtype
    try:
        found = watch.measured_map(name)
        if found is None:
            raise UserError(
                "it did not run on the sample; select the layers that do with layers=[...]"
            )
        g, X = found
        f = g if isinstance(g, SelfAttention) else _weights_alone(module, X.shape[0])
        if f.mask is not None:
            hidden = ~f.mask if f.mask.dtype == torch.bool else f.mask
            f = replace(f, mask=None, causal=is_causal_mask(hidden, X.shape[0]))
        if f.padding is not None:
            X = X[f.padding]
            f = replace(f, padding=None)
        _check_two_tokens(X.shape[0])
        before = _measure_map(f if isinstance(g, SelfAttention) else g, X)
        layer = make_layer(f.to(dtype), target.to, target.constant, target.fresh)
    except UserError as error:
        raise UserError(f"{name} ({type(module).__name__}) cannot be converted: {error}") from error
    new: nn.Module = layer
    if isinstance(module, nn.MultiheadAttention):
        bias = None if target.fresh else constant_part(f, module.out_proj.bias)
        bias = None if bias is None else bias.detach().to(dtype, copy=True)
        new = ConvertedTorchAttention(layer, bias, module.batch_first)
    return Replacement(
        name=name, old=module, f=f, before=before, layer=layer, changes=((module, new),)
    )


def _weights_alone(module: nn.Module, n: int) -> SelfAttention:
    """The projections of a layer that has no closed form (cosine attention, QK-norm, a ball)."""
    assert isinstance(module, AttentionLayer)
    if isinstance(module, L2SelfAttention):
        return module.unprojected(n)
    Q, K, V, O = (
        module.get_parameter(f"{name}.weight").detach() for name in ("query", "key", "value", "out")
    )
    return SelfAttention(Q, K, V, O, heads=module.heads, causal=module.causal)


def _first_sample(inputs: Any, device: torch.device) -> dict[str, Tensor]:
    """The first sample of the inputs without padding, on the model's device."""
    if isinstance(inputs, tuple) and len(inputs) == 1:
        inputs = inputs[0]
    given = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    names = [name for name in (*INPUTS, "attention_mask") if given.get(name) is not None]
    try:
        tensors = {name: torch.as_tensor(given[name], device=device) for name in names}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            "inputs must be token ids [samples, tokens] or a dictionary of the model's arguments "
            f"({on_one_line(error)}); encode a text with tokenizer(text, return_tensors='pt')"
        ) from error
    return one_sample({name: x[:1] if x.ndim > 1 else x[None] for name, x in tensors.items()})


def _in_model(survey: Survey, i: int, target: Target) -> Replacement:
    parts = survey.layers[i]
    core = parts.core
    projection = parts.projection
    what = f"layer {i} ({type(core or parts.block).__name__})"
    try:
        site = survey.site("attention", i)
        f = site.f
        if not isinstance(f, SelfAttention):
            raise UserError("it is not plain self-attention")
        assert core is not None and projection is not None and f.O is not None
        f = _unmasked(f)
        if sum(layer.core is core for layer in survey.layers) > 1:
            raise UserError("it serves several layers")
        inside = projection in set(core.modules())
        call = survey.cores[i]
        assert call is not None
        # The module's own output must be attention and nothing else, or the replacement would lose
        # what it does on top.
        own = Rerun(survey.runner, core, call)(site.X)
        expected = site.value() if inside else replace(f, O=None)(site.X)
        if own.shape != expected.shape or not same(own, expected):
            raise UserError("it does more than attend (a gate, a norm or a residual inside)")
        dtype = next(core.parameters()).dtype
        layer = make_layer(f.to(dtype), target.to, target.constant, target.fresh)
    except UserError as error:
        raise UserError(
            f"{what} cannot be converted: {error}; supported are {SUPPORTED}"
        ) from error
    bias = None if target.fresh else constant_part(f, site.offset)
    bias = None if bias is None or not bias.any() else bias.detach().to(dtype)
    new = ConvertedTransformersAttention(layer, bias, tuple(signature(core.forward).parameters))
    changes: tuple[tuple[nn.Module, nn.Module], ...] = ((core, new),)
    if not inside:  # the new layer has its own output projection
        changes += ((projection, nn.Identity()),)
    return Replacement(
        name=str(i),
        old=core,
        f=f,
        before=_measure_map(f, site.X[0]),
        layer=layer,
        changes=changes,
    )


def _unmasked(f: SelfAttention) -> SelfAttention:
    """f without its mask; raises UserError if f has rules other than causal order."""
    kernel = f.kernel
    rules = {
        "a mask": f.mask is not None
        and not bool(f.mask.all() if f.mask.dtype == torch.bool else (f.mask == 0).all()),
        "a sliding window": f.window is not None,
        "a soft cap": kernel.softcap is not None,
        "attention sinks": kernel.sinks is not None,
    }
    for rule, there in rules.items():
        if there:
            raise UserError(f"it has {rule}, which the new layer does not support")
    return replace(f, mask=None)


@contextmanager
def _without_cache(model: PreTrainedModel) -> Iterator[None]:
    """Turn the cache off for good, or restore it if the exchange inside fails."""
    holders = [*configs(model), *filter(None, [getattr(model, "generation_config", None)])]
    before = [(holder, holder.use_cache) for holder in holders if "use_cache" in vars(holder)]
    try:
        for holder, _ in before:
            holder.use_cache = False
        yield
    except BaseException as error:
        for holder, value in before:
            holder.use_cache = value
        if isinstance(error, UserError) or not isinstance(error, Exception):
            raise
        name = type(model).__name__
        raise UserError(
            f"{name} does not run with its attention replaced ({on_one_line(error)}); "
            "the model is unchanged"
        ) from error


def _exchange(
    model: nn.Module,
    replacements: Sequence[Replacement],
    run: Callable[[], Any],
    progress: Progress | None,
) -> Conversion:
    """Install every replacement, run the model and measure; if anything fails, undo it all."""
    changes = [change for one in replacements for change in one.changes]
    places = [(parent, name, new) for old, new in changes for parent, name in _places(model, old)]
    before = [(parent, name, parent._modules[name]) for parent, name, _ in places]
    after: list[tuple[int, Estimate]] = []
    nesting = _nesting(model)
    try:
        for one in replacements:
            trained = any(p.requires_grad for old, _ in one.changes for p in old.parameters())
            for _, new in one.changes:
                new.requires_grad_(trained)
        for parent, name, new in places:
            new.train(parent.training)
            parent._modules[name] = new
        for encoder, _ in nesting:
            # torch's fast path reads the weights of nn.MultiheadAttention, which are gone.
            encoder.use_nested_tensor = False
        watch = ModuleWatch(model, [one.layer for one in replacements])
        with _watching(watch, model, run):
            for name in _reported(watch.names, progress, half=1):
                found = watch.measured_map(name)
                assert found is not None, f"{name} did not run after the conversion"
                after.append((found[1].shape[0], _measure_map(*found)))
    except BaseException:
        for parent, name, old in before:
            parent._modules[name] = old
        for encoder, flag in nesting:
            encoder.use_nested_tensor = flag
        raise
    layers = [
        ConvertedLayer(
            name=one.name,
            old=type(one.old).__name__,
            new=type(one.layer).__name__,
            before=one.before,
            after=constant,
            bound=one.layer.lipschitz_bound(n),
            left=left_behind(one.f, one.layer),
        )
        for one, (n, constant) in zip(replacements, after, strict=True)
    ]
    return Conversion(model, after[0][0], layers)


def _call(model: nn.Module, inputs: Any) -> Any:
    """The model on its inputs, positional or by keyword."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _reported(items: Sequence[T], progress: Progress | None, half: int) -> Iterator[T]:
    """The items of one half of the work, 0 before the exchange and 1 after it, with progress."""
    for i, item in enumerate(items):
        if progress is not None:
            progress(half + i / len(items), 2)
        yield item


def _check_two_tokens(n: int) -> None:
    """Raise UserError for a single token: it cannot tell causal attention from any other."""
    if n < 2:
        raise UserError(
            f"the first sample has {n} token{'s' * (n != 1)} without padding; "
            "give a sample of at least two"
        )


def _measure_map(f: Any, X: Tensor) -> Estimate:
    """The constant in float64, with both bounds."""
    return as_single(local_lipschitz(f, X, precision="exact"))


@contextmanager
def _watching(watch: ModuleWatch, model: nn.Module, run: Callable[[], Any]) -> Iterator[None]:
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
