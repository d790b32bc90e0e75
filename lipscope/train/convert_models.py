"""Replace the attention of a live module or transformers model, measured before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipscope._ambient import entry_point
from lipscope._notebook_bar import with_bar
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.models.closed_form import same
from lipscope.models.loading import load
from lipscope.models.maps import Rerun
from lipscope.models.model_files import on_one_line
from lipscope.models.plug import configs
from lipscope.models.sites import Survey
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.wrapped import check_bare
from lipscope.train.convert_modules import (
    SUPPORTED,
    Conversion,
    Progress,
    Slot,
    Target,
    check_two_tokens,
    convert_module,
    exchange,
    measure_map,
    reported,
)
from lipscope.train.replacement import Replacement, constant_part, make_layer
from lipscope.train.watched_models import INPUTS, numbered, one_sample
from lipscope.train.watched_modules import listed


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
        return convert_module(model, target, inputs, layers, progress)
    sample = _first_sample(inputs, model.device)
    loaded = load(model)
    if not loaded.preflight.routed:
        raise UserError(
            f"{loaded.preflight.reason}, so it cannot be converted; supported are {SUPPORTED}"
        )
    chosen = numbered(layers, loaded.layers)
    survey = loaded.survey(inputs=sample)
    if "pixel_values" not in sample:
        check_two_tokens(next(iter(sample.values())).shape[1])
    slots = [_slot(survey, i, target) for i in reported(chosen, progress, half=0)]
    return _without_cache(model, slots, sample, progress)


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


class TransformersReplacement(Replacement):
    """Replaces a transformers attention module and accepts its calls; no cache, no weights output.

    names: the argument names of the old module, in order, tokens first
    """

    def __init__(self, layer: AttentionLayer, bias: Tensor | None, names: tuple[str, ...]) -> None:
        super().__init__(layer, bias)
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
        return self.attended(given[self.names[0]], real), None


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


def _slot(survey: Survey, i: int, target: Target) -> Slot:
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
    new = TransformersReplacement(layer, bias, tuple(signature(core.forward).parameters))
    changes: tuple[tuple[nn.Module, nn.Module], ...] = ((core, new),)
    if not inside:  # the new layer has its own output projection
        changes += ((projection, nn.Identity()),)
    return Slot(
        name=str(i),
        old=core,
        f=f,
        before=measure_map(f, site.X[0]),
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


def _without_cache(
    model: PreTrainedModel,
    slots: Sequence[Slot],
    sample: dict[str, Tensor],
    progress: Progress | None,
) -> Conversion:
    """Exchange the layers with the cache turned off; if anything fails, undo both."""
    holders = [*configs(model), *filter(None, [getattr(model, "generation_config", None)])]
    before = [(holder, holder.use_cache) for holder in holders if "use_cache" in vars(holder)]
    try:
        for holder, _ in before:
            holder.use_cache = False
        return exchange(model, slots, lambda: model(**sample), progress)
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
