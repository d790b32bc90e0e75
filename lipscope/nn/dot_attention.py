"""Dot-product attention as a module; it has no Lipschitz constant, even with QK-norm."""

from __future__ import annotations

import math

from torch import Tensor, nn

from lipscope._checks import check_positive, name_bad_argument
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot
from lipscope.nn.attention_layer import AttentionLayer, check_length


class DotSelfAttention(AttentionLayer):
    """Multi-head dot-product attention without biases or dropout.

    Args:
        dim: Dimension of a token, a multiple of heads.
        heads: Number of heads.
        causal: Whether a token attends to itself and earlier tokens only.
        qk_norm: Apply an RMSNorm with a learned gain to the queries and keys of every head. This
            bounds the scores but not the Lipschitz constant: the direction of a query near 0 still
            changes fast, and the values it selects may be far apart.
        temperature: Divides the scores.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> layer = ls.nn.DotSelfAttention(8, heads=2, causal=True)
        >>> layer(torch.zeros(5, 8)).shape
        torch.Size([5, 8])
        >>> layer.lipschitz_bound(n=5)
        inf
    """

    @name_bad_argument
    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = False,
        qk_norm: bool = False,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(dim, heads, causal)
        check_positive("temperature", temperature)
        self.qk_norm = qk_norm
        self.temperature = float(temperature)
        self.query, self.key, self.value, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.query_norm = nn.RMSNorm(self.head_size, eps=1e-6) if qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(self.head_size, eps=1e-6) if qk_norm else nn.Identity()

    @property
    def scale(self) -> float:
        return 1 / (math.sqrt(self.head_size) * self.temperature)

    def project(self, X: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.split(part(X)) for part in (self.query, self.key, self.value))
        return self.query_norm(q) * self.scale, self.key_norm(k), v

    def as_map(self, n: int) -> SelfAttention:
        check_length(n)
        if self.qk_norm:
            return super().as_map(n)
        Q, K, V, O = (
            part.weight.detach().clone() for part in (self.query, self.key, self.value, self.out)
        )
        return SelfAttention(
            Q, K, V, O, heads=self.heads, causal=self.causal, kernel=Dot(self.scale)
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, qk_norm={self.qk_norm}, temperature={self.temperature:g}"
