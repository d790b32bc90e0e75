"""Every theorem in one table, and what it says about a layer on a set of inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lipscope._types import Around, Ball, Domain, Everywhere, Point, UserError
from lipscope.attention.layer import SelfAttention
from lipscope.theorems import castin2024, certified, geshkovski2023, kim2021, local, yudin2025
from lipscope.theorems.heads import sight
from lipscope.theorems.rounding import gamma, length_up
from lipscope.theorems.statement import Bound, Kinds

REGISTRY: tuple[Bound, ...] = (
    *local.BOUNDS,
    *yudin2025.BOUNDS,
    *certified.BOUNDS,
    *castin2024.BOUNDS,
    *kim2021.BOUNDS,
    *geshkovski2023.BOUNDS,
)
NORMS = ("2", "inf", "inf2", "W2")


@dataclass(frozen=True)
class BoundRow:
    """A theorem's number for one layer and domain; confidence is below 1 where a random solver takes part."""

    name: str
    kind: str
    norm: str
    value: float
    cite: str
    where: str
    confidence: float = 1.0

    def tightness(self, sigma: float) -> float:
        """value / sigma, once sigma is measured in the same norm: 1 is exact, more is what an upper bound loses."""
        if not sigma >= 0:
            raise UserError(f"tightness is relative to a measured sigma >= 0, got {sigma}")
        return self.value / sigma if sigma > 0 else math.inf


@dataclass(frozen=True)
class NotOffered:
    """A theorem that says nothing about this layer, and the hypothesis that failed."""

    name: str
    failed: str


class BoundRows(list[BoundRow]):
    """The rows of `bounds`; `not_offered` holds the theorems that do not apply, each with its reason."""

    def __init__(self, rows: list[BoundRow], not_offered: list[NotOffered]) -> None:
        super().__init__(rows)
        self.not_offered = not_offered


def bounds(f: SelfAttention, domain: Domain, norm: str = "2") -> BoundRows:
    """Every bound on the Lipschitz constant of f over `domain` in `norm` whose hypotheses f meets.

    norm: "2" (Frobenius), "inf" (largest coordinate), "inf2" (largest token), "W2" (measures). An upper bound on a
    larger set holds on a smaller one: theorems on balls are offered at a point too, on the ball that its tokens need.
    """
    _check(f, domain, norm)
    f = f.double()
    rows, refused = [], []
    for bound in REGISTRY:
        within = enclosing(domain, bound.domain, bound.kind)
        if bound.norm != norm or within is None:
            continue
        failed = failed_hypothesis(bound, f, within)
        if failed is not None:
            refused.append(NotOffered(bound.name, failed))
            continue
        rows.append(
            BoundRow(
                bound.name,
                bound.kind,
                norm,
                evaluate(bound, f, within),
                bound.cite,
                bound.where,
                bound.confidence,
            )
        )
    return BoundRows(rows, refused)


def failed_hypothesis(bound: Bound, f: SelfAttention, domain: Domain) -> str | None:
    """The first hypothesis that f and the domain do not meet, in words."""
    return next((h.says for h in bound.hypotheses if not h.holds(f, domain)), None)


def evaluate(bound: Bound, f: SelfAttention, domain: Domain) -> float:
    """The value, for a float64 layer that meets the hypotheses; not a number becomes infinity, or 0 from below."""
    value = bound.fn(f, domain)
    if bound.kind == "upper":
        return (
            math.inf
            if math.isnan(value)
            else math.nextafter(value, math.inf)
            if value > 0
            else value
        )
    return 0.0 if math.isnan(value) else value


def enclosing(domain: Domain, kind: Kinds, side: str) -> Domain | None:
    """The smallest domain of that kind around `domain`, in float64; of several kinds, of the first.

    None where there is none, or side is "lower" and `domain` is of another kind.
    """
    if isinstance(kind, tuple):
        found = (enclosing(domain, each, side) for each in kind)
        return next((within for within in found if within is not None), None)
    domain = replace(domain, X=domain.X.double()) if isinstance(domain, Point | Around) else domain
    if isinstance(domain, kind):
        return domain
    if side == "lower" or kind in (Point, Around) or isinstance(domain, Everywhere):
        return None
    if kind is Everywhere:
        return Everywhere(domain.n)
    assert isinstance(domain, Point | Around)
    R = length_up(domain.X).max().item() + (domain.r if isinstance(domain, Around) else 0.0)
    return Ball(max(R * (1 + gamma(4)), 5e-324), domain.n)


def _check(f: SelfAttention, domain: Domain, norm: str) -> None:
    if not isinstance(f, SelfAttention):
        raise UserError(
            f"bounds are theorems about a SelfAttention layer, got {type(f).__name__}; "
            "for chains of layers see network_bound in lipscope.theorems.composition"
        )
    if not isinstance(domain, Point | Ball | Around | Everywhere):
        raise UserError(
            f"domain must be Point(X), Ball(R, n), Around(X, r) or Everywhere(n), got {type(domain).__name__}"
        )
    if norm not in NORMS:
        raise UserError(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}")
    if isinstance(domain, Point | Around) and domain.X.shape[1] != f.Q.shape[1]:
        raise UserError(
            f"the domain's tokens have size {domain.X.shape[1]}; the layer reads tokens of size {f.Q.shape[1]}"
        )
    sight(f, domain.n)
