"""The sets that an ascent searches: coordinates, random points, and a projection onto each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lipscope._checks import check_fields
from lipscope._display import Displayed
from lipscope._types import Around, Ball, Domain, UserError


@dataclass(frozen=True, eq=False)
class Normed(Displayed):
    """The domain of all sequences of n tokens that a LayerNorm or RMSNorm can output.

    Tokens are weight * z + bias with |z| <= sqrt(d) and, for LayerNorm, entries of z that sum to 0:
    an ellipsoid.

    Attributes:
        weight: Weight [d] of the normalisation.
        n: Number of tokens.
        bias: Bias [d] of the normalisation, if it has one.
        centred: True for LayerNorm, False for RMSNorm.

    Raises:
        UserError: If weight and bias are not both [d], or n is below 1.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> eye = torch.eye(3, dtype=torch.float64)
        >>> domain = ls.Normed(torch.ones(3), n=4)
        >>> climb = ls.attack.Climb(steps=2, restarts=1)
        >>> found = ls.attack.ascend(ls.SelfAttention(eye, eye, eye), domain, climb)
        >>> bool((found.X.sum(dim=1).abs() < 1e-12).all())
        True
    """

    weight: Tensor
    n: int
    bias: Tensor | None = None
    centred: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.weight.ndim != 1 or (
            self.bias is not None and self.bias.shape != self.weight.shape
        ):
            shapes = [tuple(x.shape) for x in (self.weight, self.bias) if x is not None]
            raise UserError(
                "Normed needs the weight [d] and, if any, the bias [d] of a normalisation, "
                f"got shapes {shapes}"
            )
        if self.n < 1:
            raise UserError(f"Normed needs a number of tokens n >= 1, got n={self.n}")


@runtime_checkable
class Region(Protocol):
    """A set of sequences with coordinates Z [..., n, d]; `size` is roughly its radius in them."""

    @property
    def size(self) -> float: ...

    def draw(self, count: int, generator: torch.Generator) -> Tensor: ...

    def project(self, Z: Tensor) -> Tensor: ...

    def tokens(self, Z: Tensor) -> Tensor: ...

    def coordinates(self, X: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _BallRegion:
    ball: Ball
    d: int
    device: torch.device

    @property
    def size(self) -> float:
        return self.ball.R * math.sqrt(self.ball.n)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Random directions; every other sequence on the sphere, the rest inside."""
        Z = torch.randn(count, self.ball.n, self.d, generator=generator, dtype=torch.float64)
        depth = torch.rand(count, self.ball.n, 1, generator=generator, dtype=torch.float64)
        depth[::2] = 1.0
        return (self.ball.R * depth * Z / Z.norm(dim=-1, keepdim=True)).to(self.device)

    def project(self, Z: Tensor) -> Tensor:
        return Z * (self.ball.R / Z.norm(dim=-1, keepdim=True).clamp_min(self.ball.R))

    def tokens(self, Z: Tensor) -> Tensor:
        return Z

    def coordinates(self, X: Tensor) -> Tensor:
        return X


@dataclass(frozen=True, eq=False)
class _AroundRegion:
    around: Around

    @property
    def size(self) -> float:
        return self.around.r

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """The centre, then random points on the sphere around it."""
        X = self.around.X
        E = torch.randn(count, *X.shape, generator=generator, dtype=torch.float64).to(X)
        E[0] = 0
        return X + self.around.r * E / E.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-300)

    def project(self, Z: Tensor) -> Tensor:
        E = Z - self.around.X
        r = self.around.r
        return self.around.X + E * (r / E.norm(dim=(-2, -1), keepdim=True).clamp_min(r))

    def tokens(self, Z: Tensor) -> Tensor:
        return Z

    def coordinates(self, X: Tensor) -> Tensor:
        return X


@dataclass(frozen=True, eq=False)
class _NormedRegion:
    normed: Normed

    @property
    def size(self) -> float:
        return math.sqrt(self.normed.n * len(self.normed.weight))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        w = self.normed.weight
        Z = torch.randn(count, self.normed.n, len(w), generator=generator, dtype=torch.float64)
        return self.project(Z.to(w))

    def project(self, Z: Tensor) -> Tensor:
        Z = Z - Z.mean(dim=-1, keepdim=True) if self.normed.centred else Z
        longest = math.sqrt(Z.shape[-1])
        return Z * (longest / Z.norm(dim=-1, keepdim=True).clamp_min(longest))

    def tokens(self, Z: Tensor) -> Tensor:
        X = Z * self.normed.weight
        return X if self.normed.bias is None else X + self.normed.bias

    def coordinates(self, X: Tensor) -> Tensor:
        # Where the weight is 0 the coordinate has no effect.
        w = self.normed.weight
        Z = X if self.normed.bias is None else X - self.normed.bias
        return torch.where(w == 0, 0.0, Z / torch.where(w == 0, 1.0, w))


def region_of(domain: Domain | Normed, d: int, device: torch.device) -> Region:
    """The region of a domain for tokens of size d, in float64 on the device of the map."""

    def there(x: Tensor) -> Tensor:
        return x.to(device, torch.float64)

    size: int
    region: Region
    match domain:
        case Ball():
            return _BallRegion(domain, d, device)
        case Around():
            size = domain.X.shape[1]
            region = _AroundRegion(replace(domain, X=there(domain.X)))
        case Normed():
            bias = None if domain.bias is None else there(domain.bias)
            moved = replace(domain, weight=there(domain.weight), bias=bias)
            size = len(domain.weight)
            region = _NormedRegion(moved)
        case _:
            raise UserError(
                "ascent runs over Ball(R, n), Around(X, r) or Normed(weight, n), "
                f"not {type(domain).__name__}"
            )
    if size != d:
        raise UserError(
            f"the domain has tokens of size {size}, and the map takes tokens of size {d}"
        )
    return region
