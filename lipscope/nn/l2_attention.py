"""L2 attention (Kim, Papamakarios, Mnih 2021) and its Lipschitz constant.

f^h(X) = P X A_h W_V with A_h = W_Q W_Q' / sqrt(k) and P the softmax of
-|W_Q'(x_i - x_j)|^2 / sqrt(k). Queries and keys are tied: untied, a query may be far from its own
key, and no constant holds (docs/lipschitz_layers.md).

A head is M_h m(Q_h x), where m is L2 attention with identity weights, whose constant c(n) is a
theorem. All heads together are the composition of Q, m in each head, and O diag(M_h), so that

    Lip <= c(n) ||O diag(M_h / ||M_h||)|| ||diag(||M_h||) Q||,

in either norm, because scalars commute with M_h. It is at most the theorems'
||O|| (sum_h ||M_h||^2 ||Q_h||^2)^(1/2), or ||O|| max_h ||M_h|| ||Q_h|| for the largest coordinate,
since those bound the two factors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lipscope._checks import explained, norm_name
from lipscope._torch_internals import is_wrapped
from lipscope.attention.kernels import L2, augment
from lipscope.attention.layer import SelfAttention
from lipscope.nn.attention_layer import AttentionLayer, check_finite, check_length
from lipscope.nn.matrix_norms import FLOOR, row_sum, spectral_upper, unit, widened
from lipscope.nn.query_ball import BALL, QueryBall, radius, stretch
from lipscope.theorems.factored_values import FactoredAttention
from lipscope.theorems.heads import sight

F = TypeVar("F", bound=Callable[..., Any])

TINY = torch.finfo(torch.float32).tiny


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

    ball: QueryBall | None

    @explained
    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__(dim, heads, causal)
        self.query, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.ball = None

    @torch.no_grad()
    def _project_queries(self, ball: float, learned: bool) -> None:
        """Give the layer a ball, and initial weights that make use of it."""
        self.ball = QueryBall(self.heads, ball, learned)
        # Tokens of unit variance have queries of length sqrt(k / 3) with torch's initial weights.
        # Outside the ball a layer no longer sees how long they are: start with most of them inside,
        # and values as large as before.
        inside = min(1.0, radius(ball, self.head_size) / math.sqrt(self.head_size / 3))
        self.query.weight.mul_(inside)
        self.value.weight.div_(inside**2)

    def project(self, X: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        y = self.split(self.query(X))
        y = y if self.ball is None else self.ball(y)
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

    def bound_tensor(self, n: int, norm: str | float = "2") -> Tensor:
        """The bound as a differentiable function of the weights; never below `lipschitz_bound`."""
        norm = norm_name(norm)
        # Under torch.compile n may be symbolic; the theorem needs an int.
        constant = reaction(operator.index(n), self.head_size, self.causal, norm)
        bound = constant * weight_factor(*self._weights(), norm)
        if self.ball is None:
            return bound
        # What holds for all queries holds for those in a ball; then there is the projection.
        anywhere = stretch(self.head_size, norm) * bound
        return torch.minimum(anywhere, weight_factor(*self._ball_weights(norm), norm))

    def _ball_weights(self, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        """The weights with the constant of each head in a ball multiplied into its values."""
        Q, V, O = self._weights()
        return Q, widened(V) * self._ball_constants(norm), O

    def _ball_constants(self, norm: str) -> Tensor:
        """[heads, 1, 1]."""
        assert self.ball is not None
        device = self.out.weight.device
        return self.ball.constants(self.head_size, self.causal, norm, device)[:, None, None]

    def _bound(self, n: int, norm: str) -> float:
        check_finite(self)
        return self.bound_tensor(n, norm).item() * (1 + 1e-12)

    def as_map(self, n: int) -> SelfAttention:
        check_length(n)
        # A projection onto a ball is not linear: the base class says so.
        return self.unprojected(n) if self.ball is None else super().as_map(n)

    @torch.no_grad()
    def unprojected(self, n: int) -> FactoredAttention:
        """The layer on n real tokens as a closed-form map, without the ball if it has one."""
        Q, _, O = self._weights()
        # In float32 at least: the constant of the layer is wanted, not that of its rounding.
        dtype = torch.promote_types(O.dtype, torch.float32)
        M = widened(self.value_map(n)).to(dtype)
        V = (widened(M) @ widened(Q)).flatten(0, 1).to(dtype)
        Q, O = (W.to(dtype, copy=True) for W in (Q.flatten(0, 1), O))
        return FactoredAttention(Q, Q, V, O, heads=self.heads, causal=self.causal, kernel=L2(), M=M)


class BallL2Attention(L2SelfAttention):
    """L2 attention of queries projected onto a ball: a constant that does not grow with n.

    Each head projects its queries, which are its keys, onto a ball before it compares them. Scores
    in a row then differ by at most `ball`, so a weight is at most e^ball times any other: a smaller
    ball makes attention smoother and less selective.

    Args:
        dim: Dimension of a token, a multiple of heads.
        heads: Number of heads.
        causal: Whether a token attends to itself and earlier tokens only.
        ball: The largest difference of scores in a row.
        learn_ball: Learn the size of the ball of each head, starting from `ball`.

    Example:
        >>> import lipscope as ls
        >>> layer = ls.nn.BallL2Attention(8, heads=2)
        >>> layer.lipschitz_bound(n=1_000) == layer.lipschitz_bound(n=1_000_000)
        True
    """

    @explained
    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = False,
        ball: float = BALL,
        learn_ball: bool = False,
    ) -> None:
        super().__init__(dim, heads, causal)
        self._project_queries(ball, learn_ball)


def value_factors(Q: Tensor, V: Tensor) -> Tensor:
    """M [heads, k, k] such that the values are M_h times the queries: M_h = W_V' W_Q / sqrt(k)."""
    return V @ Q.mT * _gain(Q)


def _gain(Q: Tensor) -> float:
    return 3 * math.sqrt(Q.shape[-1] / Q.shape[-2])


def weight_factor(Q: Tensor, V: Tensor, O: Tensor, norm: str) -> Tensor:
    """The factor of the weights Q, V [heads, k, dim], O [dim, heads k]; rounded up, never 0."""
    with torch.autocast(O.device.type, enabled=False):
        (Q, q), (V, v), (O, o) = (_unit(W) for W in (Q, V, O))
        left, right = _factors(Q, V, O, norm, Q.new_full((), TINY))
        return (left * right * q * (q * v) * o).clamp_min(TINY)


def balanced_factors(Q: Tensor, V: Tensor, O: Tensor, norm: str) -> Tensor:
    """M divided by the factor of the weights: with O and Q unchanged, the constant is at most c(n).

    In float64, for weights of any size.
    """
    # The sizes of V and O cancel before anything is multiplied, so nothing can overflow. Below
    # FLOOR they no longer cancel: zero weights then give the zero map, with a finite gradient.
    with torch.autocast(O.device.type, enabled=False):
        (Q, q), (V, v), (O, o) = (_unit(W) for W in (Q, V, O))
        long_q = Q.norm(dim=(1, 2)).clamp_min(FLOOR / q)
        least = _gain(Q) * FLOOR / v * long_q
        left, right = _factors(Q, V, O, norm, least)
        right = right.clamp_min((least * long_q).amin())
        return value_factors(Q, V) / right / torch.maximum(left, FLOOR / o) / q / o


def _unit(W: Tensor) -> tuple[Tensor, Tensor]:
    W, size = unit(widened(W), tuple(range(W.ndim)))
    return W, size.flatten()[0]


def _factors(Q: Tensor, V: Tensor, O: Tensor, norm: str, least: Tensor) -> tuple[Tensor, Tensor]:
    """||O diag(M_h / m_h)|| and ||diag(m_h) Q||, rounded up, with m_h = max(||M_h||, least)."""
    measure = row_sum if norm == "inf" else spectral_upper
    # ||E||_F sqrt(dim) bounds a matrix E of rounding errors in both norms, and the Frobenius norms
    # of the factors bound the rounding errors of their product.
    rounding = 4 * O.shape[0] ** 1.5 * torch.finfo(O.dtype).eps
    size = _gain(Q) * V.norm(dim=(1, 2)) * Q.norm(dim=(1, 2))
    M = value_factors(Q, V)
    own = measure(M) + rounding * size
    m = torch.maximum(own, least)
    left = (
        (O.unflatten(1, Q.shape[:2]).transpose(0, 1) @ (M / m[:, None, None]))
        .transpose(0, 1)
        .flatten(1)
    )
    right = (m[:, None, None] * Q).flatten(0, 1)
    # Where m_h exceeds ||M_h||, the left factor must not become smaller for it.
    short = (1 - own / m).amax()
    return measure(left) + O.norm() * (rounding * (size / m).norm() + short), measure(right)


def _constant_for_the_compiler(function: F) -> F:
    """Mark a function as torch.compiler.assume_constant_result does."""
    # Calling that function here would import the compiler, and Triton with it.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read by the compiler
    return function


@_constant_for_the_compiler
def reaction(n: int, size: int, causal: bool, norm: str) -> float:
    """c(n): the theorems' constant for identity weights and heads of this size."""
    return _reaction(n, size, causal, norm)


@_constant_for_the_compiler
def _every_reaction(n: int, size: int, causal: bool, norm: str) -> tuple[float, ...]:
    return tuple(_reaction(max(m, 1), size, causal, norm) for m in range(n + 1))


def reactions(counts: Tensor, n: int, size: int, causal: bool, norm: str) -> Tensor:
    """The `reaction` of each count from 0 to n, as a tensor of the shape of counts."""
    # Under the compiler and in functorch the counts cannot be read: look them up in a table of all.
    if not torch.compiler.is_compiling() and not is_wrapped(counts):
        known = [reaction(max(m, 1), size, causal, norm) for m in counts.flatten().tolist()]
        return torch.tensor(known, dtype=torch.float64).reshape(counts.shape).to(counts.device)
    table = torch.tensor(_every_reaction(n, size, causal, norm), dtype=torch.float64)
    return table.to(counts.device)[counts]


@lru_cache(maxsize=4096)
def _reaction(n: int, size: int, causal: bool, norm: str) -> float:
    from lipscope.theorems.kim2021 import coordinate_reaction  # loads SciPy
    from lipscope.theorems.sharper import distance_reaction

    one = torch.ones(1, 1, dtype=torch.float64, device="cpu")  # whatever the default device is
    seen = sight(SelfAttention(one, one, one, causal=causal), n)
    return coordinate_reaction(seen, size) if norm == "inf" else distance_reaction(seen, size)
