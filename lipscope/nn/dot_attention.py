"""Dot-product attention as a module: no Lipschitz constant, with or without QK-norm, at any temperature."""

from __future__ import annotations

import math

from torch import Tensor, nn

from lipscope._checks import check_positive
from lipscope.attention.kernels import Dot
from lipscope.attention.layer import SelfAttention
from lipscope.nn.attention_layer import AttentionLayer, check_length


class DotSelfAttention(AttentionLayer):
    """Multi-head dot-product attention without biases or dropout.

    qk_norm:     queries and keys of every head pass an RMSNorm with a learned gain. It bounds the scores and not the
                 reaction: a query near 0 still turns fast, and the values it turns between may lie far apart.
    temperature: the scores are divided by it.
    """

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
        self.qk_norm, self.temperature = qk_norm, float(temperature)
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
