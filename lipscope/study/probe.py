"""Probes, which measure something at the sites of a model (first of all sigma), and their work."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import torch

from lipscope._types import UserError
from lipscope.linalg.estimate import as_batch
from lipscope.linalg.spectral import Solver
from lipscope.models import embedded
from lipscope.models.loading import load, load_language_model
from lipscope.models.model import Card, Model
from lipscope.models.sites import Site, Survey
from lipscope.study.jobs import GROUPED_TOKENS, Group, Job, Outcome
from lipscope.study.ranks import solve
from lipscope.study.reading import FixedInputs, SampledText
from lipscope.study.records import SIGMA, Fingerprint, Row, Sensitivity

NUMERIC_VERSION = 4
"""Incremented whenever the same inputs give different numbers: a study never mixes two versions."""


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


@dataclass
class ProbeWork:
    """Calls the probe of a job at its sites.

    surveyed: the group of samples whose forward pass is in memory, and that pass
    threads:  of torch; by default, those it has
    report:   tells which share of the current job is done
    """

    model: Model
    inputs: SampledText | FixedInputs
    probes: Mapping[str, Probe]
    surveyed: tuple[Group, Survey] | None = field(default=None, repr=False)
    threads: int | None = None
    report: Callable[[float], None] = lambda share: None

    def __call__(self, job: Job) -> Outcome:
        rows: list[Row] = []
        sensitivities: list[Sensitivity] = []
        with threads_for(job.n * len(job.samples), self.threads):
            if self.surveyed is None or self.surveyed[0] != job.group:
                self.surveyed = None  # free the old activations before new ones are computed
                self.surveyed = job.group, survey(self.model, self.inputs, *job.group)
            for scope in job.scopes:
                place = Place(
                    site=self.surveyed[1].site(scope, job.layer, job.heads),
                    n=job.n,
                    samples=job.samples,
                    model=self.model,
                    inputs=self.inputs,
                    report=self.report,
                )
                for found in self.probes[job.probe](place):
                    if isinstance(found, Row):
                        rows.append(found)
                    else:
                        sensitivities.append(found)
        return Outcome(job, tuple(rows), tuple(sensitivities))


def start_probes(
    card: Card,
    inputs: SampledText | FixedInputs,
    identity: Fingerprint,
    probes: Mapping[str, Probe],
    threads: int,
) -> ProbeWork:
    """The same work, on a worker; raises UserError if the model is not the same there."""
    with threads_for(tokens=1):
        model = load_same(card, identity)
    return ProbeWork(model, inputs, probes, threads=threads)


def portable(card: Card) -> Card:
    """The card with an absolute path, for a worker that was started in another directory."""
    is_path = Path(card.name).is_dir()
    return replace(card, name=str(Path(card.name).absolute())) if is_path else card


def load_same(card: Card, identity: Fingerprint, head: bool = False) -> Model:
    """The model of a study, on a worker; raises UserError if it is not the same there."""
    if identity.numeric_version != NUMERIC_VERSION:
        raise UserError("the worker has another version of lipscope; install the same everywhere")
    return _load(
        card.name,
        card.dtype,
        card.device,
        # The recorded commit, not the branch: the branch may have moved since.
        None if card.name == embedded.NAME else card.revision,
        card.random_init,
        head,
        weights=card.weights,
        config=identity.config,
    )


@lru_cache(maxsize=1)
def _load(
    name: str,
    dtype: str,
    device: str,
    revision: str | None,
    random_init: int | None,
    head: bool,
    *,
    weights: str,
    config: str,
) -> Model:
    """A model, kept from one study of a sweep to the next.

    The hash of the weights that the study read is part of the key, so a worker loads weights that
    were rewritten in place. Errors are not kept: files that have been put right are read again.
    """
    model = (load_language_model if head else load)(
        name, dtype=dtype, device=device, revision=revision, random_init=random_init
    )
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


def survey(
    model: Model, inputs: SampledText | FixedInputs, n: int, samples: Sequence[int]
) -> Survey:
    """One forward pass over some samples of one length."""
    if isinstance(inputs, FixedInputs) and inputs.argument:
        return model.survey(inputs=inputs.arguments(samples))
    return model.survey(inputs.batch(n, samples))


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
