"""The processes (ranks) that share one solve: who holds which tokens, and what is exchanged.

A tensor of n tokens is spread in zigzag order. The tokens are cut into 2 R chunks of equal length,
and rank r holds chunks r and 2 R - 1 - r: under a causal mask, where late queries see more keys
than early ones, every rank then has the same work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lipscope._types import UserError
from lipscope.linalg.operator import Space

# torch 2.13 renamed both; the old names warn there, the new ones do not exist before.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class LostRankError(BaseException):
    """Another process ended, or does not answer.

    Derives from BaseException so that per-input error handling does not swallow it.
    """


@contextmanager
def rank_lost() -> Iterator[None]:
    """An error in an exchange, in one line."""
    try:
        yield
    except RuntimeError as error:
        # Gloo begins with the line of its own source that noticed.
        said = " ".join(re.sub(r"^\[[^]]*\]", "", str(error)).split())[:160]
        raise LostRankError(
            f"another rank ended or does not answer ({said}); start all processes again"
        ) from error


def from_all(x: Any, group: Any) -> list[Any]:
    """What each rank of a group has."""
    found: list[Any] = [None] * dist.get_world_size(group)
    with rank_lost():
        dist.all_gather_object(found, x, group)
    return found


class TokenShards(Space):
    """Tokens spread over the processes of a group in zigzag order, and the traffic between them.

    Attributes:
        n: Number of tokens of all ranks together.
        size: Number of ranks R.
        rank: This one's number.
        positions: Positions of this rank's tokens, in increasing order.
        sent: Bytes that this rank has sent, by kind of exchange: "gather" (R - 1 times its own
            block), "scatter" (the same) and "reduce" (2 (R - 1) / R times the tensor), as a ring
            of R processes sends them.
    """

    def __init__(self, n: int, size: int, rank: int, group: Any = None):
        if n < size:
            raise UserError(
                f"{n} tokens cannot be spread over {size} ranks; use at most {n} processes"
            )
        self.n = n
        self.size = size
        self.rank = rank
        self.group = group
        self.chunks = chunks_of(n, size, rank)
        self.positions = torch.cat([torch.arange(*chunk) for chunk in self.chunks])
        self.sent = {"gather": 0.0, "scatter": 0.0, "reduce": 0.0}
        self._indices: dict[tuple[str, torch.device], Tensor | None] = {}

    @cached_property
    def block(self) -> int:
        """Tokens per chunk as exchanged: shorter chunks are padded, so that all are equal."""
        return -(-self.n // (2 * self.size))

    @cached_property
    def slots(self) -> Tensor:
        """Where each of the n tokens stands in what all ranks exchange, [rank, half, token]."""
        found = torch.empty(self.n, dtype=torch.int64)
        for rank in range(self.size):
            for half, (start, stop) in enumerate(chunks_of(self.n, self.size, rank)):
                first = (2 * rank + half) * self.block
                found[start:stop] = torch.arange(first, first + stop - start)
        return found

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a vector of all ranks, from the shape of this rank's part."""
        return (self.n, *shape[1:])

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens, of all n along `dim`."""
        return x.index_select(dim, self.positions.to(x.device))

    def rows(self, x: Tensor, index: Tensor) -> Tensor:
        positions = self.positions.to(index.device)
        where = torch.searchsorted(positions, index).clamp_max(len(positions) - 1)
        mine = positions[where] == index
        here = x.take_along_dim(where[..., None], dim=-2)
        return self.sum(torch.where(mine[..., None], here, 0))

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def norm(self, x: Tensor) -> Tensor:
        """Norms of whole vectors, from the norms of this rank's part."""
        # sqrt(x^2) is x in IEEE arithmetic: one rank gets the very norm it came with.
        return self.sum(x.square()).sqrt()

    def largest(self, x: Tensor) -> Tensor:
        """The largest over all ranks, entry by entry."""
        # Backends do not define max(NaN, x), so NaNs are reduced separately.
        known = torch.where(x.isnan(), -torch.inf, x)
        top, lost = self._reduced(torch.stack([known, x.isnan().to(x)]), dist.ReduceOp.MAX)
        return torch.where(lost > 0, torch.nan, top)

    def smallest(self, x: int) -> int:
        return -int(self._reduced(torch.tensor(-x), dist.ReduceOp.MAX))

    def broadcast(self, x: Tensor) -> Tensor:
        """What rank 0 has."""
        return self.sum(x if self.rank == 0 else torch.zeros_like(x))

    def gather(self, x: Tensor) -> Tensor:
        """Tokens of this rank, [..., tokens, width], to all n in order, [..., n, width]."""
        mine = self._packed(x.movedim(-2, 0), "own_slots", 2 * self.block)
        everyone = mine.new_empty(2 * self.size * self.block, *mine.shape[1:])
        self._exchange(_gather_single, everyone, mine)
        self.sent["gather"] += (self.size - 1) * _bytes(mine)
        return self._unpacked(everyone, "slots")

    def scatter_sum(self, x: Tensor) -> Tensor:
        """All n tokens [..., n, width], summed over ranks, to those of this one: the adjoint."""
        everyone = self._packed(x.movedim(-2, 0), "slots", 2 * self.size * self.block)
        mine = everyone.new_empty(2 * self.block, *everyone.shape[1:])
        self._exchange(_scatter_single, mine, everyone)
        self.sent["scatter"] += (self.size - 1) * _bytes(mine)
        return self._unpacked(mine, "own_slots")

    @cached_property
    def own_slots(self) -> Tensor:
        """The same for this rank's tokens in what it exchanges itself."""
        return self.slots[self.positions] - 2 * self.rank * self.block

    def _packed(self, x: Tensor, name: str, length: int) -> Tensor:
        """x [tokens, ...] at its slots; padding is 0."""
        index = self._index(name, x.device)
        if index is None and len(x) == length:
            return x.contiguous()
        packed = x.new_zeros(length, *x.shape[1:])
        packed[slice(len(x)) if index is None else index] = x
        return packed

    def _unpacked(self, x: Tensor, name: str) -> Tensor:
        """The tokens at these slots of x [slots, ..., width], as [..., tokens, width]."""
        x, index = x.movedim(0, -2), self._index(name, x.device)
        if index is None:
            return x[..., : len(getattr(self, name)), :].contiguous()
        return x.index_select(-2, index)

    def _index(self, name: str, device: torch.device) -> Tensor | None:
        """Slots on a device, copied there once; None where they are simply the first."""
        if (name, device) not in self._indices:
            slots = getattr(self, name)
            first = torch.equal(slots, torch.arange(len(slots)))
            self._indices[name, device] = None if first else slots.to(device)
        return self._indices[name, device]

    @property
    def _moves_through_host(self) -> bool:
        return dist.get_backend(self.group) == "gloo"

    def _exchange(self, collective: Callable[..., Any], out: Tensor, x: Tensor) -> None:
        with rank_lost():
            if x.is_cuda and self._moves_through_host:
                moved = torch.empty_like(out, device="cpu")
                collective(moved, x.cpu(), group=self.group)
                out.copy_(moved)
            else:
                collective(out, x, group=self.group)

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        self.sent["reduce"] += 2 * (self.size - 1) / self.size * _bytes(x)
        # NCCL reads tensors on a GPU only, gloo those of the host.
        where = "cpu" if self._moves_through_host else torch.device("cuda")
        y = x.to(where, copy=True)
        with rank_lost():
            dist.all_reduce(y, op=op, group=self.group)
        return y.to(x.device)


def chunks_of(n: int, size: int, rank: int) -> list[tuple[int, int]]:
    """The two ranges of positions (start, stop) that a rank holds."""
    length, longer = divmod(n, 2 * size)

    def start(j: int) -> int:
        # The first chunks are the longer ones: with n >= R, every rank has a token.
        return j * length + min(j, longer)

    return [(start(j), start(j + 1)) for j in (rank, 2 * size - 1 - rank)]


def _bytes(x: Tensor) -> int:
    return math.prod(x.shape) * x.element_size()
