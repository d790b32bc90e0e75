"""The sigma probe: the local Lipschitz constant of one site, as rows of a study."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence

from torch import Tensor

from lipscope._types import Status
from lipscope.linalg.estimate import Estimate
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver
from lipscope.models.sites import Site
from lipscope.study.records import Row, Sensitivity, Settings
from lipscope.study.study import SIGMA

NUMERIC_VERSION = 3
"""Raised whenever the same inputs give other numbers than before: a study never mixes two of them."""


def sigma(
    site: Site, n: int, samples: Sequence[int], settings: Settings
) -> tuple[list[Row], list[Sensitivity]]:
    """One row and the token norms behind it for every member of the site, whose samples are `samples`."""
    began = time.perf_counter()
    solver = Solver(seed=_solver_seed(settings.seed, site, n, samples))
    estimates = local_lipschitz(site.f, site.X, settings.tol, gap=settings.gap, solver=solver)
    seconds = (time.perf_counter() - began) / len(site.members)
    radii, right, left = site.radius, _token_norms(estimates.right), _token_norms(estimates.left)
    rows, sensitivities = [], []
    for i, (member, head) in enumerate(site.members):
        e, where = estimates[i], (site.scope, site.layer, head, n, samples[member])
        assert isinstance(e.status, Status)
        known = not math.isnan(e.value)
        rows.append(
            Row(
                SIGMA,
                *where,
                "local",
                "2",
                e.value,
                e.lower if known else 0.0,
                e.upper if known else math.inf,
                e.residual,
                _status(e),
                float(radii[i]),
                str(site.X.dtype).removeprefix("torch."),
                site.X.device.type,
                seconds,
            ).check()
        )
        if known:
            sensitivities.append(
                Sensitivity(*where, tuple(right[i].tolist()), tuple(left[i].tolist()))
            )
    return rows, sensitivities


def _status(e: Estimate) -> str:
    name = e.status.name.lower()
    return name if math.isnan(e.value) or not e.missed else f"{name}: {e.missed}"


def _solver_seed(seed: int, site: Site, n: int, samples: Sequence[int]) -> int:
    """A start for each solve, drawn from what is solved and not from what was solved before."""
    name = f"lipscope start {seed} {site.scope} {site.layer} {n} {list(samples)}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _token_norms(vectors: Tensor) -> Tensor:
    """[B, n, d] -> [B, n]"""
    return vectors.double().norm(dim=-1)
