"""Golub-Kahan bidiagonalisation of a batch of operators, with full reorthogonalisation and thick
restart.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.linalg.basis import EVERY, Blocks, Native, make_basis
from lipscope.linalg.operator import LinearOperator, Product
from lipscope.linalg.space import LOCAL, Space

FIRST_ROOM = 16
"""Basis vectors allocated at first; doubled when full."""


def norms(x: Float[Tensor, "B N"], space: Space = LOCAL) -> Float[Tensor, "B"]:
    """Norms of the members, summed in float64: a float32 sum of a long vector is off by more than
    it should be.
    """
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
        self, J: LinearOperator, start: Float[Tensor, "B N"], capacity: int, storage: str = "native"
    ):
        self.J = J
        self.members = start.shape[0]
        self.space = J.space
        most = 1 + min(J.domain_size, J.range_size)
        self.capacity = max(4, min(J.space.smallest(capacity), most))
        self.k = 0
        room = min(self.capacity, FIRST_ROOM)
        self.V = make_basis(storage, room + 1, start, J.space)
        image = start.new_empty(1).expand(self.members, J.out_size)
        self.U = make_basis(storage, room, image, J.space)
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
        self._grow()
        k = self.k
        w = self._product(self.J.mv, self.v, self.J.in_shape)
        if k == 0:
            w = self._prescale(w)
        # a_k u_k = J v_k - b_{k-1} u_{k-1}
        w, h = self._orthogonalize(w, self.U, k, self.u, self.b)
        a, u = self._normalize(w)
        self.u = self.U.put(k, u)
        # b_k v_{k+1} = J' u_k - a_k v_k
        z = self._product(self.J.rmv, self.u, self.J.out_shape)
        z, c = self._orthogonalize(z, self.V, k + 1, self.v, a)
        b, v = self._normalize(z)
        self.v = self.V.put(k + 1, v)
        self._note_drift(h, c)
        if not self.rounded:  # where h is what rounding does to the basis, not what J does
            self.H[:, :k, k] = h
        if k:
            self.H[:, k - 1, k] += 0.0 if self.restarted else self.b
        self.H[:, k, k] = a
        self.b = b
        self.k = k + 1
        if not self.restarted:
            self.coefficients.append((a, b))

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

    def pulled_back(self, p: Tensor, members: slice = EVERY) -> Tensor:
        """J' U' p as the recurrence has it, V' H' p + b p_k v_{k+1}, for some of the members."""
        H = self.H[members, : self.k, : self.k]
        inside = self.V.combine((H.mT @ p[:, :, None]).mT, members)[0]
        return inside + (self.b[members] * p[:, -1]).to(inside)[:, None] * self.v[members]

    def keep(self, members: Tensor) -> None:
        """Go on with these members only."""
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

    def _product(self, product: Product, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        leading = self.J.leading
        y = product(x.reshape((*leading, *shape))).reshape(self.members, -1)
        return y * self.scale.to(y)[:, None]

    def _prescale(self, w: Tensor) -> Tensor:
        """Scale J by the power of two that brings J v_1 to order one, so that no norm under- or
        overflows.
        """
        limit = 1000 if w.dtype == torch.float64 else 120
        largest = self.space.largest(w.abs().amax(dim=1).double()).cpu()
        usable = largest.isfinite() & (largest > 0)
        exponent = torch.frexp(torch.where(usable, largest, 1.0)).exponent.clamp(-limit, limit)
        self.scale = torch.ldexp(torch.ones_like(largest), -exponent)
        return w * self.scale.to(w)[:, None]

    def _normalize(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Norm and unit vector; a vector of rounding noise counts as zero: the Krylov space is
        invariant.
        """
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
        self, w: Float[Tensor, "B N"], basis: Native | Blocks, k: int, last: Tensor, known: Tensor
    ) -> tuple[Tensor, Tensor]:
        """w less its part in the span of the first k vectors, and the coefficients beyond the
        recurrence's `known` one.

        The known term, along the last vector, goes first: one pass over the basis then suffices.
        After a restart nothing is known: two passes."""
        coefficients = torch.zeros(w.shape[0], k, dtype=w.dtype, device=w.device)
        if not k:
            return w, coefficients.double().cpu()
        if not self.restarted:
            w = w - known.to(w)[:, None] * last
        for _ in range(2 if self.restarted else 1):
            w, c = basis.without(w, k)
            coefficients += c
        return w, coefficients.double().cpu()

    def _note_drift(self, h: Tensor, c: Tensor) -> None:
        """Largest departure so far from the three-term recurrence: rounding made visible."""
        if not self.restarted:
            self.drift = torch.maximum(self.drift, torch.maximum(h.norm(dim=1), c.norm(dim=1)))

    def _grow(self) -> None:
        room = self.H.shape[-1]
        if self.k == room:
            more = min(room, self.capacity - room)
            self.V.reserve(room + more + 1)
            self.U.reserve(room + more)
            self.H = torch.nn.functional.pad(self.H, (0, more, 0, more))
            if isinstance(self.V, Native) and isinstance(self.U, Native):
                self.v, self.u = (
                    self.V[self.k],
                    self.U[self.k - 1],
                )  # views: they would hold on to the old bases

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
