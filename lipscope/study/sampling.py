"""The inputs to measure: windows of a text drawn by a stable hash, or rows measured whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_LENGTHS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Windows:
    """Samples of a text: n consecutive tokens at an offset drawn from (seed, n, sample).

    Special tokens `before` and `after` frame the window and count towards n. Positions are 0..n-1.
    """

    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    digest: str
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(n, sample) for n in self.lengths for sample in range(self.samples)]

    def window(self, n: int, sample: int) -> tuple[int, ...]:
        inner = n - len(self.before) - len(self.after)
        start = offset(len(self.ids) - inner + 1, n, sample, self.seed)
        return self.before + self.ids[start : start + inner] + self.after

    def batch(self, n: int, samples: Sequence[int]) -> Tensor:
        return torch.tensor([self.window(n, sample) for sample in samples])


@dataclass(frozen=True)
class Rows:
    """Token ids, embeddings or pixels measured whole: row i is sample i, of lengths[i] tokens."""

    rows: tuple[Tensor, ...]
    lengths: tuple[int, ...]
    digest: str

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return sorted((n, sample) for sample, n in enumerate(self.lengths))

    def batch(self, n: int, samples: Sequence[int]) -> Tensor:
        return torch.stack([self.rows[sample] for sample in samples])


def offset(places: int, n: int, sample: int, seed: int) -> int:
    """One of `places` starting points, as a function of the arguments only."""
    # A hash rather than a generator: the same on every machine and in any order of calls. It has
    # 256 bits, so its remainder is uniform for all practical purposes.
    digest = hashlib.sha256(f"lipscope sample {seed} {n} {sample}".encode()).digest()
    return int.from_bytes(digest, "big") % places
