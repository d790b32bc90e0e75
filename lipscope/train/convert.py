"""Replace the attention of a live transformers model, measured before and after.

The new layers accept the old calls and keep old weights if they can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipscope._ambient import entry_point, float32_by_default
from lipscope._display import html_table, text_table, with_bar
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot, default_scale
from lipscope.linalg.estimate import Estimate, as_single
from lipscope.linalg.local import local_lipschitz
from lipscope.models.attention import configs
from lipscope.models.closed_form import same
from lipscope.models.loading import load
from lipscope.models.maps import Rerun
from lipscope.models.model_files import on_one_line
from lipscope.models.sites import Survey
from lipscope.nn.attention_layer import AttentionLayer, CosineSelfAttention
from lipscope.nn.contractive import ATTENTIONS, CONTRACTIVE, make_contractive
from lipscope.nn.l2_attention import L2SelfAttention, value_factors
from lipscope.nn.wrapped import check_bare, evaluating
from lipscope.train.watched_models import INPUTS, check_trainable, numbered, one_sample
from lipscope.train.watched_modules import ModuleWatch

SUPPORTED = (
    "transformers models whose attention is plain (BERT, RoBERTa, DistilBERT, GPT-2, OPT, "
    "GPT-NeoX, Llama, Cohere, ViT and the like)"
)

SMALLEST = 1e-2
"""Query directions weaker than this, relative to the strongest, carry no values."""

T = TypeVar("T")
Progress = Callable[[float, float], None]


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
    """A layer to be replaced: the old map with its constant, and (old, new) modules to exchange."""

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
    """Replace the attention of a live transformers model, in place.

    All requested layers are replaced, or none if one of them cannot be. What is carried over to the
    new layers and what is not is described in docs/converting.md.

    Args:
        model: A transformers model, not wrapped or compiled.
        to: The new attention, one of ``lipscope.nn.ATTENTIONS``: ``"dot"``, ``"l2"``, ``"ball"``,
            ``"contractive"``, ``"contractive-ball"`` or ``"cosine"``.
        inputs: A sample to run the model on; every layer is measured at the tokens it reads, before
            and after. A tensor of token ids, or a dictionary of arguments (such as a tokenizer's
            output).
        layers: Layer numbers. Default: all layers with attention.
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
        >>> from transformers import GPT2Config, GPT2Model
        >>> _ = torch.manual_seed(0)
        >>> model = GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)).eval()
        >>> conversion = ls.convert_model(model, "l2", torch.arange(6)[None])
        >>> [(layer.name, layer.old, layer.new) for layer in conversion.layers]
        [('0', 'GPT2Attention', 'L2SelfAttention')]
        >>> conversion.layers[0].after.value <= conversion.layers[0].bound
        True
    """
    if isinstance(model, nn.Module):
        check_bare(model)
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"convert_model takes a transformers model, got {type(model).__name__}; "
            "for a loaded model, pass lipscope.load(...).trunk"
        )
    check_trainable(model)
    if not isinstance(to, str) or to not in ATTENTIONS:
        raise UserError(
            f"there is no attention {to!r} to convert to; choose one of {', '.join(ATTENTIONS)}"
        )
    if constant is not None and to not in CONTRACTIVE:
        raise UserError(
            f"constant={constant!r} is for {' and '.join(CONTRACTIVE)} attention; "
            f"{to} attention does not take one"
        )
    for name, module in model.named_modules():
        if isinstance(module, AttentionLayer):
            raise UserError(
                f"{type(model).__name__} already contains lipscope's attention ({name}); "
                "convert the original model instead"
            )
    sample = _first_sample(inputs, model.device)
    loaded = load(model)
    if not loaded.preflight.routed:
        raise UserError(
            f"{loaded.preflight.reason}, so it cannot be converted; supported are {SUPPORTED}"
        )
    chosen = numbered(layers, loaded)
    survey = loaded.survey(inputs=sample)
    n = next(iter(sample.values())).shape[1]
    if n < 2 and "pixel_values" not in sample:
        # It could not tell causal attention from any other.
        raise UserError(
            f"the first sample has {n} token without padding; give a sample of at least two"
        )
    replacements = [
        _replacement(survey, i, lambda f: make_layer(f, to, constant, fresh), keep_bias=not fresh)
        for i in _reported(chosen, progress, half=0)
    ]
    with _without_cache(model):
        return _exchange(model, replacements, sample, progress)


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


def _replacement(
    survey: Survey, i: int, make: Callable[[SelfAttention], AttentionLayer], keep_bias: bool
) -> Replacement:
    """Layer i and what takes its place, if its attention is plain."""
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
        layer = make(f.to(dtype))
    except UserError as error:
        raise UserError(
            f"{what} cannot be converted: {error}; supported are {SUPPORTED}"
        ) from error
    bias = constant_part(f, site.offset) if keep_bias else None
    bias = None if bias is None or not bias.any() else bias.detach().to(dtype)
    new = ConvertedAttention(layer, bias, tuple(signature(core.forward).parameters))
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
    model: PreTrainedModel,
    replacements: Sequence[Replacement],
    sample: dict[str, Tensor],
    progress: Progress | None,
) -> Conversion:
    """Install every replacement, run the model and measure; if anything fails, undo it all."""
    changes = {old: new for one in replacements for old, new in one.changes}
    # A module may have several parents.
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child in changes
    ]
    watch = None
    try:
        for one in replacements:
            trained = any(p.requires_grad for old, _ in one.changes for p in old.parameters())
            for _, new in one.changes:
                new.requires_grad_(trained)
        for parent, name, old in places:
            parent._modules[name] = changes[old].train(parent.training)
        watch = ModuleWatch(model, [one.layer for one in replacements])
        watch.arm()
        with torch.no_grad(), evaluating(model):
            model(**sample)
        layers = []
        tokens = 0
        for one, name in zip(replacements, _reported(watch.names, progress, half=1), strict=True):
            found = watch.measured_map(name)
            assert found is not None, f"{name} did not run after the conversion"
            f, X = found
            tokens = tokens or X.shape[0]
            layers.append(
                ConvertedLayer(
                    name=one.name,
                    old=type(one.old).__name__,
                    new=type(one.layer).__name__,
                    before=one.before,
                    after=_measure_map(f, X),
                    bound=one.layer.lipschitz_bound(X.shape[0]),
                    left=left_behind(one.f, one.layer),
                )
            )
    except BaseException:
        for parent, name, old in places:
            parent._modules[name] = old
        raise
    finally:
        if watch is not None:
            watch.release()
    return Conversion(model, tokens, layers)


def _reported(items: Sequence[T], progress: Progress | None, half: int) -> Iterator[T]:
    """The items of one half of the work, 0 before the exchange and 1 after it, with progress."""
    for i, item in enumerate(items):
        if progress is not None:
            progress(half + i / len(items), 2)
        yield item


def _measure_map(f: Any, X: Tensor) -> Estimate:
    """The constant in float64, with both bounds."""
    return as_single(local_lipschitz(f, X, precision="exact"))


class ConvertedAttention(nn.Module):
    """Replaces a transformers attention module and accepts its calls; no cache, no weights output.

    layer: the new attention
    bias:  the constant vector contributed by the old biases of values and output
    names: the argument names of the old module, in order, tokens first
    """

    bias: Tensor | None

    def __init__(self, layer: AttentionLayer, bias: Tensor | None, names: tuple[str, ...]) -> None:
        super().__init__()
        self.layer = layer
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        self.names = names

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if given.get("past_key_values") is not None:
            raise UserError("converted attention has no cache; call the model with use_cache=False")
        if given.get("encoder_hidden_states") is not None:
            raise UserError(
                "converted attention is self-attention and cannot read encoder_hidden_states; "
                "leave them out"
            )
        for name, value in given.items():
            if "mask" in name and name != "attention_mask" and value is not None:
                raise UserError(
                    f"converted attention was called with {name}, and supports only attention_mask"
                )
        mask = given.get("attention_mask")
        real = None if mask is None else _real_tokens(mask, self.layer.causal)
        Y = self.layer(given[self.names[0]], real)  # padding gives the bias
        return (Y if self.bias is None else Y + self.bias.to(Y.dtype)), None


def _real_tokens(mask: Tensor, causal: bool) -> Tensor:
    """Which tokens [B, n] are real, from a mask [B, n], or [B, 1, n, n] boolean or additive."""
    if mask.ndim == 2:
        return mask.to(torch.bool)
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    n = visible.shape[-1]
    # A real token sees itself, whatever else is hidden.
    real = visible[:, 0].diagonal(dim1=-2, dim2=-1)
    if real.shape[-1] != n:
        raise UserError(f"attention_mask of shape {tuple(mask.shape)} is not a mask [B, 1, n, n]")
    expected = real[:, None, :].expand(-1, n, -1)
    if causal:
        expected = expected & torch.ones(n, n, dtype=torch.bool, device=mask.device).tril()
    # Padded queries may see anything: their rows are discarded.
    wrong = (visible != expected[:, None]) & real[:, None, :, None]
    if bool(wrong.any()):
        raise UserError(
            f"attention_mask hides more than padding{' and later tokens' if causal else ''}; "
            "converted attention supports no other mask (no packed sequences, no windows)"
        )
    return real


def make_layer(f: SelfAttention, to: str, constant: float | None, fresh: bool) -> AttentionLayer:
    """A layer of kind `to` with the sizes, dtype and device of f and, unless `fresh`, its weights.

    dot, cosine: query, key, value and output weights are those of f.
    the others:  the query weights Q and the output weights are those of f, and keys equal queries.
                 Values can only be functions of queries: V Q^+ Q, closest to V.
    """
    d = f.Q.shape[1]
    if f.O is None or not (
        f.Q.shape[0] == f.heads * (f.V.shape[0] // f.groups) == d == f.O.shape[0]
    ):
        raise UserError(
            f"{f.heads} heads of size {f.Q.shape[0] // f.heads} do not add up to the dimension {d} "
            "of a token"
        )
    layer: AttentionLayer
    # Initial weights that are overwritten must not advance the caller's generator.
    with float32_by_default(), torch.random.fork_rng(devices=[], enabled=not fresh):
        if constant is not None:
            layer = make_contractive(to, d, f.heads, f.causal, constant)
        else:
            layer = ATTENTIONS[to](d, f.heads, f.causal)
    if not fresh:
        _carry_over(f, layer)
    return layer.to(f.Q.device, f.Q.dtype)


@torch.no_grad()
def _carry_over(f: SelfAttention, layer: AttentionLayer) -> None:
    assert f.O is not None
    size = f.Q.shape[0] // f.heads
    Q = f.Q.double()
    K, V = (f.per_head(W.double()).flatten(0, 1) for W in (f.K, f.V))
    if isinstance(layer, L2SelfAttention):
        # The weight W with value_factors(Q, W) Q = V Q^+ Q, head by head. value_factors is linear
        # in its second argument: `unit` is what it makes of Q^+', and inverting it gives the W for
        # any other right-hand side.
        q, v = (W.unflatten(0, (f.heads, -1)) for W in (Q, V))
        inverse = torch.linalg.pinv(q, rtol=SMALLEST)
        unit = value_factors(q, inverse.mT)
        W = (v @ inverse @ torch.linalg.pinv(unit) @ inverse.mT).flatten(0, 1)
        parts = {"query": Q, "value": W}
    else:
        # The layer multiplies its scores by 1 / sqrt(size): the old scale goes into the queries.
        parts = {"query": Q * default_scale(f.kernel, size) * math.sqrt(size), "key": K, "value": V}
    for name, W in {**parts, "out": f.O}.items():
        layer.get_parameter(f"{name}.weight").copy_(W)


def constant_part(f: SelfAttention, output_bias: Tensor | None) -> Tensor | None:
    """The constant that biases add to every token: rows of P sum to one, so b_v passes through."""
    bv = None if f.biases is None else f.biases[2]
    if bv is None or f.O is None:
        return output_bias
    through = f.O @ f.per_head(bv).flatten()
    return through if output_bias is None else through + output_bias


def left_behind(f: SelfAttention, layer: AttentionLayer) -> tuple[str, ...]:
    """What f has and the layer does not support, in words."""
    bq, bk, _ = f.biases or (None, None, None)
    tied = isinstance(layer, L2SelfAttention)
    ball = isinstance(layer, L2SelfAttention) and layer.ball is not None
    words = {
        "key weights": tied and not torch.equal(f.K, f.Q),
        # With keys equal to queries, a shared bias cancels in every distance; a ball has a centre.
        "query bias": (ball or not tied) and bq is not None and bool(bq.any()),
        # In a dot product a key bias shifts all scores of a query equally, and softmax ignores it.
        "key bias": isinstance(layer, CosineSelfAttention) and bk is not None and bool(bk.any()),
        "lengths of queries": ball,
        "rotary positions": isinstance(f.kernel, Dot) and f.kernel.rope is not None,
    }
    return tuple(word for word, lost in words.items() if lost)
