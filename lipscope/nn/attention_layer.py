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
            raise UserError(f"dim={dim} must be a multiple of heads={heads}: every head takes dim / heads coordinates")
        self.dim, self.heads, self.causal = dim, heads, causal

    @property
    def head_size(self) -> int:
        return self.dim // self.heads

    def forward(self, X: Tensor) -> Tensor:
        check_tokens(X, self.dim)
        q, k, v = self.project(X)
        return self.out(_mix(q, k, v, self.causal).transpose(-3, -2).flatten(-2))

    def project(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., heads, n, size]; the score of a pair is the dot product of q and k."""
        raise NotImplementedError

    def weights(self, X: Tensor) -> Tensor:
        """The attention weights P [..., heads, n, n], differentiable; n^2 numbers a head, which forward never holds."""
        check_tokens(X, self.dim)
        q, k, _ = self.project(X)
        scores = q @ k.mT
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=X.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        return scores.softmax(dim=-1)

    def lipschitz_bound(self, n: int, norm: float = 2) -> float:
        """An upper bound of the Lipschitz constant over all sequences of n tokens; infinity where there is none."""
        check_length(n)
        check_norm(norm)
        return math.inf

    def as_map(self, n: int) -> SelfAttention:
        """The papers' map at the present weights, detached, with its Jacobian in closed form."""
        raise UserError(f"{type(self).__name__} is no map of the papers; measure the module itself, by autograd")

    def split(self, Y: Tensor) -> Tensor:
        """[..., n, heads size] to [..., heads, n, size]."""
        return Y.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, causal={self.causal}"


def _mix(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q k') v; the compiler refuses functions with their own jvp, and its graphs have no use for one."""
    if torch.compiler.is_compiling():
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)
    return attend(q, k, v, scale=1.0, causal=causal)


def check_tokens(X: Tensor, dim: int) -> None:
    """Shape and kind alone: whether the entries are finite is not asked in every step of training."""
    if not isinstance(X, Tensor):
        raise UserError(f"the layer takes a tensor of tokens [n, {dim}] or [B, n, {dim}], got {type(X).__name__}")
    if X.ndim not in (2, 3) or X.shape[-1] != dim or X.numel() == 0 or not X.dtype.is_floating_point:
        raise UserError(
            f"the layer takes floating-point tokens [n, {dim}] or [B, n, {dim}], got {X.dtype} {tuple(X.shape)}"
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
        raise UserError(f"norm must be 2 (the Frobenius norm of tokens) or math.inf (largest coordinate), got {norm!r}")
