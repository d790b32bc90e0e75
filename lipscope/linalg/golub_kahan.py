"""Golub-Kahan bidiagonalisation of a batch of operators, with full reorthogonalisation and thick
restart.

Krylov vectors are kept beside the operator, there in two bytes per number, or in the host's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.linalg.operator import LOCAL, LinearOperator, Space

STORAGES = ("native", "bfloat16", "host")

BLOCK = 256 << 20
"""Bytes brought back at once from the host, or from bfloat16."""

HALF_UNIT = 2.0**-9
"""Relative rounding of a number kept in bfloat16."""

FIRST_ROOM = 16
"""Steps that room is made for at first, for which V needs a vector more; doubled when full."""

EVERY = slice(None)


def memory_of(device: torch.device) -> int:
    """All the bytes a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Basis:
    """Krylov vectors, kept in blocks [room, B, N] that come to the operator one after the other.

    "native" keeps them in a single block, whose room is doubled when it is full. In bfloat16 the
    first vector keeps all its digits: a search started from a good guess changes that guess little,
    and only the change is rounded.
    """

    def __init__(self, like: Float[Tensor, "B N"], storage: str, most: int, space: Space = LOCAL):
        self.shape = like.shape
        self.dtype = like.dtype
        self.device = like.device
        self.storage = storage
        self.most = most
        self.space = space
        self.blocks: list[Tensor] = []
        self.height = max(1, BLOCK // (like.numel() * like.element_size()))
        if storage != "native":  # the same on all ranks, which reduce products block by block
            self.height = space.smallest(self.height)

    def put(self, k: int, x: Float[Tensor, "B N"]) -> Tensor:
        """Keep x as vector k, at most the next one; return it in the precision it came in."""
        size = sum(map(len, self.blocks))
        if k == size:
            exact = self.storage != "bfloat16" or not size
            more = self.height if self.storage == "host" or size else 1
            if self.storage == "native":
                more = min(max(FIRST_ROOM + 1, 2 * size), self.most)
            elsewhere = self.storage == "host"
            block = torch.empty(
                more,
                *self.shape,
                dtype=self.dtype if exact else torch.bfloat16,
                device="cpu" if elsewhere else self.device,
                pin_memory=elsewhere and self.device.type == "cuda",
            )
            if self.storage == "native" and size:
                block[:size] = self.blocks.pop()
            self.blocks.append(block)
        for block in self.blocks:
            if k < len(block):
                block[k].copy_(x, non_blocking=True)
                return block[k] if self.storage == "native" else x
            k -= len(block)
        raise AssertionError("vectors are kept one after the other")

    def _brought(self, k: int, members: slice = EVERY) -> Iterator[tuple[slice, Tensor]]:
        """The first k vectors block by block, the last ones first, where the operator lives."""
        start = sum(map(len, self.blocks))
        for block in reversed(self.blocks):
            start -= len(block)
            rows = block[: max(0, k - start), members]
            if len(rows):
                yield (
                    slice(start, start + len(rows)),
                    rows.to(self.device, self.dtype, non_blocking=True),
                )

    def without(self, w: Float[Tensor, "B N"], k: int) -> tuple[Tensor, Tensor]:
        """w less its part in the span of the first k vectors, and the coefficients [B, k] of it.

        The exact vector comes last: rounded ones would bring some of it back.
        """
        coefficients = torch.zeros(w.shape[0], k, dtype=w.dtype, device=w.device)
        for cut, rows in self._brought(k):
            # As row vectors: the column form is an order of magnitude slower on a CPU.
            Q = rows.transpose(0, 1)
            c = self.space.sum(torch.bmm(w[:, None], Q.mT))
            w = torch.baddbmm(w[:, None], c, Q, alpha=-1)[:, 0]
            coefficients[:, cut] = c[:, 0]
        return w, coefficients

    def combine(
        self, coefficients: Float[Tensor, "B j k"], members: slice = EVERY
    ) -> Float[Tensor, "j B N"]:
        """Linear combinations of the first k vectors, for some of the members."""
        parts = (
            torch.bmm(coefficients[..., cut].to(rows), rows.transpose(0, 1)).transpose(0, 1)
            for cut, rows in self._brought(coefficients.shape[-1], members)
        )
        total = next(parts)
        for part in parts:
            total += part
        return total

    def keep(self, members: Tensor) -> None:
        """Keep the vectors of these members only."""
        self.shape = torch.Size((len(members), *self.shape[1:]))
        kept = [block[:, members.to(block.device)] for block in self.blocks]
        self.blocks = [x if x.device == self.device else x.pin_memory() for x in kept]


def norms(x: Float[Tensor, "B N"], space: Space = LOCAL) -> Float[Tensor, "B"]:
    """Norms of the members, summed in float64: float32 sums of long vectors are too inaccurate."""
    return space.norm(torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)).cpu()


class GolubKahan:
    """After k steps, with orthonormal rows in U and V (and the operator scaled by an exact power of
    two, `scale`),

        J V'  = U' H
        J' U' = V' H' + b v_{k+1} e_k'

    so the singular values of the small matrix H approach those of J from below. H is upper
    bidiagonal, diag(a) and superdiag(b), until a restart; `coefficients` keeps those a and b,
    `drift` the rounding seen in them. The current vectors, `u` and `v`, always have all their
    digits."""

    def __init__(
        self,
        J: LinearOperator,
        start: Float[Tensor, "B N"],
        storage: str = "native",
        memory: int | None = None,
    ):
        if memory is None:
            memory = 2 << 30
            if storage == "host":
                memory = memory_of(torch.device("cpu")) // 2
            elif J.device.type == "cuda":
                memory = torch.cuda.mem_get_info(J.device)[0] // 2
        number = 2 if storage == "bfloat16" else start.element_size()
        capacity = memory // (len(start) * (J.in_size + J.out_size) * number)
        self.J = J
        self.members = start.shape[0]
        self.space = J.space
        most = 1 + min(J.domain_size, J.range_size)
        self.capacity = max(4, min(J.space.smallest(capacity), most))
        self.k = 0
        image = start.new_empty(1).expand(self.members, J.out_size)
        self.V = Basis(start, storage, self.capacity + 1, J.space)
        self.U = Basis(image, storage, self.capacity, J.space)
        room = min(self.capacity, FIRST_ROOM)
        self.H = torch.zeros(self.members, room, room, dtype=torch.float64)
        self.b = torch.zeros(self.members, dtype=torch.float64)
        self.scale = torch.ones(self.members, dtype=torch.float64)
        self.drift = torch.zeros(self.members, dtype=torch.float64)
        self.coefficients: list[tuple[Tensor, Tensor]] = []
        self.restarted = False
        self.rounded = storage == "bfloat16"
        self.v = self.V.put(0, start / J.space.norm(start.norm(dim=1, keepdim=True)))
        self.u = self.v[:, :0]

    def step(self) -> None:
        """Extend both bases by one vector: one product with J, one with J'."""
        if self.k == self.capacity:
            self._restart()
        room = self.H.shape[-1]
        if self.k == room:
            more = min(room, self.capacity - room)
            self.H = torch.nn.functional.pad(self.H, (0, more, 0, more))
        k = self.k
        J = self.J
        w = J.product(J.mv, self.v, J.in_shape, self.scale)
        if k == 0:
            # Scale J by the power of two that brings J v_1 to order one, so that no norm under- or
            # overflows.
            limit = 1000 if w.dtype == torch.float64 else 120
            largest = self.space.largest(w.abs().amax(dim=1).double()).cpu()
            usable = largest.isfinite() & (largest > 0)
            exponent = torch.frexp(torch.where(usable, largest, 1.0)).exponent.clamp(-limit, limit)
            self.scale = torch.ldexp(torch.ones_like(largest), -exponent)
            w = w * self.scale.to(w)[:, None]
        # a_k u_k = J v_k - b_{k-1} u_{k-1}
        w, h = self._orthogonalize(w, self.U, k, self.u, self.b)
        a, u = self._normalize(w)
        self.u = self.U.put(k, u)
        # b_k v_{k+1} = J' u_k - a_k v_k
        z = J.product(J.rmv, self.u, J.out_shape, self.scale)
        z, c = self._orthogonalize(z, self.V, k + 1, self.v, a)
        b, v = self._normalize(z)
        self.v = self.V.put(k + 1, v)
        if not self.rounded:  # where h is what rounding does to the basis, not what J does
            self.H[:, :k, k] = h
        if k:
            self.H[:, k - 1, k] += 0.0 if self.restarted else self.b
        self.H[:, k, k] = a
        self.b = b
        self.k = k + 1
        if not self.restarted:
            self.coefficients.append((a, b))
            # The largest departure so far from the three-term recurrence: rounding made visible.
            self.drift = torch.maximum(self.drift, torch.maximum(h.norm(dim=1), c.norm(dim=1)))

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Largest singular triplet of H: theta [B], left p [B, k], right q [B, k]; NaN where the
        products were.

        H q = theta p to the last digit, which the SVD alone may miss by 39 eps: more than products
        are off."""
        H = self.H[:, : self.k, : self.k]
        finite = H.isfinite().all(dim=(1, 2))
        H = torch.where(finite[:, None, None], H, 0.0)
        p, _, qh = torch.linalg.svd(H)
        q = self.space.broadcast(qh[:, 0])  # all ranks must stop at the same step
        image = (H @ q[:, :, None])[:, :, 0]
        theta = torch.linalg.vector_norm(image, dim=1)
        p = torch.where(theta[:, None] > 0, image / theta[:, None], p[:, :, 0])
        nan = torch.where(finite, torch.zeros_like(theta), torch.nan)
        return theta + nan, p + nan[:, None], q + nan[:, None]

    def vectors(self, i: int, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """V' q, U' p and J' U' p = V' H' p + b p_k v_{k+1} of member i, by the recurrence."""
        own = slice(i, i + 1)
        right = self.V.combine(q[None, None], own)[0, 0]
        left = self.U.combine(p[None, None], own)[0, 0]
        H = self.H[own, : self.k, : self.k]
        inside = self.V.combine((H.mT @ p[None, :, None]).mT, own)[0]
        back = inside + (self.b[own] * p[None, -1]).to(inside)[:, None] * self.v[own]
        return right, left, back[0]

    def keep(self, members: Tensor) -> None:
        """Continue with these members only."""
        assert self.J.take is not None
        self.J = self.J.take(members)
        self.members = len(members)
        self.V.keep(members)
        self.U.keep(members)
        self.v = self.v[members]
        self.u = self.u[members]
        self.H = self.H[members]
        self.b = self.b[members]
        self.scale = self.scale[members]
        self.drift = self.drift[members]
        self.coefficients = [(a[members], b[members]) for a, b in self.coefficients]

    def _normalize(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Norm and unit vector; rounding noise counts as zero: the Krylov space is invariant."""
        norm = norms(w, self.space)
        floor = (
            8 * torch.finfo(w.dtype).eps * self.H[:, : self.k, : self.k].abs().amax(dim=(1, 2))
            if self.k
            else 0 * norm
        )
        norm = torch.where(norm <= floor, 0.0, norm)
        inverse = torch.where(norm == 0, 0.0, 1 / norm)
        return norm, w * inverse.to(w)[:, None]

    def _orthogonalize(
        self, w: Float[Tensor, "B N"], basis: Basis, k: int, last: Tensor, known: Tensor
    ) -> tuple[Tensor, Tensor]:
        """w less its part along the first k vectors, and its coefficients beyond `known`."""
        coefficients = torch.zeros(w.shape[0], k, dtype=w.dtype, device=w.device)
        if not k:
            return w, coefficients.double().cpu()
        # With the known term along the last vector gone, one pass over the basis suffices. After a
        # restart nothing is known: two passes.
        if not self.restarted:
            w = w - known.to(w)[:, None] * last
        for _ in range(2 if self.restarted else 1):
            w, c = basis.without(w, k)
            coefficients += c
        return w, coefficients.double().cpu()

    def _restart(self) -> None:
        """Keep the leading third of the Ritz vectors and v_{k+1}.

        J V = U diag(theta) and J' U = V diag(theta) + v_{k+1} (b p_k)'.
        """
        H = self.H[:, : self.k, : self.k]
        finite = H.isfinite().all(dim=(1, 2))[:, None, None]
        p, theta, qh = map(self.space.broadcast, torch.linalg.svd(torch.where(finite, H, 0.0)))
        kept = max(1, self.k // 3)
        V = self.V.combine(qh[:, :kept])
        U = self.U.combine(p.mT[:, :kept])
        self.v = self.V.put(kept, self.v)
        for i in range(kept):
            self.V.put(i, V[i])
            self.U.put(i, U[i])
        self.H.zero_()
        self.H[:, :kept, :kept] = torch.diag_embed(theta[:, :kept])
        self.k = kept
        self.restarted = True
