"""An attention layer that takes another's place: its weights as far as they fit, its calls answered as before."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.attention.kernels import Dot, default_scale
from lipscope.attention.layer import SelfAttention
from lipscope.monitor.seen_call import real_tokens
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.cosine_attention import CosineSelfAttention
from lipscope.nn.l2_attention import ContractiveL2Attention, L2SelfAttention, value_factors
from lipscope.nn.variants import ATTENTIONS, CONSTANT

SMALLEST = 1e-2
"""Directions of the queries weaker than this, relative to the strongest, carry no values."""


class Replacement(nn.Module):
    """`layer`, plus the constant vector that biases of values and output came to."""

    bias: Tensor | None

    def __init__(self, layer: AttentionLayer, bias: Tensor | None) -> None:
        super().__init__()
        self.layer = layer
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    def attended(self, X: Tensor, real: Tensor | None) -> Tensor:
        """The layer on each sample's real [B, n] tokens, or on all of them; a padded token gives the bias."""
        Y = self.layer(X, real)
        return Y if self.bias is None else Y + self.bias.to(Y.dtype)


class TorchReplacement(Replacement):
    """In the place of an nn.MultiheadAttention, with its signature; a padded token attends to nothing."""

    # Of these, torch's encoder asks whether a fused kernel of its own may take over: it may not.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, layer: AttentionLayer, bias: Tensor | None, batch_first: bool) -> None:
        super().__init__(layer, bias)
        self.batch_first, self.embed_dim, self.num_heads = batch_first, layer.dim, layer.heads

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
                "this attention was converted: it is self-attention, and key or value is not the query"
            )
        swap = query.ndim == 3 and not self.batch_first
        X = query.transpose(0, 1) if swap else query
        check_mask(self.layer, attn_mask, is_causal, X.shape[-2])
        real = None if key_padding_mask is None else real_tokens(key_padding_mask)
        Y, P = self.attended(X, real), None
        if need_weights:
            P = self.layer.weights(X, real)
            P = P.mean(dim=-3) if average_attn_weights else P
        return (Y.transpose(0, 1) if swap else Y), P


def check_mask(layer: AttentionLayer, mask: Tensor | None, is_causal: bool, n: int) -> None:
    """Refuse a mask, in torch's sense, that is not the layer's own; is_causal speaks where there is none."""
    wanted = "a causal attn_mask" if layer.causal else "no attn_mask"
    causal = is_causal if mask is None else is_causal_mask(mask, n)
    if n > 1 and causal != layer.causal:  # a token by itself has no later ones
        raise UserError(
            f"this attention was converted with {wanted} and takes no other; convert with the mask you use"
        )


def is_causal_mask(mask: Tensor, n: int) -> bool:
    """Whether torch's mask, True or -inf for hidden, is the causal one; an error if it hides anything else."""
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    plain = mask.dtype == torch.bool or bool(((mask == 0) | hidden).all())
    later = torch.ones(n, n, dtype=torch.bool, device=mask.device).triu(1)
    if plain and mask.shape[-2:] == (n, n) and not hidden.any():
        return False
    if plain and mask.shape[-2:] == (n, n) and bool((hidden == later).all()):
        return True
    raise UserError(
        "attn_mask is neither causal nor empty; converted attention takes causal masks and padding alone"
    )


def make_layer(f: SelfAttention, to: str, constant: float | None, fresh: bool) -> AttentionLayer:
    """A layer of the kind `to` with the sizes of f, in its dtype, where it lives; its weights too, unless `fresh`.

    dot, cosine: query, key, value and output weights are those of f.
    l2, contractive: the query weights Q and the output weights are those of f; keys are queries. Values can only be
    made of queries: they are the nearest to the old ones, V Q^+ Q for the old V.
    """
    d = f.Q.shape[1]
    if f.O is None or not (
        f.Q.shape[0] == f.heads * (f.V.shape[0] // f.groups) == d == f.O.shape[0]
    ):
        raise UserError(
            f"heads of size {f.Q.shape[0] // f.heads} times {f.heads} do not make up tokens of size {d}"
        )
    if fresh:
        layer = _empty(to, d, f, constant)
    else:
        with torch.random.fork_rng(devices=[]):
            layer = _empty(to, d, f, constant)
        _carry_over(f, layer)
    return layer.to(f.Q.device, f.Q.dtype)


def _empty(to: str, d: int, f: SelfAttention, constant: float | None) -> AttentionLayer:
    if to == "contractive":
        return ContractiveL2Attention(
            d, f.heads, CONSTANT if constant is None else constant, causal=f.causal
        )
    return ATTENTIONS[to](d, f.heads, f.causal)


@torch.no_grad()
def _carry_over(f: SelfAttention, layer: AttentionLayer) -> None:
    assert f.O is not None
    size = f.Q.shape[0] // f.heads
    Q = f.Q.double()
    K, V = (
        W.double()
        .unflatten(0, (f.groups, -1))
        .repeat_interleave(f.heads // f.groups, dim=0)
        .flatten(0, 1)
        for W in (f.K, f.V)
    )
    if isinstance(layer, L2SelfAttention):
        parts = {"query": Q, "value": _values_of_queries(Q, V, f.heads)}
    else:
        # What the score is multiplied by goes into the queries; the layer has its own 1 / sqrt(size).
        parts = {"query": Q * default_scale(f.kernel, size) * math.sqrt(size), "key": K, "value": V}
    for name, W in {**parts, "out": f.O}.items():
        layer.get_parameter(f"{name}.weight").copy_(W)


def _values_of_queries(Q: Tensor, V: Tensor, heads: int) -> Tensor:
    """The weight W with value_factors(Q, W) Q = V Q^+ Q, head by head."""
    Q, V = (W.unflatten(0, (heads, -1)) for W in (Q, V))
    inverse = torch.linalg.pinv(Q, rtol=SMALLEST)
    unit = value_factors(
        Q, inverse.mT
    )  # linear in its second argument, and this is what Q^+' comes to
    return (V @ inverse @ torch.linalg.pinv(unit) @ inverse.mT).flatten(0, 1)


def constant_part(f: SelfAttention, output_bias: Tensor | None) -> Tensor | None:
    """What biases add to every token: rows of P sum to one, so that of the values passes through to the output."""
    bv = None if f.biases is None else f.biases[2]
    if bv is None or f.O is None:
        return output_bias
    bv = bv.unflatten(0, (f.groups, -1)).repeat_interleave(f.heads // f.groups, dim=0).flatten()
    through = f.O @ bv
    return through if output_bias is None else through + output_bias


def left_behind(f: SelfAttention, layer: AttentionLayer) -> tuple[str, ...]:
    """What f has and the layer has no place for, in words."""
    bq, bk, _ = f.biases or (None, None, None)
    tied = isinstance(
        layer, L2SelfAttention
    )  # distances do not see a bias that queries and keys share
    words = {
        "key weights": tied and not torch.equal(f.K, f.Q),
        "query bias": not tied and bq is not None and bool(bq.any()),
        # In a dot product it adds the same to all scores of a query.
        "key bias": isinstance(layer, CosineSelfAttention) and bk is not None and bool(bk.any()),
        "rotary positions": isinstance(f.kernel, Dot) and f.kernel.rope is not None,
    }
    return tuple(word for word, lost in words.items() if lost)
