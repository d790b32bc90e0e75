"""L2 attention (Kim, Papamakarios, Mnih 2021) as a layer, and its Lipschitz constant.

f^h(X) = P X A_h W_V with A_h = W_Q W_Q' / sqrt(k) and P the softmax of
-|W_Q'(x_i - x_j)|^2 / sqrt(k). Queries and keys are tied: untied, a query may be far from its own
key, and no constant holds. A head is M_h m(Q_h x), where m is L2 attention with identity weights,
whose constant c(n) is a theorem, and c(n) ||O diag(M_h / ||M_h||)|| ||diag(||M_h||) Q|| bounds all
heads together. For queries in a ball the constant does not depend on n, and the largest coordinate
is bounded one row sum of the Jacobian at a time: docs/lipschitz_layers.md has formulas and proofs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lipscope._checks import check_positive, name_bad_argument, norm_name
from lipscope._types import UserError
from lipscope.attention.layer import FactoredAttention, SelfAttention
from lipscope.attention.scores import L2, augment
from lipscope.fused._torch_internals import is_wrapped
from lipscope.nn.attention_layer import AttentionLayer, check_finite, check_length
from lipscope.nn.matrix_norms import FLOOR, spectral_upper, unit, widened
from lipscope.theorems.statement import visibility

F = TypeVar("F", bound=Callable[..., Any])

GAIN = 3.0
"""W_V of the paper is GAIN sqrt(dim) times the weight of `value`."""

TINY = torch.finfo(torch.float32).tiny

Measure = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Two factors, from the rows of O diag(M_h / m_h) [rows, heads, k], diag(m_h) Q [heads, k, dim] and
the slack of the former."""


def value_factors(Q: Tensor, V: Tensor) -> Tensor:
    """M [heads, k, k] such that the values are M_h times the queries: M_h = W_V' W_Q / sqrt(k)."""
    return V @ Q.mT * _gain(Q)


def _gain(Q: Tensor) -> float:
    return GAIN * math.sqrt(Q.shape[-1] / Q.shape[-2])


def spectral_factors(left: Tensor, right: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
    """||O diag(M_h / m_h)|| and ||diag(m_h) Q||, rounded up."""
    return spectral_upper(left.flatten(1)) + slack, spectral_upper(right.flatten(0, 1))


def weight_factor(Q: Tensor, V: Tensor, O: Tensor, measure: Measure = spectral_factors) -> Tensor:
    """The factor of the weights Q, V [heads, k, dim], O [dim, heads k]; rounded up, never 0."""
    with torch.autocast(O.device.type, enabled=False):
        (Q, q), (V, v), (O, o) = (_unit(W) for W in (Q, V, O))
        left, right = measure(*_halves(Q, V, O, Q.new_full((), TINY)))
        return (left * right * q * (q * v) * o).clamp_min(TINY)


def balanced_factors(
    Q: Tensor, V: Tensor, O: Tensor, measure: Measure = spectral_factors
) -> Tensor:
    """M divided by the factor of the weights: with O and Q unchanged, the layer has the factor 1.

    In float64, for weights of any size; [..., heads, k, k] if `measure` gives several factors.
    """
    # The result may be rounded to float32. It allows for that in every dtype, so that a layer and
    # its copy in float64, with which errors are measured, are the same map.
    eps = torch.finfo(torch.float32).eps
    # The sizes of V and O cancel before anything is multiplied, so nothing can overflow. Below
    # FLOOR they no longer cancel: zero weights then give the zero map, with a finite gradient.
    with torch.autocast(O.device.type, enabled=False):
        (Q, q), (V, v), (O, o) = (_unit(W) for W in (Q, V, O))
        long_q = Q.norm(dim=(1, 2)).clamp_min(FLOOR / q)
        least = _gain(Q) * FLOOR / v * long_q
        rows, queries, slack = _halves(Q, V, O, least)
        # Rounding M moves O M by up to this share of |O| |M|, however small O M itself is.
        slack = slack + 2 * math.sqrt(Q.shape[1]) * eps * O.norm()
        left, right = measure(rows, queries, slack)
        right = right.clamp_min((least * long_q).amin())
        left = torch.maximum(left, FLOOR / o)[..., None, None, None]
        return value_factors(Q, V) / right / left / q / o


def _unit(W: Tensor) -> tuple[Tensor, Tensor]:
    W, size = unit(widened(W), tuple(range(W.ndim)))
    return W, size.flatten()[0]


def _halves(Q: Tensor, V: Tensor, O: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """O diag(M_h / m_h) by heads, diag(m_h) Q, m_h = max(||M_h||, least), and slack for the first.

    Each block of a row of the first is off by at most the slack in length.
    """
    # ||E||_F dim bounds a matrix E of rounding errors in both norms, and the Frobenius norms
    # of the factors bound the rounding errors of their product.
    rounding = 4 * O.shape[0] ** 2 * torch.finfo(O.dtype).eps
    size = _gain(Q) * V.norm(dim=(1, 2)) * Q.norm(dim=(1, 2))
    M = value_factors(Q, V)
    own = spectral_upper(M) + rounding * size
    m = torch.maximum(own, least)
    left = O.unflatten(1, Q.shape[:2]).transpose(0, 1) @ (M / m[:, None, None])
    # Where m_h exceeds ||M_h||, the left factor must not become smaller for it.
    short = (1 - own / m).amax()
    slack = O.norm() * (rounding * (size / m).norm() + short)
    return left.transpose(0, 1), m[:, None, None] * Q, slack


def _constant_for_the_compiler(function: F) -> F:
    """Mark a function as torch.compiler.assume_constant_result does."""
    # Calling that function here would import the compiler, and Triton with it.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read by the compiler
    return function


@_constant_for_the_compiler
def reaction(n: int, size: int, causal: bool, norm: str) -> float:
    """c(n) in norm 2, for heads of this size; the largest reaction 4 phi of the scores in norm inf.

    Both are theorems about identity weights.
    """
    return _reaction(n, size, causal, norm)


@_constant_for_the_compiler
def _every_reaction(n: int, size: int, causal: bool, norm: str) -> tuple[float, ...]:
    return tuple(_reaction(max(m, 1), size, causal, norm) for m in range(n + 1))


def reactions(counts: Tensor, n: int, size: int, causal: bool, norm: str) -> Tensor:
    """Return the `reaction` of each count from 0 to n, as a tensor of the shape of counts."""
    # Under the compiler and in functorch the counts cannot be read: look them up in a table of all.
    if not torch.compiler.is_compiling() and not is_wrapped(counts):
        known = [reaction(max(m, 1), size, causal, norm) for m in counts.flatten().tolist()]
        return torch.tensor(known, dtype=torch.float64).reshape(counts.shape).to(counts.device)
    table = torch.tensor(_every_reaction(n, size, causal, norm), dtype=torch.float64)
    return table.to(counts.device)[counts]


@lru_cache(maxsize=4096)
def _reaction(n: int, size: int, causal: bool, norm: str) -> float:
    from lipscope.theorems.kim2021 import phi_inverse  # loads SciPy
    from lipscope.theorems.sharper import distance_reaction

    one = torch.ones(1, 1, dtype=torch.float64, device="cpu")  # whatever the default device is
    seen = visibility(SelfAttention(one, one, one, causal=causal), n)
    return 4 * phi_inverse(seen.most_keys) if norm == "inf" else distance_reaction(seen, size)


BALL = 1.0
"""The size D of a ball by default: the attention that survives the scaling to a given constant,
D / constant(D), is largest near 1 without a mask and with the causal one."""

LARGE = 60.0
"""A larger ball has the constant of this one, 6e13 or more.

Hypothesis: n <= MOST_TOKENS. L2 attention without a ball then has a constant of at most
sqrt(n) (4 phi(n) + 1) < 5e11 for heads of any size (Kim et al. 2021), and with a ball no more: the
projection moves no two queries apart. `check_length` refuses longer sequences.
"""


def radius(ball: float, size: int) -> float:
    """rho of a ball of size D in a head of this size."""
    return math.sqrt(ball * math.sqrt(size)) / 2


def score_limit(D: Tensor) -> Tensor:
    """Gamma: m P_ij d_ij times the variance of row i in units of rho^2 is at most this.

    m is the number of keys that query i sees, d_ij <= D the squared distances of the scores.
    """
    # With r the length of the mean of row i over rho, the variance is at most 1 - r^2, the mean of
    # d at most D (1 + r) / 2, and m / Z_i, the mean of e^d, at most that of the chord of e^d on
    # [0, D]: (e^D + 1) / 2 (1 + t r) with t = tanh(D/2). The maximum over r is at the r below.
    t = (D / 2).tanh()
    r = t / (1 + (1 + 3 * t.square()).sqrt())
    # (e^D + 1) / 2 times the maximum of d e^-d on [0, D].
    half = torch.where(D <= 1, D * (1 + (-D).exp()), (D - 1).exp() + math.exp(-1)) / 2
    return half * (1 - r.square()) * (1 + t * r)


class QueryBall(nn.Module):
    """Project the queries of every head onto a ball, of fixed size D or learned per head."""

    log_size: nn.Parameter | None

    def __init__(self, heads: int, size: float, learned: bool) -> None:
        super().__init__()
        check_positive("ball", size)
        self.heads = heads
        self.size = float(size)
        start = torch.full((heads,), math.log(size)) if learned else None
        self.register_parameter("log_size", None if start is None else nn.Parameter(start))

    def sizes(self, device: torch.device) -> Tensor:
        """D of each head, in float64 where available."""
        if self.log_size is None:
            wide = torch.float32 if device.type == "mps" else torch.float64
            return torch.full((self.heads,), self.size, dtype=wide, device=device)
        return widened(self.log_size).exp()

    def forward(self, y: Tensor) -> Tensor:
        """y [..., heads, n, k] with longer rows shortened to the radius of their head."""
        # In 16 bits the squares would overflow, and in any dtype those of large tokens: divide by
        # the largest coordinate first. Inside the ball y is returned, whatever it was divided by.
        wide = y if y.dtype in (torch.float32, torch.float64) else y.float()
        rho = radius(1.0, y.shape[-1]) * self.sizes(y.device).sqrt()[:, None, None].to(wide.dtype)
        largest = torch.maximum(wide.abs().amax(dim=-1, keepdim=True), rho).detach()
        z = wide / largest
        squares = torch.maximum(z.square().sum(dim=-1, keepdim=True), (rho / largest).square())
        return (rho * z * squares.rsqrt()).to(y.dtype)

    def constants(self, causal: bool, device: torch.device) -> Tensor:
        """Return the constant in a ball of each head in norm 2, rounded up."""
        D = self.sizes(device).clamp_max(LARGE)
        if causal:
            g = torch.where(D <= 1, D, (D - 1).exp())
            values = (2 * D.exp() * (1 + (D / 2).exp())).sqrt()
            found = values + D / 2 + (8 * D * g).sqrt() * (D / 4).exp()
        else:
            found = (1 + ((D / 2).sinh() + (2 * D * score_limit(D)).sqrt()).square()).sqrt()
        return found * (1 + 32 * torch.finfo(D.dtype).eps * (1 + D.detach()))

    def extra_repr(self) -> str:
        return f"size={self.size:g}" if self.log_size is None else "learned"


def longest_image(W: Tensor) -> Tensor:
    """An upper bound of max |W x|_2 over |x|_inf <= 1, for matrices W [..., p, q]; never 0."""
    p, q = W.shape[-2:]
    by_rows = W.abs().sum(dim=-1).norm(dim=-1) * (1 + (p + q) * torch.finfo(W.dtype).eps)
    found = torch.minimum(math.sqrt(q) * spectral_upper(W), by_rows)
    return found.clamp_min(math.sqrt(torch.finfo(W.dtype).tiny))


@dataclass(frozen=True)
class RowSums:
    """What bounds a row sum: a |w_h Q_h|_1 + b_h q_h |w_h|_2 over heads, or less within balls."""

    values: float  # a
    scores: Tensor  # b, [..., 1] or [..., heads]; leading dimensions give one bound each
    ball: Tensor | None = None  # the size D of each head's ball, [heads]

    def factors(self, left: Tensor, right: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
        """Two factors whose product bounds every row sum of Q = right, w = left up to slack."""
        q = longest_image(right)
        whole = longest_image(right.flatten(0, 1))
        lengths = left.norm(dim=-1) + slack
        # |w_h Q_h|_1 without forming w_h Q_h, which would take heads dim^2 numbers.
        through = torch.einsum("rhk,hk->rh", left.abs(), right.abs().sum(dim=-1)) + slack * q
        heads = self.values * torch.minimum(through, lengths * q)
        found = (heads + self.scores[..., None, :] * lengths * q).sum(dim=-1)
        if self.ball is not None:
            found = torch.minimum(found, self._in_balls(left, right, lengths, slack, whole))
        rounding = 4 * sum(right.shape) * torch.finfo(right.dtype).eps
        return found.amax(dim=-1) / whole * (1 + rounding), whole

    def _in_balls(
        self, left: Tensor, right: Tensor, lengths: Tensor, slack: Tensor, whole: Tensor
    ) -> Tensor:
        """Return the second bound on row sums, for each row."""
        assert self.ball is not None
        D = self.ball.clamp_max(LARGE)
        Q = right.flatten(0, 1)
        c = (D / 2).exp() / 2 + (D * score_limit(D)).sqrt()
        centre = ((left / 2).flatten(1) @ Q).abs().sum(dim=-1)
        own = ((D[:, None] / 6 * left).flatten(1) @ Q).abs().sum(dim=-1)
        off = slack * (0.5 * math.sqrt(len(D)) + (D / 6).norm())
        around = (c * lengths).norm(dim=-1) + (D / 3 * lengths).norm(dim=-1) + off
        return centre + own + whole * around


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
