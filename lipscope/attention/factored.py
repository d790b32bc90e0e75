"""L2 attention whose values factor through the queries, V = M Q in every head."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import L2
from lipscope.linalg.differentiate import check_one_device


@dataclass(frozen=True, eq=False)
class FactoredAttention(SelfAttention):
    """L2 attention whose values are, by definition, `M_h` times the queries.

    The values are computed from the queries instead of the stored `V`, so that a rounding error of
    `V` is never multiplied by the size of the tokens. Only then does the layer have a Lipschitz
    constant over all inputs.

    Args:
        M: Shape `[heads, m, k]`, keyword only. All other arguments are those of `SelfAttention`,
            with `V = M_h Q_h` in every head (up to rounding), an `L2` kernel and no biases.

    Raises:
        UserError: If `V` is not `M Q`, or the kernel, the heads or the biases do not fit.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> Q = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        >>> M = torch.tensor([[[3.0]]], dtype=torch.float64)
        >>> f = ls.theorems.FactoredAttention(Q, Q, 3 * Q, kernel=ls.L2(), M=M)
        >>> [row.name for row in ls.bounds(f, ls.Everywhere(n=4)) if row.kind == "upper"]
        ['Kim et al., L2 attention', 'L2 attention']
    """

    M: Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = (self.heads, self.V.shape[0] // self.heads, self.Q.shape[0] // self.heads)
        biased = any(bias is not None for bias in self.biases or ())
        if not isinstance(self.kernel, L2) or self.groups != self.heads or biased:
            raise UserError(
                "FactoredAttention needs an L2 kernel, as many key heads as query heads, "
                "and no biases"
            )
        if tuple(self.M.shape) != shape or self.M.dtype != self.Q.dtype:
            expected = f"shape [heads, m, k] = {shape} and the dtype of Q, {self.Q.dtype}"
            raise UserError(f"M must have {expected}, got {tuple(self.M.shape)} of {self.M.dtype}")
        check_one_device("Q", self.Q, M=self.M)
        Q, V = (W.unflatten(0, (self.heads, -1)).double() for W in (self.Q, self.V))
        M = self.M.double()
        # Loose enough for values rounded to bfloat16. A product that overflows is not compared.
        if ((V - M @ Q).norm(dim=(1, 2)) > 2**-6 * (M.norm(dim=(1, 2)) * Q.norm(dim=(1, 2)))).any():
            raise UserError("V is not M Q; pass V = M_h Q_h, head by head")

    def project(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, _ = super().project(X)
        return q, k, q @ self.M.mT

    def head(self, h: int) -> FactoredAttention:
        one = SelfAttention(**_parts(self)).head(h)
        return FactoredAttention(**_parts(one) | {"biases": None}, M=self.M[h : h + 1])


def _parts(f: SelfAttention) -> dict[str, Any]:
    return {part.name: getattr(f, part.name) for part in fields(SelfAttention)}
