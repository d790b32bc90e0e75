"""The work of a job: one forward pass per group of samples, and a probe at each of its sites."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from lipscope._types import UserError
from lipscope.models import embedded
from lipscope.models.loading import load, load_language_model
from lipscope.models.model import Card, Model
from lipscope.models.sites import Survey
from lipscope.study.jobs import GROUPED_TOKENS, Group, Job, Outcome
from lipscope.study.probe import Place, Probe
from lipscope.study.reading import FixedInputs, SampledText
from lipscope.study.records import Fingerprint, Row, Sensitivity

NUMERIC_VERSION = 4
"""Incremented whenever the same inputs give different numbers: a study never mixes two versions."""


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
