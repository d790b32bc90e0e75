"""L2 attention (Kim, Papamakarios, Mnih 2021) with its Lipschitz constant, and a rescaled variant.

f^h(X) = P X A_h W_V with A_h = W_Q W_Q' / sqrt(k) and P the softmax of
-|W_Q'(x_i - x_j)|^2 / sqrt(k). Queries and keys are tied: untied, a query may be far from its own
key, and no constant holds (docs/lipschitz_layers.md).
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch
from torch import Tensor, nn

from lipscope._checks import check_positive
from lipscope.attention.kernels import L2, augment
from lipscope.nn.attention_layer import AttentionLayer, check_finite, check_length, check_norm
from lipscope.nn.l2_bound import balanced_factors, reaction, reactions, weight_factor
from lipscope.nn.l2_bound import value_factors as value_factors
from lipscope.nn.matrix_norms import widened
from lipscope.theorems.factored_values import FactoredAttention


class L2SelfAttention(AttentionLayer):
    """Multi-head L2 attention with tied queries and keys, which has a Lipschitz constant.

    The constant holds for all sequences of n tokens, however large, and grows with n. W_V is
    3 sqrt(dim) times the weight of `value`, so that at initialisation the values are as large as in
    a dot-product layer.

    Args:
        dim: Dimension of a token, a multiple of heads.
        heads: Number of heads.
        causal: Whether a token attends to itself and earlier tokens only.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> layer = ls.nn.L2SelfAttention(8, heads=2).double()
        >>> X = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(5, 8)
        >>> bool(ls.local_lipschitz(layer.as_map(5), X).value <= layer.lipschitz_bound(n=5))
        True
    """

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__(dim, heads, causal)
        self.query, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def project(self, X: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        y = self.split(self.query(X))
        q, k = augment(L2(), y, y)
        M = self.value_map(X.shape[-2], padding)
        if y.dtype != torch.float16:
            return q, k, y @ M.mT.to(y.dtype)
        # M may underflow in float16 although the product y M' does not.
        with torch.autocast(y.device.type, enabled=False):
            return q, k, (y.float() @ M.mT.float()).to(y.dtype)

    def value_map(self, n: int, padding: Tensor | None = None) -> Tensor:
        """M [heads, k, k]: values are M_h times queries; [..., heads, k, k] if padding matters."""
        Q, V, _ = self._weights()
        return value_factors(widened(Q), widened(V))

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of query and value per head, [heads, k, dim], and of out."""
        Q, V = (part.weight.unflatten(0, (self.heads, -1)) for part in (self.query, self.value))
        return Q, V, self.out.weight

    def bound_tensor(self, n: int, norm: float = 2) -> Tensor:
        """The bound as a differentiable function of the weights; never below `lipschitz_bound`."""
        # Under torch.compile n may be symbolic; the theorem needs an int.
        constant = reaction(operator.index(n), self.head_size, self.causal, norm)
        return constant * weight_factor(*self._weights(), norm)

    @torch.no_grad()
    def lipschitz_bound(self, n: int, norm: float = 2) -> float:
        """An upper bound over all sequences of n tokens, however large, rounded up."""
        check_length(n)
        check_norm(norm)
        check_finite(self)
        return self.bound_tensor(n, norm).item() * (1 + 1e-12)

    @torch.no_grad()
    def as_map(self, n: int) -> FactoredAttention:
        check_length(n)
        Q, _, O = self._weights()
        # In float32 at least: the constant of the layer is wanted, not that of its rounding.
        dtype = torch.promote_types(O.dtype, torch.float32)
        M = widened(self.value_map(n)).to(dtype)
        V = (widened(M) @ widened(Q)).flatten(0, 1).to(dtype)
        Q, O = (W.to(dtype, copy=True) for W in (Q.flatten(0, 1), O))
        return FactoredAttention(Q, Q, V, O, heads=self.heads, causal=self.causal, kernel=L2(), M=M)


class ContractiveL2Attention(L2SelfAttention):
    """L2 attention rescaled to a Lipschitz constant of at most `constant`, for any n and weights.

    The layer is L2 attention times constant / bound(n). The bound is recomputed from the weights in
    every pass, and gradients flow through it.

    Args:
        dim: Dimension of a token, a multiple of heads.
        heads: Number of heads.
        constant: The Lipschitz constant, positive.
        norm: The norm it holds in: 2 (Frobenius) or math.inf (largest coordinate).
        causal: Whether a token attends to itself and earlier tokens only.

    Example:
        >>> import lipscope as ls
        >>> layer = ls.nn.ContractiveL2Attention(8, heads=2, constant=0.9)
        >>> layer.lipschitz_bound(n=5), layer.lipschitz_bound(n=5000)
        (0.9, 0.9)
    """

    def __init__(
        self, dim: int, heads: int, constant: float, norm: float = 2, causal: bool = False
    ) -> None:
        super().__init__(dim, heads, causal)
        check_positive("constant", constant)
        check_norm(norm)
        self.constant, self.norm = float(constant), norm

    def value_map(self, n: int, padding: Tensor | None = None) -> Tensor:
        """M times constant / bound(n), differentiable in the weights; n counts real tokens only."""
        # The bound of the padded length would be valid as well, but the output for a sequence would
        # then depend on the lengths of the others in its batch.
        M = balanced_factors(*self._weights(), self.norm)
        kind = self.head_size, self.causal, self.norm
        if padding is None:
            return self.constant / reaction(operator.index(n), *kind) * M
        bound = reactions(padding.sum(dim=-1), operator.index(n), *kind)
        return (self.constant / bound)[..., None, None, None].to(M.dtype) * M

    @torch.no_grad()
    def lipschitz_bound(self, n: int, norm: float = 2) -> float:
        own = super().lipschitz_bound(n, norm)
        if norm == self.norm:
            return self.constant
        ratio = own / super().lipschitz_bound(n, self.norm)
        return self.constant * ratio * (1 + 1e-11) if math.isfinite(ratio) else math.inf

    @torch.no_grad()
    def as_map(self, n: int) -> FactoredAttention:
        f = super().as_map(n)
        # V was rounded to nearest; the constant has to hold for the rounded V.
        less = 1 - 4 * math.sqrt(self.dim) * torch.finfo(f.V.dtype).eps
        return replace(f, V=f.V * less, M=f.M * less)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, constant={self.constant:g}, norm={self.norm:g}"
