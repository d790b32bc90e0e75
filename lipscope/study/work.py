"""The work of a job: one forward pass per input, shared by its layers, and one solve per site."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lipscope._types import UserError
from lipscope.models import embedded
from lipscope.models.loading import load
from lipscope.models.model import Card, Model
from lipscope.models.sites import Survey
from lipscope.study.plan import GROUPED_TOKENS
from lipscope.study.probe import sigma
from lipscope.study.records import Input, Job, Outcome, Settings
from lipscope.study.sampling import Rows, Windows


@dataclass
class SigmaWork:
    """Measures the sites of a job."""

    model: Model
    inputs: Windows | Rows
    settings: Settings
    _prepared: tuple[Input, Survey] | None = field(default=None, repr=False)

    def __call__(self, job: Job) -> Outcome:
        with threads_for(job.n * len(job.samples)):
            return self._measure(job)

    def _measure(self, job: Job) -> Outcome:
        if self._prepared is None or self._prepared[0] != job.input:
            self._prepared = None  # free the old activations before new ones are computed
            self._prepared = job.input, survey(self.model, self.inputs, job.n, job.samples)
        rows, sensitivities = [], []
        for scope in job.scopes:
            site = self._prepared[1].site(scope, job.layer, job.heads)
            found = sigma(site, job.n, job.samples, self.settings)
            rows += found[0]
            sensitivities += found[1]
        return Outcome(job, tuple(rows), tuple(sensitivities))


def survey(model: Model, inputs: Windows | Rows, n: int, samples: Sequence[int]) -> Survey:
    """One forward pass over some samples of one length."""
    batch = inputs.batch(n, samples)
    if not batch.is_floating_point():
        return model.survey(batch)
    if model.trunk.main_input_name == "pixel_values":
        return model.survey(pixel_values=batch)
    return model.survey(inputs_embeds=batch)


@contextmanager
def threads_for(tokens: int) -> Iterator[None]:
    """Use a single thread for a small batch."""
    # More threads would mostly wait for each other; on a busy machine, ten times as long.
    before = torch.get_num_threads()
    torch.set_num_threads(1 if tokens <= GROUPED_TOKENS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class StartSigmaWork:
    """Creates the same work in a worker process."""

    card: Card
    inputs: Windows | Rows
    settings: Settings
    threads: int

    def __call__(self) -> SigmaWork:
        torch.set_num_threads(self.threads)
        card = self.card
        # The recorded commit, not the branch: the branch may have moved since.
        revision = None if card.name == embedded.NAME else card.revision
        model = load(
            card.name,
            dtype=card.dtype,
            device=card.device,
            revision=revision,
            random_init=card.random_init,
        )
        if model.card.weights != card.weights:
            raise UserError(
                f"the weights of {card.name} changed during the measurement; start a new study"
            )
        return SigmaWork(model, self.inputs, self.settings)
