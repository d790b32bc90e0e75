"""The new layers of a conversion: they accept the old calls and keep old weights if they can."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lipscope._ambient import float32_by_default
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot, default_scale
from lipscope.nn.attention_layer import AttentionLayer, CosineSelfAttention
from lipscope.nn.contractive import ATTENTIONS, make_contractive
from lipscope.nn.l2_attention import L2SelfAttention, value_factors
from lipscope.train.recording import real_tokens

SMALLEST = 1e-2
"""Query directions weaker than this, relative to the strongest, carry no values."""


class _ConvertedAttention(nn.Module):
    """`layer` plus the constant vector contributed by the biases of values and output."""

    bias: Tensor | None

    def __init__(self, layer: AttentionLayer, bias: Tensor | None) -> None:
        super().__init__()
        self.layer = layer
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    def attended(self, X: Tensor, real: Tensor | None) -> Tensor:
        """The layer on the real [B, n] tokens, by default all; padding gives the bias."""
        Y = self.layer(X, real)
        return Y if self.bias is None else Y + self.bias.to(Y.dtype)


class ConvertedTorchAttention(_ConvertedAttention):
    """Replaces an nn.MultiheadAttention, with its signature; padded tokens attend to nothing."""

    # nn.TransformerEncoderLayer reads these to decide whether its fused kernel, which would bypass
    # this module, may be used: these values rule it out.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, layer: AttentionLayer, bias: Tensor | None, batch_first: bool) -> None:
        super().__init__(layer, bias)
        self.batch_first = batch_first
        self.embed_dim = layer.dim
        self.num_heads = layer.heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if key is not query or value is not query:
            raise UserError(
                "converted attention is self-attention, and key or value is not the query; "
                "pass the same tensor three times"
            )
        swap = query.ndim == 3 and not self.batch_first
        X = query.transpose(0, 1) if swap else query
        check_mask(self.layer, attn_mask, is_causal, X.shape[-2])
        real = None if key_padding_mask is None else real_tokens(key_padding_mask)
        Y = self.attended(X, real)
        P = None
        if need_weights:
            P = self.layer.weights(X, real)
            P = P.mean(dim=-3) if average_attn_weights else P
        return (Y.transpose(0, 1) if swap else Y), P


class ConvertedTransformersAttention(_ConvertedAttention):
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


def check_mask(layer: AttentionLayer, mask: Tensor | None, is_causal: bool, n: int) -> None:
    """Raise UserError for a mask other than the layer's own; without one, is_causal decides."""
    wanted = "a causal attn_mask" if layer.causal else "no attn_mask"
    causal = is_causal if mask is None else is_causal_mask(mask, n)
    if n > 1 and causal != layer.causal:  # for a single token both masks are the same
        raise UserError(
            f"this attention was converted with {wanted} and supports no other; "
            "convert the model with the mask you use"
        )


def is_causal_mask(mask: Tensor, n: int) -> bool:
    """Whether torch's mask (True or -inf: hidden) is causal rather than empty; else UserError."""
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    plain = mask.dtype == torch.bool or bool(((mask == 0) | hidden).all())
    later = torch.ones(n, n, dtype=torch.bool, device=mask.device).triu(1)
    if plain and mask.shape[-2:] == (n, n) and not hidden.any():
        return False
    if plain and mask.shape[-2:] == (n, n) and bool((hidden == later).all()):
        return True
    raise UserError(
        "attn_mask is neither causal nor empty; "
        "converted attention supports only causal masks and padding"
    )


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
    if fresh:
        layer = _empty(to, d, f, constant)
    else:
        # The initial weights are overwritten: drawing them must not advance the caller's generator.
        with torch.random.fork_rng(devices=[]):
            layer = _empty(to, d, f, constant)
        _carry_over(f, layer)
    return layer.to(f.Q.device, f.Q.dtype)


def _empty(to: str, d: int, f: SelfAttention, constant: float | None) -> AttentionLayer:
    with float32_by_default():
        if constant is not None:
            return make_contractive(to, d, f.heads, f.causal, constant)
        return ATTENTIONS[to](d, f.heads, f.causal)


@torch.no_grad()
def _carry_over(f: SelfAttention, layer: AttentionLayer) -> None:
    assert f.O is not None
    size = f.Q.shape[0] // f.heads
    Q = f.Q.double()
    K, V = (f.per_head(W.double()).flatten(0, 1) for W in (f.K, f.V))
    if isinstance(layer, L2SelfAttention):
        parts = {"query": Q, "value": _values_of_queries(Q, V, f.heads)}
    else:
        # The layer multiplies its scores by 1 / sqrt(size): the old scale goes into the queries.
        parts = {"query": Q * default_scale(f.kernel, size) * math.sqrt(size), "key": K, "value": V}
    for name, W in {**parts, "out": f.O}.items():
        layer.get_parameter(f"{name}.weight").copy_(W)


def _values_of_queries(Q: Tensor, V: Tensor, heads: int) -> Tensor:
    """The weight W with value_factors(Q, W) Q = V Q^+ Q, head by head."""
    Q, V = (W.unflatten(0, (heads, -1)) for W in (Q, V))
    inverse = torch.linalg.pinv(Q, rtol=SMALLEST)
    # value_factors is linear in its second argument: `unit` is what it makes of Q^+', and inverting
    # it gives the W for any other right-hand side.
    unit = value_factors(Q, inverse.mT)
    return (V @ inverse @ torch.linalg.pinv(unit) @ inverse.mT).flatten(0, 1)


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
