"""Scaled cosine attention (Qi et al., LipsFormer): normalised vectors, and a Lipschitz constant.

With N(y) = y / sqrt(|y|^2 + eps), ||DN|| <= 1 / sqrt(eps) and |N| < 1. For P the softmax of
tau <N(q_i), N(k_j)>, and kappa the largest column sum P can have, the output of a head changes by
at most

    sqrt(kappa) ||dv|| + tau (||dq|| + sqrt(kappa) ||dk||),

where dv, dq, dk are the changes of the normalised vectors: the covariance of vectors in the unit
ball has norm at most 1, and Cauchy-Schwarz over P bounds the contribution of the keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipscope._checks import check_positive, name_bad_argument
from lipscope.nn.attention_layer import AttentionLayer, check_finite
from lipscope.nn.matrix_norms import spectral_upper


class CosineSelfAttention(AttentionLayer):
    """Multi-head cosine attention with a learned inverse temperature tau per head.

    eps smooths the normalisation: at eps = 0 the direction of a token near 0 changes infinitely
    fast; the Lipschitz constant decreases like 1 / sqrt(eps).

    Args:
        dim: Dimension of a token, a multiple of heads.
        heads: Number of heads.
        causal: Whether a token attends to itself and earlier tokens only.
        tau: Initial inverse temperature.
        eps: Added to the squared norm of queries, keys and values.

    Example:
        >>> import math
        >>> import torch
        >>> import lipscope as ls
        >>> layer = ls.nn.CosineSelfAttention(8, heads=2, eps=1e-2)
        >>> layer(torch.zeros(5, 8)).shape
        torch.Size([5, 8])
        >>> math.isfinite(layer.lipschitz_bound(n=5))
        True
    """

    @name_bad_argument
    def __init__(
        self, dim: int, heads: int, causal: bool = False, tau: float = 10.0, eps: float = 1e-6
    ) -> None:
        super().__init__(dim, heads, causal)
        check_positive("tau", tau)
        check_positive("eps", eps)
        self.eps = float(eps)
        self.query, self.key, self.value, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.log_tau = nn.Parameter(torch.full((heads,), math.log(tau)))

    def project(self, X: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            self._normalise(self.split(part(X))) for part in (self.query, self.key, self.value)
        )
        return q * self.log_tau.exp()[:, None, None].to(q.dtype), k, v

    def _normalise(self, y: Tensor) -> Tensor:
        # In 16 bits the squares would overflow, and eps would vanish beside them.
        wide = y if y.dtype in (torch.float32, torch.float64) else y.float()
        return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + self.eps)).to(y.dtype)

    def _bound(self, n: int, norm: str) -> float:
        check_finite(self)
        tau = self.log_tau.double().exp()
        q, k, v = (
            part.weight.double().unflatten(0, (self.heads, -1))
            for part in (self.query, self.key, self.value)
        )
        O = self.out.weight.double()
        if norm == "inf":
            # |W x| <= (sum of the column norms of W) |x|_inf; a row of P sums to one, so no kappa.
            q, k, v = (W.norm(dim=-2).sum(dim=-1) for W in (q, k, v))
            rows = O.unflatten(1, (self.heads, -1)).norm(dim=-1)
            bound = (rows @ (v + tau * (q + k))).max()
        else:
            kappa = self._largest_column(n, tau)
            q, k, v = (spectral_upper(W) for W in (q, k, v))
            bound = spectral_upper(O) * (kappa.sqrt() * v + tau * (q + kappa.sqrt() * k)).norm()
        return bound.item() / math.sqrt(self.eps) * (1 + 1e-12)

    def _largest_column(self, n: int, tau: Tensor) -> Tensor:
        """The largest sum of a column of P, per head."""
        # Scores lie in [-tau, tau]: a weight among m keys is at most 1 / (1 + (m - 1) e^(-2 tau)).
        seen = torch.arange(1, n + 1) if self.causal else torch.full((n,), n)
        others = (seen.double() - 1).to(tau.device)
        return (1 / (1 + others * torch.exp(-2 * tau)[:, None])).sum(dim=1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, eps={self.eps:g}"
