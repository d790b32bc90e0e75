"""Where Krylov vectors are kept: beside the operator, there in two bytes a number, or in the host's
memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.linalg.space import LOCAL, Space

STORAGES = ("native", "bfloat16", "host")

BLOCK = 256 << 20
"""Bytes brought back at once from the host, or from bfloat16."""

HALF_UNIT = 2.0**-9
"""Relative rounding of a number kept in bfloat16."""

EVERY = slice(None)


def memory_of(device: torch.device) -> int:
    """All the bytes a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def make_basis(
    storage: str, room: int, like: Float[Tensor, "B N"], space: Space = LOCAL
) -> Native | Blocks:
    """An empty basis of vectors like this one; `room` is where a native one starts."""
    if storage == "native":
        return Native(room, like, space)
    return Blocks(like, rounded=storage == "bfloat16", space=space)


class Native:
    """All vectors in one tensor [room, B, N]: vector k of all members is contiguous, as the
    products want it.
    """

    def __init__(self, room: int, like: Float[Tensor, "B N"], space: Space = LOCAL):
        self.vectors = like.new_empty(room, *like.shape)
        self.space = space

    def __getitem__(self, k: int | slice) -> Tensor:
        return self.vectors[k]

    def put(self, k: int, x: Float[Tensor, "B N"]) -> Tensor:
        """Keep x as vector k; what is returned is x, in the precision it came in."""
        self.vectors[k] = x
        return self.vectors[k]

    def reserve(self, room: int) -> None:
        more = room - len(self.vectors)
        if more > 0:
            self.vectors = torch.cat(
                [self.vectors, self.vectors.new_empty(more, *self.vectors.shape[1:])]
            )

    def without(self, w: Float[Tensor, "B N"], k: int) -> tuple[Tensor, Tensor]:
        """w less its part in the span of the first k vectors, and the coefficients [B, k] of that
        part.
        """
        return _project_out(w, self.vectors[:k], self.space)

    def combine(
        self, coefficients: Float[Tensor, "B j k"], members: slice = EVERY
    ) -> Float[Tensor, "j B N"]:
        """Linear combinations of the first k vectors, for some of the members."""
        return _combine(coefficients, self.vectors[: coefficients.shape[-1], members])

    def keep(self, members: Tensor) -> None:
        self.vectors = self.vectors[:, members]


class Blocks:
    """Vectors in blocks that are brought to the operator one after the other.

    In bfloat16 the first vector keeps all its digits: a search started from a good guess changes
    that guess little, and only the change is rounded."""

    def __init__(self, like: Float[Tensor, "B N"], rounded: bool, space: Space = LOCAL):
        self.shape = like.shape
        self.dtype = like.dtype
        self.device = like.device
        self.rounded = rounded
        # The same on all ranks: they reduce their inner products block by block.
        self.height = space.smallest(max(1, BLOCK // (like.numel() * like.element_size())))
        self.space = space
        self.blocks: list[Tensor] = []

    def put(self, k: int, x: Float[Tensor, "B N"]) -> Tensor:
        """Keep x as vector k; what is returned is x itself."""
        for block in self.blocks:
            if k < len(block):
                block[k].copy_(x, non_blocking=True)
                return x
            k -= len(block)
        self.blocks.append(self._new_block())
        return self.put(len(self) - len(self.blocks[-1]) + k, x)

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def _new_block(self) -> Tensor:
        if self.rounded:
            exact = not self.blocks
            kind = self.dtype if exact else torch.bfloat16
            return torch.empty(
                1 if exact else self.height, *self.shape, dtype=kind, device=self.device
            )
        return torch.empty(
            self.height, *self.shape, dtype=self.dtype, pin_memory=self.device.type == "cuda"
        )

    def reserve(self, room: int) -> None:
        """Blocks are made when they are needed."""

    def _brought(self, k: int, members: slice = EVERY) -> Iterator[tuple[slice, Tensor]]:
        """The first k vectors block by block, the last ones first, brought to where the operator
        lives.
        """
        start = len(self)
        for block in reversed(self.blocks):
            start -= len(block)
            rows = block[: max(0, k - start), members]
            if len(rows):
                yield (
                    slice(start, start + len(rows)),
                    rows.to(self.device, self.dtype, non_blocking=True),
                )

    def without(self, w: Float[Tensor, "B N"], k: int) -> tuple[Tensor, Tensor]:
        """As in `Native`, block by block; the exact vector comes last: rounded ones would bring
        some of it back.
        """
        coefficients = torch.zeros(w.shape[0], k, dtype=w.dtype, device=w.device)
        for cut, rows in self._brought(k):
            w, coefficients[:, cut] = _project_out(w, rows, self.space)
        return w, coefficients

    def combine(
        self, coefficients: Float[Tensor, "B j k"], members: slice = EVERY
    ) -> Float[Tensor, "j B N"]:
        parts = (
            _combine(coefficients[..., cut], rows)
            for cut, rows in self._brought(coefficients.shape[-1], members)
        )
        total = next(parts)
        for part in parts:
            total += part
        return total

    def keep(self, members: Tensor) -> None:
        self.shape = torch.Size((len(members), *self.shape[1:]))
        self.blocks = [self._pinned(block[:, members.to(block.device)]) for block in self.blocks]

    def _pinned(self, block: Tensor) -> Tensor:
        return block.pin_memory() if block.device != self.device else block


def _project_out(
    w: Float[Tensor, "B N"], basis: Float[Tensor, "k B N"], space: Space
) -> tuple[Tensor, Tensor]:
    # As row vectors: the column form of the same products is an order of magnitude slower on a CPU.
    Q = basis.transpose(0, 1)
    c = space.sum(torch.bmm(w[:, None], Q.mT))
    return torch.baddbmm(w[:, None], c, Q, alpha=-1)[:, 0], c[:, 0]


def _combine(
    coefficients: Float[Tensor, "B j k"], basis: Float[Tensor, "k B N"]
) -> Float[Tensor, "j B N"]:
    return torch.bmm(coefficients.to(basis), basis.transpose(0, 1)).transpose(0, 1)
