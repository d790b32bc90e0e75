"""Layers that are contractions for any weights, and the table of all attention layers by name."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from lipscope._checks import check_positive, name_bad_argument, norm_name
from lipscope._types import UserError
from lipscope.nn.attention_layer import AttentionLayer, CosineSelfAttention, DotSelfAttention
from lipscope.nn.l2_attention import (
    BALL,
    BallL2Attention,
    L2SelfAttention,
    balanced_factors,
    reaction,
    reactions,
    weight_factor,
)
from lipscope.nn.matrix_norms import of_norm, widened

STEEPEST = 0.5 * (1 + math.erf(1)) + math.exp(-1) / math.sqrt(math.pi)
"""The maximum slope of GELU, Phi(x) + x phi(x), attained at x = sqrt(2): about 1.129."""


class ContractiveL2Attention(L2SelfAttention):
    """L2 attention rescaled to a Lipschitz constant of at most `constant`, for any n and weights.

    The layer is L2 attention times constant / bound(n). The bound is recomputed from the weights in
    every pass, and gradients flow through it. With a `ball`, queries are projected as in
    `BallL2Attention`: its bound is smaller and does not depend on n, so the layer is several times
    stronger.

    Args:
        dim: Dimension of a token, a multiple of heads.
        heads: Number of heads.
        constant: The Lipschitz constant, positive.
        norm: The norm it holds in: "2" (Frobenius) or "inf" (largest coordinate).
        causal: Whether a token attends to itself and earlier tokens only.
        ball: Project the queries onto a ball in which scores differ by at most this; by default
            there is no ball.
        learn_ball: Learn the size of the ball of each head, starting from `ball`.

    Raises:
        UserError: If an argument is invalid, or learn_ball is given without a ball.

    Example:
        >>> import lipscope as ls
        >>> layer = ls.nn.ContractiveL2Attention(8, heads=2, constant=0.9)
        >>> layer.lipschitz_bound(n=5), layer.lipschitz_bound(n=5000)
        (0.9, 0.9)
    """

    @name_bad_argument
    def __init__(
        self,
        dim: int,
        heads: int,
        constant: float,
        norm: str | float = "2",
        causal: bool = False,
        ball: float | None = None,
        learn_ball: bool = False,
    ) -> None:
        super().__init__(dim, heads, causal)
        check_positive("constant", constant)
        self.constant = float(constant)
        self.norm = norm_name(norm)
        if ball is not None:
            self._project_queries(ball, learn_ball)
        elif learn_ball:
            raise UserError("learn_ball needs a ball to start from, such as ball=1.0")

    def value_map(self, n: int, padding: Tensor | None = None) -> Tensor:
        """M times constant / bound(n), differentiable in the weights; n counts real tokens only."""
        # The bound of the padded length would be valid as well, but the output for a sequence would
        # then depend on the lengths of the others in its batch.
        if self.norm == "inf":
            scores = math.inf if self.ball is not None else self._reaction(n, padding)
            measure = self._row_sums(scores).factors
            return self.constant * balanced_factors(*self._weights(), measure)
        if self.ball is not None:
            balanced = balanced_factors(*self._ball_weights())
            return self.constant * balanced / self._ball_constants()
        M = balanced_factors(*self._weights())
        bound = self._reaction(n, padding)
        if isinstance(bound, float):
            return self.constant / bound * M
        return (self.constant / bound)[..., None, None, None].to(M.dtype) * M

    def _reaction(self, n: int, padding: Tensor | None) -> float | Tensor:
        """Return the `reaction` of n tokens, or of each sequence by its number of real tokens."""
        kind = self.head_size, self.causal, self.norm
        if padding is None:
            return reaction(operator.index(n), *kind)
        return reactions(padding.sum(dim=-1), operator.index(n), *kind)

    def bound_tensor(self, n: int, norm: str | float = "2") -> Tensor:
        """`lipschitz_bound` as a differentiable function of the weights, up to rounding.

        In the layer's own norm it is `constant`, whatever the weights.
        """
        norm = norm_name(norm)
        if norm == self.norm:
            return widened(self.out.weight).new_tensor(self.constant)
        # One factor scales the layer in every norm.
        if self.ball is None:
            return self.constant * self._largest_quotient(operator.index(n), norm)
        return self.constant * super().bound_tensor(n, norm) / self._ball_bound(self.norm)

    def _bound(self, n: int, norm: str) -> float:
        bound = super()._bound(n, norm) * (1 + 1e-11)
        if norm == self.norm:
            return self.constant
        return bound if math.isfinite(bound) else math.inf

    def _largest_quotient(self, n: int, norm: str) -> Tensor:
        """Return the largest bound(m) in this norm over bound(m) in the layer's own, for m up to n.

        Of n tokens m may be real, the layer is scaled for these, and the quotient may fall with m.
        """
        first, last = zip(*_blocks(n), strict=True)
        ends = {norm: last, self.norm: first}  # both bounds grow with m
        reactions = {
            name: torch.tensor(
                [reaction(m, self.head_size, self.causal, name) for m in lengths],
                dtype=torch.float64,
                device=self.out.weight.device,
            )
            for name, lengths in ends.items()
        }
        found = {
            "2": weight_factor(*self._weights()) * reactions["2"],
            "inf": weight_factor(*self._weights(), self._row_sums(reactions["inf"]).factors),
        }
        return (found[norm] / found[self.norm]).max()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, constant={self.constant:g}, norm={self.norm}"


def _blocks(n: int) -> list[tuple[int, int]]:
    """Return the numbers 1 to n in blocks [first, last]: one by one, then growing by one in 32."""
    blocks = []
    first = 1
    while first <= n:
        last = min(n, first + first // 32)
        blocks.append((first, last))
        first = last + 1
    return blocks


class ContractiveMLP(nn.Module):
    """A two-layer MLP with Lipschitz constant at most `constant`, for any weights.

    It computes c W2 gelu(W1 x + b1) / (||W1|| ||W2|| max gelu') + b2 with c = `constant`. The norms
    are recomputed from the weights in every pass, as upper bounds, and gradients flow through them.

    Args:
        dim: Dimension of a token.
        hidden: Number of hidden units.
        constant: The Lipschitz constant, positive.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> mlp = ls.nn.ContractiveMLP(4, hidden=16, constant=0.5)
        >>> X, Y = torch.zeros(3, 4), torch.ones(3, 4)
        >>> bool((mlp(X) - mlp(Y)).norm() <= 0.5 * (X - Y).norm())
        True
    """

    @name_bad_argument
    def __init__(self, dim: int, hidden: int, constant: float) -> None:
        super().__init__()
        check_positive("constant", constant)
        self.constant = float(constant)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.offset = nn.Parameter(self.up.weight.new_zeros(dim))

    def forward(self, X: Tensor) -> Tensor:
        hidden = gelu(linear(X, of_norm(1.0, self.up.weight), self.up.bias))
        return linear(hidden, of_norm(self.constant / STEEPEST, self.down.weight), self.offset)

    def extra_repr(self) -> str:
        return f"constant={self.constant:g}"


Factory = Callable[[int, int, bool], AttentionLayer]

CONSTANT = 0.9
"""The constant of a contractive layer if only its name is given."""

CONTRACTIVE: dict[str, float | None] = {"contractive": None, "contractive-ball": BALL}
"""The layers that take a constant: name -> the ball that their queries are projected onto."""


def make_contractive(
    name: str, dim: int, heads: int, causal: bool, constant: float = CONSTANT
) -> ContractiveL2Attention:
    """Return the layer of this name in CONTRACTIVE."""
    return ContractiveL2Attention(dim, heads, constant, causal=causal, ball=CONTRACTIVE[name])


ATTENTIONS: dict[str, Factory] = {
    "dot": DotSelfAttention,
    "l2": L2SelfAttention,
    "ball": BallL2Attention,
    "contractive": lambda *sizes: make_contractive("contractive", *sizes),
    "contractive-ball": lambda *sizes: make_contractive("contractive-ball", *sizes),
    "cosine": CosineSelfAttention,
}
"""The attention layers by name: name -> factory(dim, heads, causal)."""
