"""Probes: what a study measures at the sites of a model. The first one is sigma."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from lipscope.linalg.estimate import as_batch
from lipscope.linalg.spectral import Solver
from lipscope.models.model import Model
from lipscope.models.sites import Site
from lipscope.study.ranks import solve
from lipscope.study.reading import FixedInputs, SampledText
from lipscope.study.records import SIGMA, Row, Sensitivity


@dataclass(frozen=True, eq=False)
class Place:
    """Where a probe is called: a site of a model, at samples of one length.

    samples: their numbers; member (i, head) of the site belongs to samples[i]
    report:  tells which share of the work at this place is done
    """

    site: Site
    n: int
    samples: tuple[int, ...]
    model: Model
    inputs: SampledText | FixedInputs
    report: Callable[[float], None] = lambda share: None

    def row(
        self,
        i: int,
        probe: str,
        kind: str,
        interval: tuple[float, float, float],
        status: str,
        *,
        residual: float = math.nan,
        radius: float | None = None,
        seconds: float = math.nan,
        reason: str = "",
        extra: Mapping[str, Any] | None = None,
    ) -> Row:
        """A row about member i of the site; the interval is (value, lower, upper)."""
        member, head = self.site.members[i]
        value, lower, upper = interval
        return Row(
            probe=probe,
            scope=self.site.scope,
            layer=self.site.layer,
            head=head,
            n=self.n,
            sample=self.samples[member],
            kind=kind,
            norm="2",
            value=value,
            lower=lower,
            upper=upper,
            residual=residual,
            status=status,
            radius=float(self.site.radius[i]) if radius is None else radius,
            dtype=str(self.site.X.dtype).removeprefix("torch."),
            device=self.site.X.device.type,
            seconds=seconds,
            reason=reason,
            extra=extra or {},
        )


@runtime_checkable
class Probe(Protocol):
    """Measures something at the sites of a model; it travels to workers as a pickle.

    name:     what `Row.probe` begins with; a place that has such a row is not measured again
    scopes:   the maps it measures
    settings: what else decides its numbers, besides model, text and seed; kept in
              `Row.extra["settings"]`: a place measured with other settings is measured again
    cost:     how long a site takes, relative to sigma
    """

    @property
    def name(self) -> str: ...
    @property
    def scopes(self) -> tuple[str, ...]: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def cost(self) -> float: ...

    def check(self, place: Place) -> None:
        """Raise UserError if nothing can be measured at a place like this."""

    def __call__(self, place: Place) -> Iterable[Row | Sensitivity]: ...


@dataclass(frozen=True)
class Sigma:
    """The local Lipschitz constant of every member of a site, with its token norms."""

    scopes: tuple[str, ...]
    tol: float = 1e-6
    gap: float | None = None
    seed: int = 0
    name: str = field(default=SIGMA, init=False)
    cost: float = field(default=1.0, init=False)
    settings: Mapping[str, Any] = field(default_factory=dict, init=False)

    def check(self, place: Place) -> None:
        """Every site has a sigma."""

    def __call__(self, place: Place) -> list[Row | Sensitivity]:
        site = place.site
        samples = list(place.samples)
        began = time.perf_counter()
        # The seed depends on what is solved, not on what was solved before: runs can resume.
        name = f"lipscope start {self.seed} {site.scope} {site.layer} {place.n} {samples}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        # The members of a batch share the failure probability of its solver; each row has its own.
        solver = Solver(seed=seed, failure=Solver().failure * len(site.members))
        estimates = as_batch(solve(site.f, site.X, self.tol, gap=self.gap, solver=solver))
        # Members of a batch are solved together: each gets an equal share of the time.
        seconds = (time.perf_counter() - began) / len(site.members)
        # Token norms: [B, n, d] -> [B, n].
        right, left = (x.double().norm(dim=-1) for x in (estimates.right, estimates.left))
        found: list[Row | Sensitivity] = []
        for i in range(len(site.members)):
            e = estimates[i]
            known = not math.isnan(e.value)
            row = place.row(
                i,
                SIGMA,
                "local",
                # Without a value the only certain interval is [0, infinity].
                (e.value, e.lower, e.upper) if known else (e.value, 0.0, math.inf),
                e.status.name.lower(),
                residual=e.residual,
                seconds=seconds,
                reason=e.missed if known else "",
            )
            found.append(row)
            if known:
                norms = tuple(right[i].tolist()), tuple(left[i].tolist())
                found.append(Sensitivity(*row[1:6], right=norms[0], left=norms[1]))
        return found
