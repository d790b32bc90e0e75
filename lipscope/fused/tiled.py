"""Attention and its derivatives in O(n d) memory: the dense formulas, a block of rows at a time.

A block consists of whole rows of scores, so no running softmax is needed, and causal order or a
window skip columns. A problem that fits into one tile is a single block: the dense formula itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lipscope.fused import reference
from lipscope.fused._torch_internals import traced
from lipscope.fused.pattern import Pattern
from lipscope.fused.reference import Triple

TILE = 1 << 20
ON_GPU = 32
"""Number of scores in memory at once, whatever n is, and the factor for a GPU, which small arrays
would leave idle."""


def _blocks(q: Tensor, k: Tensor, pattern: Pattern) -> Iterator[tuple[slice, slice, Pattern]]:
    n = q.shape[-2]
    per_row = k.shape[-2] * max(1, q[..., 0, 0].numel())
    height = max(1, min(n, TILE * (ON_GPU if q.is_cuda else 1) // per_row))
    return pattern.blocks(n, k.shape[-2], height)


class _Whole:
    """The sum of the blocks, [..., n, size]: query rows are disjoint, key rows are shared."""

    # Allocated like the first part, and therefore batched when the parts are (vmap). Parts are
    # added immediately: small results kept between large temporaries would fragment the heap.

    def __init__(self, n: int):
        self.n = n

    def add(self, cut: slice, part: Tensor) -> None:
        if not hasattr(self, "total"):
            if cut == slice(0, self.n):
                self.total = part
                return
            self.total = part.new_zeros(*part.shape[:-2], self.n, part.shape[-1])
        if traced():  # torch.func.linearize takes what is written in place for a constant
            moved = self.total[..., cut, :] + part
            self.total = self.total.slice_scatter(moved, -2, cut.start, cut.stop)
        else:
            self.total[..., cut, :] += part


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    o = _Whole(q.shape[-2])
    lse = _Whole(q.shape[-2])
    for r, c, tile in _blocks(q, k, pattern):
        part, part_lse = reference.forward(q[..., r, :], k[..., c, :], v[..., c, :], tile)
        o.add(r, part)
        lse.add(r, part_lse[..., None])
    return o.total, lse.total[..., 0]


def jvp(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, tangent: Triple, pattern: Pattern) -> Tensor:
    do, (dq, dk, dv) = _Whole(q.shape[-2]), tangent
    for r, c, tile in _blocks(q, k, pattern):
        W = reference.weights(q[..., r, :], k[..., c, :], lse[..., r], tile)
        local = (dq[..., r, :], dk[..., c, :], dv[..., c, :])
        do.add(r, reference.jvp(W, q[..., r, :], k[..., c, :], v[..., c, :], local))
    return do.total


def value_and_tangent(
    q: Tensor, k: Tensor, v: Tensor, tangent: Triple, pattern: Pattern
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, do, the log-sum-exp, and the mean of dS over each row of P."""
    n, (dq, dk, dv) = q.shape[-2], tangent
    o = _Whole(n)
    do = _Whole(n)
    lse = _Whole(n)
    drift = _Whole(n)
    for r, c, tile in _blocks(q, k, pattern):
        q_ = q[..., r, :]
        k_ = k[..., c, :]
        v_ = v[..., c, :]
        value, top, W = reference.forward_and_weights(q_, k_, v_, tile)
        local = (dq[..., r, :], dk[..., c, :], dv[..., c, :])
        o.add(r, value)
        moved, mean = reference.jvp_and_drift(W, q_, k_, v_, local)
        do.add(r, moved)
        lse.add(r, top[..., None])
        drift.add(r, mean)
    return o.total, do.total, lse.total[..., 0], drift.total[..., 0]


def vjp(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, g: Tensor, pattern: Pattern) -> Triple:
    queries = _Whole(q.shape[-2])
    keys = _Whole(k.shape[-2])
    values = _Whole(k.shape[-2])
    for r, c, tile in _blocks(q, k, pattern):
        q_ = q[..., r, :]
        k_ = k[..., c, :]
        v_ = v[..., c, :]
        W = reference.weights(q_, k_, lse[..., r], tile)
        parts = reference.vjp(W, q_, k_, v_, g[..., r, :])
        for whole, cut, part in zip((queries, keys, values), (r, c, c), parts, strict=True):
            whole.add(cut, part)
    return queries.total, keys.total, values.total


def second_vjp(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, tangent: Triple, g: Tensor, pattern: Pattern
) -> Triple:
    dq, dk, dv = tangent
    queries = _Whole(q.shape[-2])
    keys = _Whole(k.shape[-2])
    values = _Whole(k.shape[-2])
    for r, c, tile in _blocks(q, k, pattern):
        q_ = q[..., r, :]
        k_ = k[..., c, :]
        v_ = v[..., c, :]
        W = reference.weights(q_, k_, lse[..., r], tile)
        local = (dq[..., r, :], dk[..., c, :], dv[..., c, :])
        parts = reference.second_vjp(W, q_, k_, v_, local, g[..., r, :])
        for whole, cut, part in zip((queries, keys, values), (r, c, c), parts, strict=True):
            whole.add(cut, part)
    return queries.total, keys.total, values.total


def both_vjp(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, tangent: Triple, g: Tensor, gd: Tensor,
    pattern: Pattern,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradient of <g, o> + <gd, J d> in q, k, v, dq, dk, dv."""
    dq, dk, dv = tangent
    wholes = [_Whole(x.shape[-2]) for x in (q, k, v, q, k, v)]
    for r, c, tile in _blocks(q, k, pattern):
        q_ = q[..., r, :]
        k_ = k[..., c, :]
        v_ = v[..., c, :]
        W = reference.weights(q_, k_, lse[..., r], tile)
        local = (dq[..., r, :], dk[..., c, :], dv[..., c, :])
        of_tangent = reference.second_vjp(W, q_, k_, v_, local, gd[..., r, :])
        of_value = reference.vjp(W, q_, k_, v_, g[..., r, :])
        onto = [x + y for x, y in zip(of_tangent, of_value, strict=True)]
        onto += reference.vjp(W, q_, k_, v_, gd[..., r, :])
        for whole, cut, part in zip(wholes, (r, c, c) * 2, onto, strict=True):
            whole.add(cut, part)
    return tuple(whole.total for whole in wholes)


def second_jvp(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, first: Triple, other: Triple, pattern: Pattern
) -> Tensor:
    whole = _Whole(q.shape[-2])
    for r, c, tile in _blocks(q, k, pattern):
        q_ = q[..., r, :]
        k_ = k[..., c, :]
        v_ = v[..., c, :]
        W = reference.weights(q_, k_, lse[..., r], tile)
        cut = [(dq[..., r, :], dk[..., c, :], dv[..., c, :]) for dq, dk, dv in (first, other)]
        whole.add(r, reference.second_jvp(W, q_, k_, v_, cut[0], cut[1]))
    return whole.total
