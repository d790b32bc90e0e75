"""Queries projected onto a ball: L2 attention whose constant does not grow with n.

Let the tied queries and keys y lie in a ball of radius rho, and let D = 4 rho^2 / sqrt(k) be the
largest squared distance in units of the scores. Then every weight in a row is at most e^D times any
other, and L2 attention with identity weights has, for every number n of tokens, the constant

    (1 + b^2)^(1/2),  b = sinh(D/2) + (2 D Gamma)^(1/2),  Gamma(D) as in `score_limit`

without a mask, at most e^(D/2) (1 + D) + D/2, and

    (2 e^D (1 + e^(D/2)))^(1/2) + D/2 + (8 D g)^(1/2) e^(D/4),  g = D if D <= 1, else e^(D-1)

with the causal one. The projection is included: it moves no two queries apart. For the largest
coordinate see row_sums.py. Proofs: docs/lipschitz_layers.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipscope._checks import check_positive
from lipscope.nn.matrix_norms import widened

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
        """The theorem of this file: one constant per head in norm 2, rounded up."""
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
