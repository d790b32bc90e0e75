"""All theorems in one table, and their values for a layer on a set of inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib import import_module

import torch

from lipscope._ambient import entry_point
from lipscope._checks import norm_name
from lipscope._display import html_table, text_table
from lipscope._types import Around, Ball, Domain, Everywhere, Point, UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import check_one_device
from lipscope.theorems.rounding import gamma, length_up
from lipscope.theorems.statement import Bound, Kinds, visibility

SOURCES = (
    "input_dependent",
    "yudin2025",
    "certified",
    "castin2024",
    "kim2021",
    "sharper",
    "geshkovski2023",
)
"""The files of this package that state theorems, each in its table BOUNDS."""

REGISTRY: tuple[Bound, ...] = tuple(
    bound for name in SOURCES for bound in import_module(f"lipscope.theorems.{name}").BOUNDS
)
"""All registered theorems, in the order in which `bounds` reports them."""

NORMS = ("2", "inf", "inf2", "W2")


@dataclass(frozen=True)
class BoundRow:
    """The value of one theorem for a layer and a domain.

    Attributes:
        name: Name of the theorem.
        kind: "upper" or "lower".
        norm: Norm in which the bound holds, as passed to `bounds`.
        value: The bound.
        cite: Key of the source in `docs/references.bib`, or "lipscope".
        where: Place in the source, or page with the proof.
        confidence: 1, or less if the value relies on a randomised solver.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> I = torch.eye(2, dtype=torch.float64)
        >>> row = ls.bounds(ls.SelfAttention(I, I, I), ls.Ball(R=1.0, n=4))[0]
        >>> row.name, row.kind
        ('Castin et al., ball', 'upper')
    """

    name: str
    kind: str
    norm: str
    value: float
    cite: str
    where: str
    confidence: float = 1.0

    def tightness(self, sigma: float) -> float:
        """Return `value / sigma` for a constant measured in the same norm; 1 means tight.

        Args:
            sigma: Measured Lipschitz constant, at least 0.
        """
        if not sigma >= 0:
            raise UserError(f"tightness needs a measured sigma >= 0, got {sigma}")
        return self.value / sigma if sigma > 0 else math.inf


HEAD = ("bound", "kind", "norm", "value", "source")
"""Columns of the table of bounds."""


def _cells(row: BoundRow) -> tuple[str, ...]:
    sure = "" if row.confidence == 1 else f" (confidence {row.confidence:.10g})"
    return row.name, row.kind, row.norm, f"{row.value:.6g}{sure}", row.cite


@dataclass(frozen=True)
class NotOffered:
    """A theorem that does not apply to the layer, and the hypothesis that fails."""

    name: str
    failed: str


class BoundRows(list[BoundRow]):
    """The list of `BoundRow` that `bounds` returns.

    Attributes:
        not_offered: The theorems that do not apply, each with the hypothesis that fails.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> I = torch.eye(2, dtype=torch.float64)
        >>> rows = ls.bounds(ls.SelfAttention(I, I, I), ls.Everywhere(n=4))
        >>> [(row.kind, row.value) for row in rows]
        [('lower', inf)]
        >>> print(rows.not_offered[0].failed)
        the scores are minus squared distances (kernel L2, a scale above 0)
    """

    def __init__(self, rows: list[BoundRow], not_offered: list[NotOffered]) -> None:
        super().__init__(rows)
        self.not_offered = not_offered

    def __repr__(self) -> str:
        """Return a table: one line per bound, and the number of theorems that do not apply."""
        table = text_table([HEAD, *map(_cells, self)])
        count = len(self.not_offered)
        more = f"{count} theorem{'' if count == 1 else 's'} not applicable: see not_offered"
        return f"{table}\n{more}" if count else table

    def _repr_html_(self) -> str:
        table = html_table((*HEAD, "where"), [(*_cells(row), row.where) for row in self])
        failed = [(no.name, no.failed) for no in self.not_offered]
        below = html_table(("not applicable", "required"), failed) if failed else ""
        return f"<div>{table}{below}</div>"


@entry_point
def bounds(f: SelfAttention, domain: Domain, norm: str | float = "2") -> BoundRows:
    """Evaluate every theorem whose hypotheses a layer and a domain satisfy.

    An upper bound on a set also holds on its subsets: at a point, theorems about balls are
    evaluated on the smallest ball that contains its tokens.

    Args:
        f: The layer.
        domain: `Point(X)`, `Ball(R, n)`, `Around(X, r)` or `Everywhere(n)`.
        norm: "2" (Frobenius; or the number 2), "inf" (largest coordinate; or `math.inf`), "inf2"
            (largest token) or "W2" (Wasserstein distance of measures).

    Returns:
        One row per theorem that applies; its attribute `not_offered` lists the others.

    Raises:
        UserError: If the domain does not fit the layer, or the norm is unknown.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> I = torch.eye(2, dtype=torch.float64)
        >>> for row in ls.bounds(ls.SelfAttention(I, I, I), ls.Ball(R=1.0, n=4)):
        ...     print(f"{row.kind} {row.value:.3g} ({row.name})")
        upper 6.12 (Castin et al., ball)
        upper 3.3 (compact)
        lower 0.493 (Castin et al., ball, from below)
        lower 0.555 (tuned gap)
        lower 0.736 (Kim et al., rate R^2)
    """
    norm = norm_name(norm, NORMS)
    _check(f, domain)
    # float64 holds every smaller dtype exactly: bounds are for the weights as they are stored. The
    # copies also keep what the theorems find out about them, each fact once per call.
    f = f.double()
    domain = _in_float64(domain)
    visibility(f, domain.n)  # raises unless the masks are for n tokens
    rows = []
    refused = []
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
                name=bound.name,
                kind=bound.kind,
                norm=norm,
                value=evaluate(bound, f, within),
                cite=bound.cite,
                where=bound.where,
                confidence=bound.confidence,
            )
        )
    return BoundRows(rows, refused)


def failed_hypothesis(bound: Bound, f: SelfAttention, domain: Domain) -> str | None:
    """Return the first hypothesis that f and the domain do not satisfy, in words, or None."""
    return next((h.says for h in bound.hypotheses if not h.holds(f, domain)), None)


def evaluate(bound: Bound, f: SelfAttention, domain: Domain) -> float:
    """Evaluate for a float64 layer that satisfies the hypotheses; NaN gives a trivial bound."""
    value = bound.fn(f, domain)
    # One step up covers the last rounding; an exact 0 stays 0.
    if bound.kind == "upper":
        value = math.inf if math.isnan(value) else value
        return math.nextafter(value, math.inf) if value > 0 else value
    return 0.0 if math.isnan(value) else value


def enclosing(domain: Domain, kind: Kinds, side: str) -> Domain | None:
    """Find the smallest domain of that kind around `domain`; of several kinds, the first.

    None if there is none. Lower bounds do not carry over to subsets: for them the kinds must agree.
    """
    if isinstance(kind, tuple):
        found = (enclosing(domain, each, side) for each in kind)
        return next((within for within in found if within is not None), None)
    domain = _in_float64(domain)
    if isinstance(domain, kind):
        return domain
    if side == "lower" or kind in (Point, Around) or isinstance(domain, Everywhere):
        return None
    if kind is Everywhere:
        return Everywhere(domain.n)
    assert isinstance(domain, Point | Around)
    # The radius must cover the tokens after rounding, and a Ball needs R > 0.
    R = length_up(domain.X).max().item() + (domain.r if isinstance(domain, Around) else 0.0)
    return Ball(max(R * (1 + gamma(4)), 5e-324), domain.n)


def _in_float64(domain: Domain) -> Domain:
    if isinstance(domain, Point | Around) and domain.X.dtype != torch.float64:
        return replace(domain, X=domain.X.double())
    return domain


def _check(f: SelfAttention, domain: Domain) -> None:
    if not isinstance(f, SelfAttention):
        raise UserError(
            f"bounds needs a SelfAttention layer, got {type(f).__name__}; "
            "for chains of layers use lipscope.theorems.network_bound"
        )
    if not isinstance(domain, Point | Ball | Around | Everywhere):
        raise UserError(
            "domain must be Point(X), Ball(R, n), Around(X, r) or Everywhere(n), "
            f"got {type(domain).__name__}"
        )
    if isinstance(domain, Point | Around):
        if domain.X.shape[1] != f.Q.shape[1]:
            raise UserError(
                f"the tokens of the domain have size {domain.X.shape[1]}; "
                f"the layer reads tokens of size {f.Q.shape[1]}"
            )
        check_one_device("f", f.Q, X=domain.X)
