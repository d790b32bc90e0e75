"""What the attention layers of this room share: sizes, checks, and the road through `attend`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.primitive import attend


class AttentionLayer(nn.Module):
    """Tokens [n, dim] or [B, n, dim] to tokens of the same shape; a subclass says what queries, keys and values are."""

    out: nn.Linear

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("heads", heads)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UserError(f"{name} must be a positive integer, got {size!r}")
        if dim % heads:
            raise UserError(
                f"dim={dim} must be a multiple of heads={heads}: every head takes dim / heads coordinates"
            )
        self.dim, self.heads, self.causal = dim, heads, causal

    @property
    def head_size(self) -> int:
        return self.dim // self.heads

    def forward(self, X: Tensor, padding: Tensor | None = None) -> Tensor:
        """padding [n] or [B, n] is True for real tokens: the layer of these alone, whatever the others hold, NaN too.

        A padded token gives zero, and neither it nor its gradient reaches anything.
        """
        check_tokens(X, self.dim)
        q, k, v = self.project(_real(X, padding), padding)
        return self.out(_mix(q, k, v, self.causal, padding).transpose(-3, -2).flatten(-2))

    def project(self, X: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., heads, n, size]; the score of a pair is the dot product of q and k."""
        raise NotImplementedError

    def weights(self, X: Tensor, padding: Tensor | None = None) -> Tensor:
        """The attention weights P [..., heads, n, n], differentiable; n^2 numbers a head, which forward never holds.

        Rows and columns of padded tokens are zero.
        """
        check_tokens(X, self.dim)
        q, k, _ = self.project(_real(X, padding), padding)
        scores = q @ k.mT
        seen = _seen(X, self.causal, padding)
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        P = scores.softmax(dim=-1)
        return P if padding is None else P.masked_fill(~padding[..., None, :, None], 0)

    def lipschitz_bound(self, n: int, norm: float = 2) -> float:
        """An upper bound of the Lipschitz constant over all sequences of n tokens; infinity where there is none.

        It grows with n. Padded tokens do not count, so that it also holds for n tokens some of which are padding.
        """
        check_length(n)
        check_norm(norm)
        return math.inf

    def as_map(self, n: int) -> SelfAttention:
        """The papers' map of n real tokens at the present weights, detached, with its Jacobian in closed form."""
        raise UserError(
            f"{type(self).__name__} is no map of the papers; measure the module itself, by autograd"
        )

    def split(self, Y: Tensor) -> Tensor:
        """[..., n, heads size] to [..., heads, n, size]."""
        return Y.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, causal={self.causal}"


def _mix(q: Tensor, k: Tensor, v: Tensor, causal: bool, padding: Tensor | None) -> Tensor:
    """softmax(q k') v; the compiler refuses functions with their own jvp, and its graphs have no use for one."""
    if not torch.compiler.is_compiling():
        return attend(q, k, v, scale=1.0, causal=causal, padding=padding)
    if padding is None:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)
    seen = _seen(q[..., 0, :, :], causal, padding)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0)
    return mixed.masked_fill(~padding[..., None, :, None], 0)


def _seen(X: Tensor, causal: bool, padding: Tensor | None) -> Tensor | None:
    """Which keys a query of X [..., n, d] may see, [n, n] or [..., 1, n, n]; None for all.

    A padded token sees itself: what torch makes of an empty row differs from device to device.
    """
    if padding is None and not causal:
        return None
    seen = torch.ones(X.shape[-2], X.shape[-2], dtype=torch.bool, device=X.device)
    itself = seen.tril().triu()
    seen = seen.tril() if causal else seen
    return seen if padding is None else seen & padding[..., None, None, :] | itself


def _real(X: Tensor, padding: Tensor | None) -> Tensor:
    """X with real tokens, held fixed, in place of the padded ones; zeros in a sequence that has none.

    Padding may hold anything, and zero times NaN is NaN. Zeros everywhere would draw L2's centre away from the real
    tokens; these are taken from among them in turn, so that no single one of them does.
    """
    if padding is None:
        return X
    check_padding(padding, X)
    n, count = X.shape[-2], padding.sum(dim=-1, keepdim=True)
    first = padding.byte().argsort(dim=-1, descending=True, stable=True)
    chosen = first.gather(-1, torch.arange(n, device=X.device) * count // n)
    others = torch.take_along_dim(X.detach(), chosen[..., None], dim=-2)
    others = others.masked_fill(count[..., None] == 0, 0)
    return torch.where(padding[..., None], X, others)


def check_tokens(X: Tensor, dim: int) -> None:
    """Shape and kind alone: whether the entries are finite is not asked in every step of training."""
    if not isinstance(X, Tensor):
        raise UserError(
            f"the layer takes a tensor of tokens [n, {dim}] or [B, n, {dim}], got {type(X).__name__}"
        )
    if (
        X.ndim not in (2, 3)
        or X.shape[-1] != dim
        or X.numel() == 0
        or not X.dtype.is_floating_point
    ):
        raise UserError(
            f"the layer takes floating-point tokens [n, {dim}] or [B, n, {dim}], got {X.dtype} {tuple(X.shape)}"
        )


def check_padding(padding: Tensor, X: Tensor) -> None:
    if (
        not isinstance(padding, Tensor)
        or padding.dtype != torch.bool
        or padding.shape != X.shape[:-1]
    ):
        got = (
            f"{padding.dtype} {tuple(padding.shape)}"
            if isinstance(padding, Tensor)
            else type(padding).__name__
        )
        raise UserError(
            f"padding must be a boolean tensor {list(X.shape[:-1])}, True for real tokens, got {got}; "
            "of a tokenizer's attention_mask take .bool(), of torch's key_padding_mask the opposite, ~mask"
        )


def check_finite(module: nn.Module) -> None:
    """No bound holds for weights that are not numbers."""
    for name, weight in module.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"the weight {name} is not finite; no bound holds")


def check_length(n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UserError(f"n must be a number of tokens, at least 1, got {n!r}")


def check_norm(norm: float) -> None:
    if norm not in (2, math.inf):
        raise UserError(
            f"norm must be 2 (the Frobenius norm of tokens) or math.inf (largest coordinate), got {norm!r}"
        )
