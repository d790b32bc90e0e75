"""The sigma probe: the local Lipschitz constant of one site, as rows of a study."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence

from torch import Tensor

from lipscope._types import Status
from lipscope.linalg.estimate import Estimate, many
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver
from lipscope.models.sites import Site
from lipscope.study.records import Row, Sensitivity, Settings
from lipscope.study.study import SIGMA

NUMERIC_VERSION = 3
"""Incremented whenever the same inputs give different numbers: a study never mixes two versions."""


def sigma(
    site: Site, n: int, samples: Sequence[int], settings: Settings
) -> tuple[list[Row], list[Sensitivity]]:
    """One row and its token norms for every member of the site, whose samples are `samples`."""
    began = time.perf_counter()
    solver = Solver(seed=_solver_seed(settings.seed, site, n, samples))
    estimates = many(local_lipschitz(site.f, site.X, settings.tol, gap=settings.gap, solver=solver))
    # Members of a batch are solved together: each gets an equal share of the time.
    seconds = (time.perf_counter() - began) / len(site.members)
    radii, right, left = site.radius, _token_norms(estimates.right), _token_norms(estimates.left)
    rows, sensitivities = [], []
    for i, (member, head) in enumerate(site.members):
        e, where = estimates[i], (site.scope, site.layer, head, n, samples[member])
        assert isinstance(e.status, Status)
        known = not math.isnan(e.value)
        row = Row(
            SIGMA,
            *where,
            kind="local",
            norm="2",
            value=e.value,
            # Without a value the only certain interval is [0, infinity].
            lower=e.lower if known else 0.0,
            upper=e.upper if known else math.inf,
            residual=e.residual,
            status=_status(e),
            radius=float(radii[i]),
            dtype=str(site.X.dtype).removeprefix("torch."),
            device=site.X.device.type,
            seconds=seconds,
        )
        rows.append(row.check())
        if known:
            norms = tuple(right[i].tolist()), tuple(left[i].tolist())
            sensitivities.append(Sensitivity(*where, right=norms[0], left=norms[1]))
    return rows, sensitivities


def _status(e: Estimate) -> str:
    name = e.status.name.lower()
    return name if math.isnan(e.value) or not e.missed else f"{name}: {e.missed}"


def _solver_seed(seed: int, site: Site, n: int, samples: Sequence[int]) -> int:
    """A seed that depends on what is solved, not on what was solved before: runs can resume."""
    name = f"lipscope start {seed} {site.scope} {site.layer} {n} {list(samples)}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _token_norms(vectors: Tensor) -> Tensor:
    """[B, n, d] -> [B, n]"""
    return vectors.double().norm(dim=-1)
