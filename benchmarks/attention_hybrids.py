"""Two hybrid layers: dot-product scores with the values of L2 attention, and the reverse.

They show which half of L2 attention makes training break; neither has a Lipschitz constant.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from lipscope.attention.scores import L2, augment
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.l2_attention import value_factors


class DotScoresL2Values(AttentionLayer):
    """softmax(q k' / sqrt(k)) with free keys; values M_h q, M_h = W_V' W_Q, as in L2 attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, causal=True)
        self.query, self.key, self.value, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def project(self, X: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (self.split(part(X)) for part in (self.query, self.key))
        Q, V = (part.weight.unflatten(0, (self.heads, -1)) for part in (self.query, self.value))
        return q / math.sqrt(self.head_size), k, q @ value_factors(Q, V).mT


class L2ScoresDotValues(AttentionLayer):
    """softmax(-|q - q'|^2 / sqrt(k)) with tied keys, as in L2SelfAttention; free values W_V x."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, causal=True)
        self.query, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def project(self, X: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        y = self.split(self.query(X))
        return *augment(L2(), y, y), self.split(self.value(X))
