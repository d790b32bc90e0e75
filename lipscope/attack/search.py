"""What the searches share: sets of inputs, the step rule, and a result measured independently."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._checks import check_fields
from lipscope._display import Displayed
from lipscope._types import Around, Ball, Domain, UserError
from lipscope.linalg.differentiate import Map
from lipscope.linalg.estimate import Estimate, as_batch
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver, fresh_seed

LONGER = 1.5
SHORTER = 0.4
"""Factors for the stride after a trial that helped and after one that did not."""


@dataclass
class Search:
    """Several independent ascents side by side, one per member.

    value [B]:  the best value of each member so far
    state:      what belongs to it, each tensor [B, ...]
    stride [B]: the length of the next step; every member has its own, because one may creep along a
                ridge while another still leaps
    """

    value: Tensor
    state: tuple[Tensor, ...]
    stride: Tensor

    def judge(self, value: Tensor, *state: Tensor) -> Tensor:
        """Keep the trials that are higher, adapt the strides, and return which were kept, [B]."""
        higher = value > self.value
        self.value = torch.where(higher, value, self.value)
        self.state = tuple(
            torch.where(higher.to(old.device).reshape(-1, *[1] * (old.ndim - 1)), new, old)
            for new, old in zip(state, self.state, strict=True)
        )
        self.stride = torch.where(higher, LONGER * self.stride, SHORTER * self.stride)
        return higher


@dataclass(frozen=True, eq=False)
class Found(Displayed):
    """An input found by an attack.

    Attributes:
        name: How it was found.
        X: The input [n, d].
        sigma: The local Lipschitz constant there, measured from a start independent of the search.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> X = torch.ones(2, 3)
        >>> found = ls.attack.Found("ones", X, ls.local_lipschitz(lambda X: 2 * X, X))
        >>> round(found.value, 3)
        2.0
    """

    name: str
    X: Tensor
    sigma: Estimate

    @property
    def value(self) -> float:
        """sigma as a float."""
        return float(self.sigma.value)


def measured(f: Map, inputs: Sequence[tuple[str, Tensor]], seed: int) -> list[Found]:
    """Measure named inputs [n, d] together, the largest sigma first; f maps batches memberwise."""
    # Not the seed of the search, which may have adapted the input to its own start.
    X = torch.stack([x for _, x in inputs])
    estimates = as_batch(local_lipschitz(f, X, solver=Solver(seed=fresh_seed(seed, "measure"))))
    found = [Found(name, x, estimates[i]) for i, (name, x) in enumerate(inputs)]
    return sorted(found, key=lambda one: -one.value)


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


@dataclass(frozen=True, eq=False)
class Region:
    """A set of sequences in coordinates Z [..., n, d]: the tokens are weight * Z + bias.

    size:    roughly its radius in the coordinates
    draw:    coordinates of `count` random members, from a generator
    project: the nearest coordinates inside
    """

    size: float
    draw: Callable[[int, torch.Generator], Tensor]
    project: Callable[[Tensor], Tensor]
    weight: Tensor | None = None
    bias: Tensor | None = None

    def tokens(self, Z: Tensor) -> Tensor:
        X = Z if self.weight is None else Z * self.weight
        return X if self.bias is None else X + self.bias

    def coordinates(self, X: Tensor) -> Tensor:
        Z = X if self.bias is None else X - self.bias
        w = self.weight
        # Where the weight is 0 the coordinate has no effect.
        return Z if w is None else torch.where(w == 0, 0.0, Z / torch.where(w == 0, 1.0, w))


def _ball(ball: Ball, d: int, device: torch.device) -> Region:
    def draw(count: int, generator: torch.Generator) -> Tensor:
        # Random directions; every other sequence on the sphere, the rest inside.
        Z = torch.randn(count, ball.n, d, generator=generator, dtype=torch.float64)
        depth = torch.rand(count, ball.n, 1, generator=generator, dtype=torch.float64)
        depth[::2] = 1.0
        return (ball.R * depth * Z / Z.norm(dim=-1, keepdim=True)).to(device)

    return Region(
        size=ball.R * math.sqrt(ball.n), draw=draw, project=lambda Z: _shortened(Z, ball.R, (-1,))
    )


def _around(X: Tensor, r: float) -> Region:
    def draw(count: int, generator: torch.Generator) -> Tensor:
        # The centre, then random points on the sphere around it.
        E = torch.randn(count, *X.shape, generator=generator, dtype=torch.float64).to(X)
        E[0] = 0
        return X + r * E / E.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-300)

    return Region(size=r, draw=draw, project=lambda Z: X + _shortened(Z - X, r, (-2, -1)))


def _normed(n: int, centred: bool, weight: Tensor, bias: Tensor | None) -> Region:
    d = len(weight)

    def project(Z: Tensor) -> Tensor:
        Z = Z - Z.mean(dim=-1, keepdim=True) if centred else Z
        return _shortened(Z, math.sqrt(d), (-1,))

    def draw(count: int, generator: torch.Generator) -> Tensor:
        Z = torch.randn(count, n, d, generator=generator, dtype=torch.float64)
        return project(Z.to(weight))

    return Region(size=math.sqrt(n * d), draw=draw, project=project, weight=weight, bias=bias)


def _shortened(Z: Tensor, longest: float, dim: tuple[int, ...]) -> Tensor:
    return Z * (longest / Z.norm(dim=dim, keepdim=True).clamp_min(longest))


def region_of(domain: Domain | Normed, d: int | None, device: torch.device) -> Region:
    """Return the region of a domain for tokens of size d, in float64 on the device of the map."""

    def there(x: Tensor) -> Tensor:
        return x.to(device, torch.float64)

    match domain:
        case Ball():
            if d is None:
                raise UserError(
                    "in a Ball, the size of a token must be given for a map that is not a "
                    "SelfAttention; pass ascend(..., dim=...)"
                )
            return _ball(domain, d, device)
        case Around():
            size = domain.X.shape[1]
            region = _around(there(domain.X), domain.r)
        case Normed():
            size = len(domain.weight)
            bias = None if domain.bias is None else there(domain.bias)
            region = _normed(domain.n, domain.centred, there(domain.weight), bias)
        case _:
            raise UserError(
                "ascent runs over Ball(R, n), Around(X, r) or Normed(weight, n), "
                f"not {type(domain).__name__}"
            )
    if d is not None and size != d:
        raise UserError(
            f"the domain has tokens of size {size}, and the map takes tokens of size {d}"
        )
    return region
