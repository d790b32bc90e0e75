"""Attention and its derivatives in O(n d) memory: the dense formulas, a block of rows at a time.

A block consists of whole rows of scores, so no running softmax is needed, and causal order or a
window skip columns. A problem that fits into one tile is a single block: the dense formula itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lipscope.fused import reference
from lipscope.fused._torch_internals import traced
from lipscope.fused.pattern import Pattern
from lipscope.fused.reference import Triple, Weights

TILE = 1 << 20
ON_GPU = 32
"""Number of scores in memory at once, whatever n is, and the factor for a GPU, which small arrays
would leave idle."""


def _blocks(q: Tensor, k: Tensor, pattern: Pattern) -> Iterator[tuple[slice, slice, Pattern]]:
    n = q.shape[-2]
    per_row = k.shape[-2] * max(1, q[..., 0, 0].numel())
    height = max(1, min(n, TILE * (ON_GPU if q.is_cuda else 1) // per_row))
    return pattern.blocks(n, k.shape[-2], height)


@dataclass(eq=False)
class _Whole:
    """The sum of the blocks, [..., n, size]: query rows are disjoint, key rows are shared."""

    n: int
    total: Any = None

    # Allocated like the first part, and therefore batched when the parts are (vmap). Parts are
    # added immediately: small results kept between large temporaries would fragment the heap.
    def add(self, cut: slice, part: Tensor) -> None:
        if self.total is None:
            if cut == slice(0, self.n):
                self.total = part
                return
            self.total = part.new_zeros(*part.shape[:-2], self.n, part.shape[-1])
        if traced():  # torch.func.linearize takes what is written in place for a constant
            moved = self.total[..., cut, :] + part
            self.total = self.total.slice_scatter(moved, -2, cut.start, cut.stop)
        else:
            self.total[..., cut, :] += part


def _weighted(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, pattern: Pattern
) -> Iterator[tuple[slice, slice, Weights, Triple]]:
    """Rows and columns of each block, its weights, and q, k, v there."""
    for r, c, tile in _blocks(q, k, pattern):
        point = _at((q, k, v), r, c)
        yield r, c, reference.weights(point[0], point[1], lse[..., r], tile), point


def _at(triple: Triple, r: slice, c: slice) -> Triple:
    """Rows r of queries, c of keys and values."""
    q, k, v = triple
    return q[..., r, :], k[..., c, :], v[..., c, :]


def _summed(
    shapes: Triple, blocks: Iterable[tuple[slice, slice, Sequence[Tensor]]]
) -> tuple[Tensor, ...]:
    """Cotangents of q, k, v of all blocks, one or more triples, added up."""
    wholes: list[_Whole] = []
    for r, c, parts in blocks:
        wholes = wholes or [_Whole(shapes[i % 3].shape[-2]) for i in range(len(parts))]
        for i, (whole, part) in enumerate(zip(wholes, parts, strict=True)):
            whole.add(c if i % 3 else r, part)
    return tuple(whole.total for whole in wholes)


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    o = _Whole(q.shape[-2])
    lse = _Whole(q.shape[-2])
    for r, c, tile in _blocks(q, k, pattern):
        part, part_lse = reference.forward(q[..., r, :], k[..., c, :], v[..., c, :], tile)
        o.add(r, part)
        lse.add(r, part_lse[..., None])
    return o.total, lse.total[..., 0]


def jvp(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, tangent: Triple, pattern: Pattern) -> Tensor:
    do = _Whole(q.shape[-2])
    for r, c, W, point in _weighted(q, k, v, lse, pattern):
        do.add(r, reference.jvp(W, *point, _at(tangent, r, c)))
    return do.total


def value_and_tangent(
    q: Tensor, k: Tensor, v: Tensor, tangent: Triple, pattern: Pattern
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, do, the log-sum-exp, and the mean of dS over each row of P."""
    wholes = [_Whole(q.shape[-2]) for _ in range(4)]
    for r, c, tile in _blocks(q, k, pattern):
        point = _at((q, k, v), r, c)
        o, lse, W = reference.forward_and_weights(*point, tile)
        do, drift = reference.jvp_and_drift(W, *point, _at(tangent, r, c))
        for whole, part in zip(wholes, (o, do, lse[..., None], drift), strict=True):
            whole.add(r, part)
    o, do, lse, drift = (whole.total for whole in wholes)
    return o, do, lse[..., 0], drift[..., 0]


def vjp(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, g: Tensor, pattern: Pattern) -> Triple:
    blocks = (
        (r, c, reference.vjp(W, *point, g[..., r, :]))
        for r, c, W, point in _weighted(q, k, v, lse, pattern)
    )
    gq, gk, gv = _summed((q, k, v), blocks)
    return gq, gk, gv


def second_vjp(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, tangent: Triple, g: Tensor, pattern: Pattern
) -> Triple:
    blocks = (
        (r, c, reference.second_vjp(W, *point, _at(tangent, r, c), g[..., r, :]))
        for r, c, W, point in _weighted(q, k, v, lse, pattern)
    )
    gq, gk, gv = _summed((q, k, v), blocks)
    return gq, gk, gv


def both_vjp(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, tangent: Triple, g: Tensor, gd: Tensor,
    pattern: Pattern,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradient of <g, o> + <gd, J d> in q, k, v, dq, dk, dv."""

    def parts() -> Iterator[tuple[slice, slice, Sequence[Tensor]]]:
        for r, c, W, point in _weighted(q, k, v, lse, pattern):
            of_tangent = reference.second_vjp(W, *point, _at(tangent, r, c), gd[..., r, :])
            of_value = reference.vjp(W, *point, g[..., r, :])
            onto = [x + y for x, y in zip(of_tangent, of_value, strict=True)]
            yield r, c, [*onto, *reference.vjp(W, *point, gd[..., r, :])]

    return _summed((q, k, v), parts())


def second_jvp(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, first: Triple, other: Triple, pattern: Pattern
) -> Tensor:
    whole = _Whole(q.shape[-2])
    for r, c, W, point in _weighted(q, k, v, lse, pattern):
        whole.add(r, reference.second_jvp(W, *point, _at(first, r, c), _at(other, r, c)))
    return whole.total
