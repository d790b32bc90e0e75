"""Which jobs a study still owes: what was asked, less what is there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from lipscope.study.records import Job

WHOLE_MODEL = "model"

GROUPED_TOKENS = 512
"""Samples of one length are solved together up to so many tokens; beyond, a batch gains nothing."""

Target = tuple[str, int | None, int | None, int, int]


@dataclass(frozen=True)
class Request:
    """What a study is asked for: scopes of layers, with the heads of each layer, at samples (n, sample)."""

    pairs: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]
    heads: Mapping[int, tuple[int, ...]]
    scopes: tuple[str, ...]

    def jobs(self, done: Collection[Target]) -> list[Job]:
        """The jobs that remain, shortest samples first.

        Samples are grouped by their number, never by what happens to be missing: no number depends on when a
        run was interrupted.
        """
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
        done: Collection[Target],
    ) -> Iterator[Job]:
        all_heads = () if layer is None else self.heads[layer]

        def owed(sample: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
            targets = Job(n, (sample,), layer, scopes, all_heads).targets()
            left = [target for target in targets if target not in done]
            return tuple(dict.fromkeys(t[0] for t in left)), tuple(
                t[2] for t in left if t[2] is not None
            )

        for (missing, heads), samples in groupby(sorted(group, key=owed), key=owed):
            if missing:
                yield Job(n, tuple(samples), layer, missing, heads)


def _groups(n: int, samples: list[int]) -> Iterator[tuple[int, ...]]:
    """Samples whose numbers fall into the same block of a fixed size."""
    size = max(1, GROUPED_TOKENS // n)
    for _, group in groupby(samples, key=lambda sample: sample // size):
        yield tuple(group)
