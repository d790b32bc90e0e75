"""Shards: N disjoint parts of a study that need nothing of each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from lipscope._checks import check_whole
from lipscope._types import UserError

MOST = 1_000_000


@dataclass(frozen=True)
class Shard:
    """The `number`-th of `count` parts, counted from 1."""

    number: int
    count: int

    def has(self, name: str) -> bool:
        """Whether the job or model of this name belongs to this part, and to no other."""
        # A hash rather than a count: the same on every machine, whatever else is asked for.
        digest = hashlib.sha256(f"lipscope shard {name}".encode()).digest()
        return int.from_bytes(digest, "big") % self.count == self.number - 1


def check_shard(given: Sequence[int]) -> Shard:
    """(k, N) as a shard, or a UserError."""
    if len(given) != 2:
        raise UserError(f"a shard is a pair (k, N), as in (3, 64); got {tuple(given)}")
    check_whole("the number of shards", given[1], 1, MOST)
    check_whole("the shard", given[0], 1, given[1])
    return Shard(*given)


def parse_shard(text: str) -> Shard:
    """The shard that a command line names, as in 3/64."""
    number, slash, count = text.partition("/")
    if not slash or not number.isdecimal() or not count.isdecimal() or len(text) > 20:
        raise UserError(f"--shard takes K/N, as in 3/64; got {text[:40]!r}")
    return check_shard((int(number), int(count)))
