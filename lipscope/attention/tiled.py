"""The same attention and derivatives in O(n d) memory: the dense formulas on one block of rows at a time.

A block of rows needs whole rows of scores only, so there is no running softmax, and causal order or a window leave
columns out. A problem that fits one tile is one block: then this is the dense formula itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lipscope.attention import reference
from lipscope.attention.pattern import Pattern
from lipscope.attention.reference import Triple

TILE = 1 << 20
"""Scores held at once: a handful of arrays of this size, whatever n is."""


def _blocks(q: Tensor, k: Tensor, pattern: Pattern) -> Iterator[tuple[slice, slice, Pattern]]:
    n, per_row = q.shape[-2], k.shape[-2] * max(1, q[..., 0, 0].numel())
    height = max(1, min(n, TILE // per_row))
    for start in range(0, n, height):
        rows = slice(start, min(n, start + height))
        cols = pattern.columns(rows, k.shape[-2])
        yield rows, cols, pattern.tile(rows, cols)


class _Sum:
    """The blocks' contributions to the keys; made from the first part, hence batched when the parts are (vmap)."""

    def __init__(self, like: Tensor):
        self.like = like

    def add(self, cols: slice, part: Tensor) -> None:
        if not hasattr(self, "total"):
            self.total = part.new_zeros(self.like.shape)
        self.total[..., cols, :] += part


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    parts = [reference.forward(q[..., r, :], k[..., c, :], v[..., c, :], tile) for r, c, tile in _blocks(q, k, pattern)]
    return torch.cat([o for o, _ in parts], dim=-2), torch.cat([lse for _, lse in parts], dim=-1)


def jvp(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tangent: Triple, pattern: Pattern) -> Tensor:
    dq, dk, dv = tangent
    parts = []
    for r, c, tile in _blocks(q, k, pattern):
        W = reference.weights(q[..., r, :], k[..., c, :], lse[..., r], tile)
        local = (dq[..., r, :], dk[..., c, :], dv[..., c, :])
        parts.append(reference.jvp(W, q[..., r, :], k[..., c, :], v[..., c, :], o[..., r, :], local))
    return torch.cat(parts, dim=-2)


def vjp(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, g: Tensor, pattern: Pattern) -> Triple:
    queries, keys, values = [], _Sum(k), _Sum(v)
    for r, c, tile in _blocks(q, k, pattern):
        q_, k_, v_, o_ = q[..., r, :], k[..., c, :], v[..., c, :], o[..., r, :]
        W = reference.weights(q_, k_, lse[..., r], tile)
        part_q, part_k, part_v = reference.vjp(W, q_, k_, v_, o_, g[..., r, :])
        queries.append(part_q)
        keys.add(c, part_k)
        values.add(c, part_v)
    return torch.cat(queries, dim=-2), keys.total, values.total


def second_vjp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tangent: Triple, g: Tensor, pattern: Pattern
) -> Triple:
    dq, dk, dv = tangent
    queries, keys, values = [], _Sum(k), _Sum(v)
    for r, c, tile in _blocks(q, k, pattern):
        q_, k_, v_, o_ = q[..., r, :], k[..., c, :], v[..., c, :], o[..., r, :]
        W = reference.weights(q_, k_, lse[..., r], tile)
        local = (dq[..., r, :], dk[..., c, :], dv[..., c, :])
        part_q, part_k, part_v = reference.second_vjp(W, q_, k_, v_, o_, local, g[..., r, :])
        queries.append(part_q)
        keys.add(c, part_k)
        values.add(c, part_v)
    return torch.cat(queries, dim=-2), keys.total, values.total


def second_jvp(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, first: Triple, other: Triple, pattern: Pattern) -> Tensor:
    parts = []
    for r, c, tile in _blocks(q, k, pattern):
        q_, k_, v_ = q[..., r, :], k[..., c, :], v[..., c, :]
        W = reference.weights(q_, k_, lse[..., r], tile)
        cut = [(dq[..., r, :], dk[..., c, :], dv[..., c, :]) for dq, dk, dv in (first, other)]
        parts.append(reference.second_jvp(W, q_, k_, v_, cut[0], cut[1]))
    return torch.cat(parts, dim=-2)
