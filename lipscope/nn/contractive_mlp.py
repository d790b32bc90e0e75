"""A feed-forward layer that is a contraction for any weights."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from lipscope._checks import check_positive
from lipscope.nn.matrix_norms import of_norm

STEEPEST = 0.5 * (1 + math.erf(1)) + math.exp(-1) / math.sqrt(math.pi)
"""The maximum slope of GELU, Phi(x) + x phi(x), attained at x = sqrt(2): about 1.129."""


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

    def __init__(self, dim: int, hidden: int, constant: float) -> None:
        super().__init__()
        check_positive("constant", constant)
        self.constant = float(constant)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)
        self.offset = nn.Parameter(self.up.weight.new_zeros(dim))

    def forward(self, X: Tensor) -> Tensor:
        hidden = gelu(linear(X, of_norm(1.0, self.up.weight), self.up.bias))
        return linear(hidden, of_norm(self.constant / STEEPEST, self.down.weight), self.offset)

    def extra_repr(self) -> str:
        return f"constant={self.constant:g}"
