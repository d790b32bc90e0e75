"""L2 attention (Kim, Papamakarios, Mnih 2021) as a layer; its constant: l2_constants.py.

f^h(X) = P X A_h W_V with A_h = W_Q W_Q' / sqrt(k) and P the softmax of
-|W_Q'(x_i - x_j)|^2 / sqrt(k). Queries and keys are tied: untied, a query may be far from its own
key, and no constant holds (docs/lipschitz_layers.md).
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, nn

from lipscope._checks import name_bad_argument, norm_name
from lipscope._types import UserError
from lipscope.attention.layer import FactoredAttention, SelfAttention
from lipscope.attention.scores import L2, augment
from lipscope.nn.attention_layer import AttentionLayer, check_finite, check_length
from lipscope.nn.l2_constants import (
    BALL,
    GAIN,
    QueryBall,
    RowSums,
    radius,
    reaction,
    value_factors,
    weight_factor,
)
from lipscope.nn.matrix_norms import widened


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

    @name_bad_argument
    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__(dim, heads, causal)
        self.query, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.ball = None

    @classmethod
    @name_bad_argument
    @torch.no_grad()
    def from_kim2021(
        cls, W_Q: Tensor, W_V: Tensor, W_O: Tensor, causal: bool = False
    ) -> L2SelfAttention:
        """Make the layer of the weights of Kim et al., who multiply tokens from the left.

        Their layer is [f^1(X), ..., f^H(X)] W_O with f^h(X) = P X W_Q W_Q' / sqrt(k) W_V and P the
        softmax of -|(x_i - x_j) W_Q|^2 / sqrt(k). The weight of `value` is W_V' / (3 sqrt(dim)).

        Args:
            W_Q: Queries, which are the keys, of shape [heads, dim, k], k = dim / heads.
            W_V: Values, of the same shape.
            W_O: Output, of shape [dim, dim].
            causal: Whether a token attends to itself and earlier tokens only.

        Returns:
            The layer, in the dtype and on the device of W_O.

        Raises:
            UserError: If the shapes do not fit together.
        """
        heads, dim, size = W_Q.shape if W_Q.ndim == 3 else (0, 0, 0)
        if not dim or heads * size != dim or W_V.shape != W_Q.shape or W_O.shape != (dim, dim):
            raise UserError(
                "W_Q and W_V must have shape [heads, dim, dim / heads] and W_O [dim, dim], got "
                f"{tuple(W_Q.shape)}, {tuple(W_V.shape)} and {tuple(W_O.shape)}"
            )
        layer = cls(dim, heads, causal).to(W_O.device, W_O.dtype)
        layer.query.weight.copy_(W_Q.mT.flatten(0, 1))
        layer.value.weight.copy_(W_V.mT.flatten(0, 1) / (GAIN * math.sqrt(dim)))
        layer.out.weight.copy_(W_O.mT)
        return layer

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
        """Return the weights of query and value per head, [heads, k, dim], and of out."""
        Q, V = (part.weight.unflatten(0, (self.heads, -1)) for part in (self.query, self.value))
        return Q, V, self.out.weight

    def bound_tensor(self, n: int, norm: str | float = "2") -> Tensor:
        """`lipschitz_bound` as a differentiable function of the weights, up to rounding."""
        norm = norm_name(norm)
        # Under torch.compile n may be symbolic; the theorem needs an int.
        constant = reaction(operator.index(n), self.head_size, self.causal, norm)
        if norm == "inf":
            return weight_factor(*self._weights(), self._row_sums(constant).factors)
        bound = constant * weight_factor(*self._weights())
        # What holds for all queries holds for those in a ball.
        return bound if self.ball is None else torch.minimum(bound, self._ball_bound("2"))

    def _ball_bound(self, norm: str) -> Tensor:
        """Return the bound for queries in a ball, the same for all n."""
        if norm == "inf":
            return weight_factor(*self._weights(), self._row_sums(math.inf).factors)
        return weight_factor(*self._ball_weights())

    def _row_sums(self, scores: float | Tensor) -> RowSums:
        """How to bound rows of the Jacobian if scores react with at most `scores` to a query."""
        # Sums of weights are in float64, except on devices without it.
        device = self.out.weight.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        limit = torch.as_tensor(scores, dtype=wide, device=device)[..., None]
        if self.ball is None:
            return RowSums(values=1.0, scores=limit)
        D = self.ball.sizes(device)
        return RowSums(values=0.5, scores=0.5 + torch.minimum(1.24 * D, limit), ball=D)

    def _ball_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weights with the constant of each head in a ball multiplied into its values."""
        Q, V, O = self._weights()
        return Q, widened(V) * self._ball_constants(), O

    def _ball_constants(self) -> Tensor:
        """[heads, 1, 1], in norm 2."""
        assert self.ball is not None
        return self.ball.constants(self.causal, self.out.weight.device)[:, None, None]

    def _bound(self, n: int, norm: str) -> float:
        check_finite(self)
        return self.bound_tensor(n, norm).item() * (1 + 1e-12)

    def as_map(self, n: int) -> SelfAttention:
        check_length(n)
        # A projection onto a ball is not linear: the base class says so.
        return self.unprojected(n) if self.ball is None else super().as_map(n)

    @torch.no_grad()
    def unprojected(self, n: int) -> FactoredAttention:
        """Return the layer on n real tokens as a closed-form map, without its ball if any."""
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

    @name_bad_argument
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
