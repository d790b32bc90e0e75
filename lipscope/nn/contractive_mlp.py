"""A feed-forward layer that is a contraction, whatever its weights are."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from lipscope._checks import check_positive
from lipscope.nn.matrix_norms import of_norm

STEEPEST = 0.5 * (1 + math.erf(1)) + math.exp(-1) / math.sqrt(math.pi)
"""The largest slope of GELU, Phi(x) + x phi(x), attained at x = sqrt(2): about 1.129."""


class ContractiveMLP(nn.Module):
    """x -> c W2 gelu(W1 x + b1) / (||W1|| ||W2|| max gelu') + b2: its Lipschitz constant is at most c = `constant`.

    The norms are taken anew from the weights in every pass, from above, and gradients flow through them.
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
