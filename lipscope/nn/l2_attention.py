"""L2 attention (Kim, Papamakarios, Mnih 2021): a Lipschitz constant for every length, and a layer scaled to one.

f^h(X) = P X A_h W_V with A_h = W_Q W_Q' / sqrt(k) and P the softmax of -|W_Q'(x_i - x_j)|^2 / sqrt(k). The queries are
the keys: untied, a query may stand far from its own key, and no constant holds (docs/lipschitz_layers.md).
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.attention.kernels import L2, augment
from lipscope.attention.layer import SelfAttention
from lipscope.nn.attention_layer import AttentionLayer, check_finite, check_length, check_norm
from lipscope.nn.l2_bound import reaction, weight_factor
from lipscope.nn.l2_bound import value_factors as value_factors


class L2SelfAttention(AttentionLayer):
    """Multi-head L2 attention with tied queries and keys.

    W_V is 3 sqrt(dim) times the weight of `value`, so that at initialisation the values have the size that those of a
    dot-product layer have.
    """

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__(dim, heads, causal)
        self.query, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def project(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.split(self.query(X))
        q, k = augment(L2(), y, y)
        Q, V, _ = self._weights()
        return q, k, y @ value_factors(Q, V).mT.to(y.dtype)

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of query and value head by head, [heads, k, dim], and of out."""
        Q, V = (part.weight.unflatten(0, (self.heads, -1)) for part in (self.query, self.value))
        return Q, V, self.out.weight

    def bound_tensor(self, n: int, norm: float = 2) -> Tensor:
        """The bound as a differentiable function of the weights; never below `lipschitz_bound`."""
        # index(): under the compiler n may be a symbol, and the theorem wants a number.
        constant = reaction(operator.index(n), self.head_size, self.causal, norm)
        return constant * weight_factor(*self._weights(), norm)

    @torch.no_grad()
    def lipschitz_bound(self, n: int, norm: float = 2) -> float:
        """An upper bound for all sequences of n tokens, however large, in norm 2 or inf; rounded up."""
        check_length(n)
        check_norm(norm)
        check_finite(self)
        return self.bound_tensor(n, norm).item() * (1 + 1e-12)

    @torch.no_grad()
    def as_map(self, n: int) -> SelfAttention:
        check_length(n)
        Q, V, O = self._weights()
        V, Q = (value_factors(Q, V) @ Q).flatten(0, 1), Q.flatten(0, 1).clone()
        return SelfAttention(Q, Q, V, O.clone(), heads=self.heads, causal=self.causal, kernel=L2())


class ContractiveL2Attention(L2SelfAttention):
    """L2 attention times constant / bound(n): its Lipschitz constant is at most `constant` in `norm`, whatever n is.

    The bound is taken anew from the weights in every pass and gradients flow through it.
    """

    def __init__(self, dim: int, heads: int, constant: float, norm: float = 2, causal: bool = False) -> None:
        super().__init__(dim, heads, causal)
        if isinstance(constant, bool) or not isinstance(constant, int | float) or not 0 < constant < math.inf:
            raise UserError(f"constant must be a positive number, got {constant!r}")
        check_norm(norm)
        self.constant, self.norm = float(constant), norm

    def forward(self, X: Tensor) -> Tensor:
        Y = super().forward(X)
        return Y * self.factor(X.shape[-2]).to(Y.dtype)

    def factor(self, n: int) -> Tensor:
        """constant / bound(n), differentiable in the weights."""
        return self.constant / self.bound_tensor(n, self.norm)

    @torch.no_grad()
    def lipschitz_bound(self, n: int, norm: float = 2) -> float:
        own = super().lipschitz_bound(n, norm)
        return self.constant if norm == self.norm else own * self.factor(n).item() * (1 + 1e-12)

    @torch.no_grad()
    def as_map(self, n: int) -> SelfAttention:
        f = super().as_map(n)
        assert f.O is not None
        return replace(f, O=f.O * self.factor(n).to(f.O.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, constant={self.constant:g}, norm={self.norm:g}"
