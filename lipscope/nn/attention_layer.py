"""Attention layers as modules: the base class, dot products, and cosines.

The base class has the sizes, checks, padding, and the call of `attend`. Dot-product attention has
no Lipschitz constant, even with QK-norm; cosine attention (Qi et al., LipsFormer) has one. With
N(y) = y / sqrt(|y|^2 + eps), ||DN|| <= 1 / sqrt(eps) and |N| < 1. For P the softmax of
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

from lipscope._ambient import unaffected
from lipscope._checks import (
    abbreviate,
    check_positive,
    name_bad_argument,
    norm_name,
)
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot
from lipscope.fused.primitive import attend
from lipscope.nn.matrix_norms import spectral_upper


class AttentionLayer(nn.Module):
    """Base class of multi-head self-attention layers.

    A layer maps tokens [n, dim] or [B, n, dim] to tokens of the same shape. A subclass defines
    `project`, which gives queries, keys and values, and the linear map `out`.

    Args:
        dim: Dimension of a token, a multiple of heads.
        heads: Number of heads.
        causal: Whether a token attends to itself and earlier tokens only.

    Raises:
        UserError: If dim or heads is not a positive integer, or heads does not divide dim.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> layer = ls.nn.DotSelfAttention(8, heads=2)
        >>> isinstance(layer, ls.nn.AttentionLayer)
        True
        >>> layer.weights(torch.zeros(3, 8)).shape
        torch.Size([2, 3, 3])
    """

    out: nn.Linear

    @name_bad_argument
    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("heads", heads)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UserError(f"{name} must be a positive integer, got {size!r}")
        if dim % heads:
            raise UserError(
                f"dim={dim} must be a multiple of heads={heads}: "
                "every head has dim / heads coordinates"
            )
        self.dim = dim
        self.heads = heads
        self.causal = causal

    @property
    def head_size(self) -> int:
        return self.dim // self.heads

    def forward(self, X: Tensor, padding: Tensor | None = None) -> Tensor:
        """Apply the layer.

        Args:
            X: Tokens [n, dim] or [B, n, dim].
            padding: Boolean [n] or [B, n], True for real tokens. Padded tokens, NaN included,
                have no effect on the others; their output is zero, and so is their gradient.

        Returns:
            Tokens of the shape of X.
        """
        check_tokens(X, self.dim)
        q, k, v = self.project(_real(X, padding), padding)
        return self.out(_mix(q, k, v, self.causal, padding).transpose(-3, -2).flatten(-2))

    def project(self, X: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys, values [..., heads, n, size], scaled so that scores are q k^T."""
        raise NotImplementedError

    def weights(self, X: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the attention weights P [..., heads, n, n], differentiable.

        They take n^2 numbers per head, which forward never stores. Rows and columns of padded
        tokens are zero.
        """
        check_tokens(X, self.dim)
        q, k, _ = self.project(_real(X, padding), padding)
        scores = q @ k.mT
        seen = _seen(X, self.causal, padding)
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        P = scores.softmax(dim=-1)
        return P if padding is None else P.masked_fill(~padding[..., None, :, None], 0)

    @unaffected
    @torch.no_grad()
    def lipschitz_bound(self, n: int, norm: str | float = "2") -> float:
        """Bound the Lipschitz constant from above over all sequences of n tokens, however large.

        It holds for up to n real tokens: the others may be padding.

        Args:
            n: Number of tokens.
            norm: "2" for the Frobenius norm of the tokens, "inf" for the largest coordinate.

        Returns:
            The bound, rounded up; infinite where the layer has no Lipschitz constant.

        Raises:
            UserError: If n or norm is invalid, or a weight is not finite.
        """
        check_length(n)
        return self._bound(n, norm_name(norm))

    def _bound(self, n: int, norm: str) -> float:
        """`lipschitz_bound` of checked arguments."""
        return math.inf

    def as_map(self, n: int) -> SelfAttention:
        """Return the layer on n real tokens as a SelfAttention with its current weights."""
        raise UserError(
            f"{type(self).__name__} has no closed form; measure the module itself, through autograd"
        )

    def split(self, Y: Tensor) -> Tensor:
        """Reshape [..., n, heads * size] to [..., heads, n, size]."""
        return Y.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, causal={self.causal}"


def _mix(q: Tensor, k: Tensor, v: Tensor, causal: bool, padding: Tensor | None) -> Tensor:
    """softmax(q k') v."""
    # torch.compile rejects functions that define their own jvp, and compiled graphs need none.
    if not torch.compiler.is_compiling():
        return attend(q, k, v, scale=1.0, causal=causal, padding=padding)
    if padding is None:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)
    seen = _seen(q[..., 0, :, :], causal, padding)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0)
    return mixed.masked_fill(~padding[..., None, :, None], 0)


def _seen(X: Tensor, causal: bool, padding: Tensor | None) -> Tensor | None:
    """Which keys a query of X [..., n, d] may attend to, [n, n] or [..., 1, n, n]; None for all."""
    if padding is None and not causal:
        return None
    seen = torch.ones(X.shape[-2], X.shape[-2], dtype=torch.bool, device=X.device)
    itself = seen.tril().triu()
    seen = seen.tril() if causal else seen
    # A padded token attends to itself: torch's result for a fully masked row depends on the device.
    return seen if padding is None else seen & padding[..., None, None, :] | itself


def _real(X: Tensor, padding: Tensor | None) -> Tensor:
    """X with padded tokens replaced by real ones, detached; by zeros if a sequence has none."""
    # Padding may contain anything, and zero times NaN is NaN: it has to be replaced, not masked.
    # Zeros would move the centre that L2 subtracts away from the real tokens, and so would copies
    # of a single token: the replacements cycle through the real ones.
    if padding is None:
        return X
    check_padding(padding, X)
    n = X.shape[-2]
    count = padding.sum(dim=-1, keepdim=True)
    first = padding.byte().argsort(dim=-1, descending=True, stable=True)
    chosen = first.gather(-1, torch.arange(n, device=X.device) * count // n)
    others = torch.take_along_dim(X.detach(), chosen[..., None], dim=-2)
    others = others.masked_fill(count[..., None] == 0, 0)
    return torch.where(padding[..., None], X, others)


def check_tokens(X: Tensor, dim: int) -> None:
    """Check shape and dtype only: a test for finite entries would cost a sync in every step."""
    got = type(X).__name__
    if isinstance(X, Tensor):
        fits = X.ndim in (2, 3) and X.shape[-1] == dim and X.numel() > 0
        if fits and X.dtype.is_floating_point:
            return
        got = f"{X.dtype} {tuple(X.shape)}"
    raise UserError(f"the layer takes floating-point tokens [n, {dim}] or [B, n, {dim}], got {got}")


def check_padding(padding: Tensor, X: Tensor) -> None:
    got = type(padding).__name__
    if isinstance(padding, Tensor):
        if padding.dtype == torch.bool and padding.shape == X.shape[:-1]:
            return
        got = f"{padding.dtype} {tuple(padding.shape)}"
    raise UserError(
        f"padding must be a boolean tensor {list(X.shape[:-1])}, True for real tokens, "
        f"got {got}; for a tokenizer's attention_mask pass mask.bool(), for torch's "
        "key_padding_mask its negation ~mask"
    )


def check_finite(module: nn.Module) -> None:
    """Raise UserError if a weight is NaN or infinite."""
    for name, weight in module.named_parameters():
        if not weight.isfinite().all():
            raise UserError(
                f"the weight {name} is not finite, so no bound holds; look for NaN or inf in it"
            )


MOST_TOKENS = 2**63 - 1
"""The longest sequence that a bound is stated for: constants of large balls rest on it."""


def check_length(n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UserError(f"n, the number of tokens, must be an integer of at least 1, got {n!r}")
    if n > MOST_TOKENS:
        raise UserError(f"n, the number of tokens, must be below 2^63, got {abbreviate(n)}")


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
        """Return the largest sum of a column of P, per head."""
        # Scores lie in [-tau, tau]: a weight among m keys is at most 1 / (1 + (m - 1) e^(-2 tau)).
        seen = torch.arange(1, n + 1) if self.causal else torch.full((n,), n)
        others = (seen.double() - 1).to(tau.device)
        return (1 / (1 + others * torch.exp(-2 * tau)[:, None])).sum(dim=1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, eps={self.eps:g}"
