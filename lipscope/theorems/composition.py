"""Bounds for networks, part by part: norm layers, affine maps, attention, residuals and chains.

A part has a Lipschitz constant on a ball of tokens and maps it into another ball; constants
multiply along a chain and add over a residual branch. At a single input, measure the derivative of
the whole map instead: norm layers erase directions that a product of constants counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._types import Ball, Everywhere, UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import device_of
from lipscope.theorems.registry import bounds
from lipscope.theorems.rounding import frobenius_up, gamma, length_up, norm_up, up
from lipscope.theorems.statement import heads_of, hypotenuse


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """x -> weight * x / sqrt(|x|^2 / d + eps), token by token."""

    weight: Tensor
    eps: float

    def __call__(self, X: Tensor) -> Tensor:
        return self.weight * X / (X.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()

    def lipschitz(self, R: float, n: int) -> float:
        """max|weight| / sqrt(eps), attained at 0."""
        return _per_root(self.weight.double().abs().max().item(), self.eps)

    def radius(self, R: float) -> float:
        """sqrt(d) max|weight|; for small tokens R max|weight| / sqrt(eps)."""
        largest = self.weight.double().abs().max().item()
        return up(largest * min(math.sqrt(self.weight.numel()), _per_root(R, self.eps)))


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """x -> weight * (x - mean) / sqrt(variance + eps) + bias, token by token."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, X: Tensor) -> Tensor:
        centred = X - X.mean(dim=-1, keepdim=True)
        return (
            self.weight * centred / (centred.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()
            + self.bias
        )

    @cached_property
    def norm(self) -> float:
        """||diag(weight) (I - 11'/d)||."""
        d = self.weight.numel()
        one = torch.eye(d, dtype=torch.float64, device=self.weight.device)
        M = self.weight.double()[:, None] * (one - 1 / d)
        return up(norm_up(M).item() + gamma(8) * frobenius_up(M).item())

    def lipschitz(self, R: float, n: int) -> float:
        """||diag(weight) (I - 11'/d)|| / sqrt(eps), attained at constant tokens."""
        return _per_root(self.norm, self.eps)

    def radius(self, R: float) -> float:
        """sqrt(d) ||diag(weight) (I - 11'/d)|| + |bias|."""
        size = self.norm * min(math.sqrt(self.weight.numel()), _per_root(R, self.eps))
        return up(size + length_up(self.bias.double()).item())


@dataclass(frozen=True, eq=False)
class Affine:
    """x -> W x + b, token by token."""

    W: Tensor
    b: Tensor | None = None

    def __call__(self, X: Tensor) -> Tensor:
        return X @ self.W.T if self.b is None else X @ self.W.T + self.b

    def lipschitz(self, R: float, n: int) -> float:
        return norm_up(self.W.double()).item()

    def radius(self, R: float) -> float:
        return up(
            self.lipschitz(R, 1) * R
            + (0.0 if self.b is None else length_up(self.b.double()).item())
        )


@dataclass(frozen=True, eq=False)
class Pointwise:
    """An activation with function(0) = 0 whose slope is at most `slope` in absolute value."""

    function: Callable[[Tensor], Tensor]
    slope: float

    def __post_init__(self) -> None:
        device = device_of(self.function)
        if self.function(torch.zeros(1, dtype=torch.float32, device=device)).item() != 0:
            raise UserError(
                "Pointwise needs an activation with function(0) = 0; "
                "move the constant into the bias of the next affine map"
            )

    def __call__(self, X: Tensor) -> Tensor:
        return self.function(X)

    def lipschitz(self, R: float, n: int) -> float:
        return self.slope

    def radius(self, R: float) -> float:
        return up(self.slope * R)


@dataclass(frozen=True, eq=False)
class Attention:
    """A self-attention layer, bounded by the best theorem on a ball of tokens, or everywhere."""

    f: SelfAttention

    def __call__(self, X: Tensor) -> Tensor:
        return self.f(X)

    def lipschitz(self, R: float, n: int) -> float:
        rows = bounds(self.f, Ball(R, n) if math.isfinite(R) else Everywhere(n))
        return min((row.value for row in rows if row.kind == "upper"), default=math.inf)

    def radius(self, R: float) -> float:
        """The largest norm of an output token: a mean of values, each at most ||V|| R + |b_v|."""
        f = self.f.double()
        sizes = []
        for h in heads_of(f, folded=False):
            bv = h.one.biases[2] if h.one.biases else None
            sizes.append(h.factor * h.V_norm * R + (0.0 if bv is None else length_up(bv).item()))
        return up(hypotenuse(sizes) * (1.0 if f.O is None else norm_up(f.O).item()))


@dataclass(frozen=True, eq=False)
class Residual:
    """X -> X + inner(X)."""

    inner: Part

    def __call__(self, X: Tensor) -> Tensor:
        return X + self.inner(X)

    def lipschitz(self, R: float, n: int) -> float:
        return up(1 + self.inner.lipschitz(R, n))

    def radius(self, R: float) -> float:
        return up(R + self.inner.radius(R))


@dataclass(frozen=True, eq=False)
class Chain:
    """Parts applied one after the other, in order."""

    parts: tuple[Part, ...]

    def __call__(self, X: Tensor) -> Tensor:
        for part in self.parts:
            X = part(X)
        return X

    def lipschitz(self, R: float, n: int) -> float:
        total = 1.0
        # Each part is bounded on the ball that the parts before it map into.
        for part in self.parts:
            total = up(total * part.lipschitz(R, n))
            R = part.radius(R)
        # 0 * inf: a constant map after one without a constant.
        return math.inf if math.isnan(total) else total

    def radius(self, R: float) -> float:
        for part in self.parts:
            R = part.radius(R)
        return R


Part = RMSNorm | LayerNorm | Affine | Pointwise | Attention | Residual | Chain


@entry_point
def network_bound(part: Part, domain: Ball | Everywhere) -> float:
    """Return an upper bound of the 2-norm Lipschitz constant of a network.

    Args:
        part: A network built from the parts of `lipscope.theorems.composition`: `RMSNorm`,
            `LayerNorm`, `Affine`, `Pointwise`, `Attention`, `Residual` and `Chain`.
        domain: `Ball(R, n)` or `Everywhere(n)`.

    Returns:
        The bound; infinity if some part has no finite constant on the domain.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> from lipscope.theorems.composition import Affine, Chain, Residual
        >>> I = torch.eye(2, dtype=torch.float64)
        >>> net = Chain((Affine(3 * I), Residual(Affine(0.5 * I))))
        >>> round(ls.theorems.network_bound(net, ls.Ball(R=1.0, n=8)), 6)
        4.5
    """
    return part.lipschitz(domain.R if isinstance(domain, Ball) else math.inf, domain.n)


def _per_root(size: float, eps: float) -> float:
    """size / sqrt(eps), infinite for eps = 0: a norm layer is then not Lipschitz at 0."""
    return up(size / math.sqrt(eps)) if eps > 0 else math.inf if size > 0 else 0.0
