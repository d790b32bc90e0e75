"""The work of a job: one forward pass per group of samples, and the sigma of each of its sites."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import torch

from lipscope._types import UserError
from lipscope.linalg.estimate import as_batch
from lipscope.linalg.spectral import Solver
from lipscope.models import embedded
from lipscope.models.loading import load
from lipscope.models.model import Card, Model
from lipscope.models.sites import Site, Survey
from lipscope.study.jobs import GROUPED_TOKENS, Group, Job, Outcome
from lipscope.study.ranks import solve
from lipscope.study.reading import WholeInputs, Windows
from lipscope.study.records import SIGMA, Identity, Row, Sensitivity

NUMERIC_VERSION = 4
"""Incremented whenever the same inputs give different numbers: a study never mixes two versions."""


@dataclass
class SigmaWork:
    """Measures the sites of a job.

    identity: the accuracy and the seed of the study
    surveyed: the group of samples whose forward pass is in memory, and that pass
    threads:  of torch; by default, those it has
    """

    model: Model
    inputs: Windows | WholeInputs
    identity: Identity
    surveyed: tuple[Group, Survey] | None = field(default=None, repr=False)
    threads: int | None = None

    def __call__(self, job: Job) -> Outcome:
        with threads_for(job.n * len(job.samples), self.threads):
            if self.surveyed is None or self.surveyed[0] != job.group:
                self.surveyed = None  # free the old activations before new ones are computed
                self.surveyed = job.group, survey(self.model, self.inputs, *job.group)
            rows = []
            sensitivities = []
            for scope in job.scopes:
                site = self.surveyed[1].site(scope, job.layer, job.heads)
                found = sigma(site, job.n, job.samples, self.identity)
                rows += found[0]
                sensitivities += found[1]
        return Outcome(job, tuple(rows), tuple(sensitivities))


def start_sigma_work(
    card: Card, inputs: Windows | WholeInputs, identity: Identity, threads: int
) -> SigmaWork:
    """The same work, on a worker; raises UserError if the model is not the same there."""
    if identity.numeric_version != NUMERIC_VERSION:
        raise UserError("the worker has another version of lipscope; install the same everywhere")
    # The recorded commit, not the branch: the branch may have moved since.
    revision = None if card.name == embedded.NAME else card.revision
    with threads_for(tokens=1):
        model = _load(
            card.name,
            card.dtype,
            card.device,
            revision,
            card.random_init,
            weights=card.weights,
            config=identity.config,
        )
    return SigmaWork(model, inputs, identity, threads=threads)


@lru_cache(maxsize=1)
def _load(
    name: str,
    dtype: str,
    device: str,
    revision: str | None,
    random_init: int | None,
    *,
    weights: str,
    config: str,
) -> Model:
    """A model, kept from one study of a sweep to the next.

    The hash of the weights that the study read is part of the key, so a worker loads weights that
    were rewritten in place. Errors are not kept: files that have been put right are read again.
    """
    model = load(name, dtype=dtype, device=device, revision=revision, random_init=random_init)
    if model.card.weights != weights:
        raise UserError(
            f"the worker has other weights of {name}: they changed during the measurement, or "
            "another machine has other files; start a new study"
        )
    if config_digest(model) != config:
        raise UserError(f"the worker has another configuration of {name}")
    return model


def config_digest(model: Model) -> str:
    """Digest of the configuration, which matters as much as the weights do."""
    trunk: Any = model.trunk
    config = trunk.config.to_dict()
    # Where a configuration comes from and what wrote it does not change any number.
    for name in ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"):
        config.pop(name, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def survey(model: Model, inputs: Windows | WholeInputs, n: int, samples: Sequence[int]) -> Survey:
    """One forward pass over some samples of one length."""
    if isinstance(inputs, WholeInputs) and inputs.argument:
        return model.survey(inputs=inputs.arguments(samples))
    return model.survey(inputs.batch(n, samples))


def sigma(
    site: Site, n: int, samples: Sequence[int], identity: Identity
) -> tuple[list[Row], list[Sensitivity]]:
    """One row and its token norms for every member of the site, whose samples are `samples`."""
    began = time.perf_counter()
    # The seed depends on what is solved, not on what was solved before: runs can resume.
    name = f"lipscope start {identity.seed} {site.scope} {site.layer} {n} {list(samples)}"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    # The members of a batch share the failure probability of its solver; each row has its own.
    solver = Solver(seed=seed, failure=Solver().failure * len(site.members))
    solved = solve(site.f, site.X, identity.tol, gap=identity.gap, solver=solver)
    estimates = as_batch(solved)
    # Members of a batch are solved together: each gets an equal share of the time.
    seconds = (time.perf_counter() - began) / len(site.members)
    # Token norms: [B, n, d] -> [B, n].
    right, left = (x.double().norm(dim=-1) for x in (estimates.right, estimates.left))
    radii = site.radius
    rows = []
    sensitivities = []
    for i, (member, head) in enumerate(site.members):
        e = estimates[i]
        where = (site.scope, site.layer, head, n, samples[member])
        known = not math.isnan(e.value)
        status = e.status.name.lower()
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
            status=f"{status}: {e.missed}" if known and e.missed else status,
            radius=float(radii[i]),
            dtype=str(site.X.dtype).removeprefix("torch."),
            device=site.X.device.type,
            seconds=seconds,
        )
        rows.append(row)
        if known:
            norms = tuple(right[i].tolist()), tuple(left[i].tolist())
            sensitivities.append(Sensitivity(*where, right=norms[0], left=norms[1]))
    return rows, sensitivities


_counting = Lock()
_users = 0
_usual = 0
"""How many batches use a number of threads of their own now, and what torch's was before them."""


@contextmanager
def threads_for(tokens: int, threads: int | None = None) -> Iterator[None]:
    """Use a single thread for a small batch, and `threads` for a larger one."""
    global _users, _usual
    with _counting:
        before = torch.get_num_threads()
        _usual = before if _users == 0 else _usual
        _users += 1
    # More threads would mostly wait for each other; on a busy machine, ten times as long.
    torch.set_num_threads(1 if tokens <= GROUPED_TOKENS else threads or before)
    try:
        yield
    finally:
        with _counting:
            _users -= 1
            # torch has one number for all: `before` may be that of a batch in another thread.
            torch.set_num_threads(before if _users else _usual)
