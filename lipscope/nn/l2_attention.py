"""L2 attention (Kim, Papamakarios, Mnih 2021): a Lipschitz constant for every length, and a layer scaled to one.

f^h(X) = P X A_h W_V with A_h = W_Q W_Q' / sqrt(k) and P the softmax of -|W_Q'(x_i - x_j)|^2 / sqrt(k). The queries are
the keys: untied, a query may stand far from its own key, and no constant holds (docs/lipschitz_layers.md).
"""

from __future__ import annotations

import copy
import math
import operator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from lipscope._types import Everywhere, UserError
from lipscope.attention.kernels import L2, augment
from lipscope.attention.layer import SelfAttention
from lipscope.nn.attention_layer import AttentionLayer, check_length, check_norm
from lipscope.nn.matrix_norms import row_sum, spectral_upper, widened


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
        """The bound as a differentiable function of the weights; a little above `lipschitz_bound`, never below."""
        Q, V, O = (widened(W) for W in self._weights())
        with torch.autocast(O.device.type, enabled=False):
            M = value_factors(Q, V)
            if norm == math.inf:
                size = row_sum(O) * (row_sum(M) * row_sum(Q)).amax()
            else:
                size = spectral_upper(O) * (spectral_upper(M) * spectral_upper(Q)).square().sum().sqrt()
            # Weights that are zero make a zero map, not 0 / 0.
            size = size.clamp_min(torch.finfo(torch.float32).tiny)
        # index(): under the compiler n may be a symbol, and the theorem wants a number.
        return reaction(operator.index(n), self.head_size, self.causal, norm) * size

    def lipschitz_bound(self, n: int, norm: float = 2) -> float:
        """The least bound that lipscope.theorems has for all sequences of n tokens, rounded up; norm is 2 or inf."""
        check_length(n)
        check_norm(norm)
        for name, weight in self.named_parameters():
            if not weight.isfinite().all():
                raise UserError(f"the weight {name} is not finite; no bound holds")
        # Multiplied out in float64, the values still factor through the queries, which the theorems ask for.
        return _least_bound(copy.deepcopy(self).double().as_map(n), n, norm)

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

    def lipschitz_bound(self, n: int, norm: float = 2) -> float:
        own = super().lipschitz_bound(n, norm)
        return min(own, self.constant) if norm == self.norm else own

    @torch.no_grad()
    def as_map(self, n: int) -> SelfAttention:
        f = super().as_map(n)
        assert f.O is not None
        return replace(f, O=f.O * self.factor(n).to(f.O.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, constant={self.constant:g}, norm={self.norm:g}"


def value_factors(Q: Tensor, V: Tensor) -> Tensor:
    """M [heads, k, k] with which the values are M_h times the queries: M_h = W_V' W_Q / sqrt(k)."""
    return V @ Q.mT * (3 * math.sqrt(Q.shape[-1] / Q.shape[-2]))


@torch.compiler.assume_constant_result
def reaction(n: int, size: int, causal: bool, norm: float) -> float:
    """What the theorems say of identity weights with heads of this size: their bounds are this times weight norms."""
    return _reaction(n, size, causal, norm)


@lru_cache(maxsize=4096)
def _reaction(n: int, size: int, causal: bool, norm: float) -> float:
    one = torch.eye(size, dtype=torch.float64)
    return _least_bound(SelfAttention(one, one, one, causal=causal, kernel=L2()), n, norm)


def _least_bound(f: SelfAttention, n: int, norm: float) -> float:
    from lipscope.theorems import kim2021  # loads SciPy

    everywhere = Everywhere(n)
    if norm == math.inf:
        return kim2021.largest_coordinate_upper(f, everywhere)
    return min(kim2021.distance_upper(f, everywhere), kim2021.tighter_distance_upper(f, everywhere))
