"""The largest coordinate: L2 attention bounded one absolute row sum of its Jacobian at a time.

Coordinate r of the output reads head h through the row w_h of O_h M_h, and a change x of a token
moves the queries of all heads by Q x. With q_h the largest |Q_h x|_2 over |x|_inf <= 1, q that of
all heads together, and w = (w_h), a row sum is at most each of

    sum_h  a |w_h Q_h|_1 + b_h q_h |w_h|_2
    |w Q|_1 / 2 + |(D_h w_h) Q|_1 / 6 + q (|c_h w_h|_2 + |D_h w_h|_2 / 3)        in balls only,

where a = 1, b = 4 phi for queries anywhere, a = 1/2, b = 1/2 + min(4 phi, 1.24 D) for queries in a
ball of size D, and c = e^(D/2) / 2 + (D Gamma)^(1/2). In the first, each head may react to tokens
of its own; the second knows that in a ball every head reads nearly all tokens alike. Lengths of
vectors take the place of most row sums of matrices. Proofs: docs/lipschitz_layers.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.nn.matrix_norms import spectral_upper
from lipscope.nn.query_ball import LARGE, score_limit


def longest_image(W: Tensor) -> Tensor:
    """An upper bound of max |W x|_2 over |x|_inf <= 1, for matrices W [..., p, q]; never 0."""
    p, q = W.shape[-2:]
    by_rows = W.abs().sum(dim=-1).norm(dim=-1) * (1 + (p + q) * torch.finfo(W.dtype).eps)
    found = torch.minimum(math.sqrt(q) * spectral_upper(W), by_rows)
    return found.clamp_min(math.sqrt(torch.finfo(W.dtype).tiny))


@dataclass(frozen=True)
class RowSums:
    """What bounds the row sums of a layer: a and b of this file, and the sizes of its balls.

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
        """The second bound of this file, for each row."""
        assert self.ball is not None
        D = self.ball.clamp_max(LARGE)
        Q = right.flatten(0, 1)
        c = (D / 2).exp() / 2 + (D * score_limit(D)).sqrt()
        centre = ((left / 2).flatten(1) @ Q).abs().sum(dim=-1)
        own = ((D[:, None] / 6 * left).flatten(1) @ Q).abs().sum(dim=-1)
        off = slack * (0.5 * math.sqrt(len(D)) + (D / 6).norm())
        around = (c * lengths).norm(dim=-1) + (D / 3 * lengths).norm(dim=-1) + off
        return centre + own + whole * around
