"""The jobs that a study still needs: what was requested, minus what is stored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from lipscope.study.records import Job

WHOLE_MODEL = "model"

GROUPED_TOKENS = 512
"""Samples of one length are solved together up to this many tokens; larger batches gain nothing."""

RowKey = tuple[str, int | None, int | None, int, int]
"""(scope, layer, head, n, sample) of a row."""


@dataclass(frozen=True)
class Request:
    """What to measure: scopes of layers, with the heads of each layer, at samples (n, sample)."""

    pairs: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]
    heads: Mapping[int, tuple[int, ...]]
    scopes: tuple[str, ...]

    def jobs(self, done: Collection[RowKey]) -> list[Job]:
        """The remaining jobs, shortest samples first."""
        # Samples are grouped by their number, never by what happens to be missing: rounding depends
        # on the batch, and no result may depend on when a run was interrupted.
        return [
            job
            for n, pairs in groupby(sorted(self.pairs), key=lambda pair: pair[0])
            for group in _groups(n, [sample for _, sample in pairs])
            for layer, scopes in self._places()
            for job in self._missing(n, group, layer, scopes, done)
        ]

    def _places(self) -> list[tuple[int | None, tuple[str, ...]]]:
        """(layer, scopes to measure there); None is the whole model."""
        inside = tuple(scope for scope in self.scopes if scope != WHOLE_MODEL)
        places: list[tuple[int | None, tuple[str, ...]]] = [
            (layer, inside) for layer in self.layers if inside
        ]
        return places + ([(None, (WHOLE_MODEL,))] if WHOLE_MODEL in self.scopes else [])

    def _missing(
        self,
        n: int,
        group: tuple[int, ...],
        layer: int | None,
        scopes: tuple[str, ...],
        done: Collection[RowKey],
    ) -> Iterator[Job]:
        all_heads = () if layer is None else self.heads[layer]

        def owed(sample: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
            job = Job(n=n, samples=(sample,), layer=layer, scopes=scopes, heads=all_heads)
            left = [key for key in job.targets() if key not in done]
            return tuple(dict.fromkeys(t[0] for t in left)), tuple(
                t[2] for t in left if t[2] is not None
            )

        for (missing, heads), samples in groupby(sorted(group, key=owed), key=owed):
            if missing:
                yield Job(n=n, samples=tuple(samples), layer=layer, scopes=missing, heads=heads)


def _groups(n: int, samples: list[int]) -> Iterator[tuple[int, ...]]:
    """Groups of samples whose numbers fall into the same block of fixed size."""
    size = max(1, GROUPED_TOKENS // n)
    for _, group in groupby(samples, key=lambda sample: sample // size):
        yield tuple(group)
