"""The Lipschitz constant of L2 attention, as a differentiable function of its weights.

Anywhere. A head is M_h m(Q_h x), where m is L2 attention with identity weights, whose constant c(n)
is a theorem. All heads together are the composition of Q, m in each head, and O diag(M_h), so that

    Lip <= c(n) ||O diag(M_h / ||M_h||)|| ||diag(||M_h||) Q||

in norm 2, because scalars commute with M_h. It is at most the theorem's
||O|| (sum_h ||M_h||^2 ||Q_h||^2)^(1/2), since that bounds the two factors.

In a ball. Let the tied queries and keys y lie in a ball of radius rho, and let D = 4 rho^2 /
sqrt(k) be the largest squared distance in units of the scores. Then every weight in a row is at
most e^D times any other, and L2 attention with identity weights has, for every number n of tokens,
the constant

    (1 + b^2)^(1/2),  b = sinh(D/2) + (2 D Gamma)^(1/2),  Gamma(D) as in `score_limit`

without a mask, at most e^(D/2) (1 + D) + D/2, and

    (2 e^D (1 + e^(D/2)))^(1/2) + D/2 + (8 D g)^(1/2) e^(D/4),  g = D if D <= 1, else e^(D-1)

with the causal one. The projection is included: it moves no two queries apart.

The largest coordinate is bounded one absolute row sum of the Jacobian at a time. Coordinate r of
the output reads head h through the row w_h of O_h M_h, and a change x of a token moves the queries
of all heads by Q x. With q_h the largest |Q_h x|_2 over |x|_inf <= 1, q that of all heads together,
and w = (w_h), a row sum is at most each of

    sum_h  a |w_h Q_h|_1 + b_h q_h |w_h|_2
    |w Q|_1 / 2 + |(D_h w_h) Q|_1 / 6 + q (|c_h w_h|_2 + |D_h w_h|_2 / 3)        in balls only,

where a = 1, b = 4 phi for queries anywhere, a = 1/2, b = 1/2 + min(4 phi, 1.24 D) for queries in a
ball of size D, and c = e^(D/2) / 2 + (D Gamma)^(1/2). In the first, each head may react to tokens
of its own; the second uses that in a ball every head reads nearly all tokens alike. Lengths of
vectors take the place of most row sums of matrices. Proofs: docs/lipschitz_layers.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lipscope._checks import check_positive
from lipscope.attention.layer import SelfAttention
from lipscope.fused._torch_internals import is_wrapped
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
    """Project the queries of every head onto a ball, of fixed size or learned per head.

    size: the D of this file, a number, or the initial one if `learned`
    """

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
    """The numbers that bound the row sums of a layer: a, b and the sizes D of its balls.

    scores: b, [..., 1] or [..., heads]; leading dimensions give one bound each
    ball: D of each head [heads], or None
    """

    values: float
    scores: Tensor
    ball: Tensor | None = None

    def factors(self, left: Tensor, right: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
        """Two factors whose product bounds every row sum.

        left: the rows w [rows, heads, k], each w_h wrong by at most slack
        right: Q [heads, k, dim]
        """
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
