"""Products with J and J' on the CPU from a kept P, a piece at a time that fits into the cache.

The formulas are those of `reference`. What differs is how memory is used: the scores of a piece are
written once and changed in place while they are in the cache, and every result is formed as its
transpose, [k, n] in memory, which the library multiplies up to twice as fast as [n, k] in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lipscope.fused._torch_internals import is_observed
from lipscope.fused.reference import Triple, Weights, heads, rows

PIECE = 1 << 19
"""Bytes of scores in a piece, per thread: a few such arrays stay in a cache of one or two
megabytes, which every core has for itself."""


SHORT = 64
"""Rows of P below which a plain product is faster: nothing leaves the cache there."""


def usable(W: Weights, x: Tensor) -> bool:
    """Whether products may be formed in place: on the CPU, where nobody records or maps them."""
    if x.device.type != "cpu" or x.requires_grad or W.P.shape[-1] < SHORT:
        return False
    return not is_observed(x)


def jvp(W: Weights, q: Tensor, k: Tensor, v: Tensor, tangent: Triple) -> Tensor:
    """`reference.jvp`; what is returned is [..., m, n] in memory."""
    groups, (dq, dk, dv) = k.shape[-3], tangent
    q_ = rows(q, groups)
    dq_ = rows(dq, groups)
    do = q_.new_empty(*q_.shape[:-2], v.shape[-1], q_.shape[-2]).mT  # column after column
    for keys, part in _pieces(W.P):
        P = W.P[part]
        # dT = dq k' + q dk'
        S = torch.bmm(dq_[part], k[keys].mT).baddbmm_(q_[part], dk[keys].mT)
        if W.slope is not None:
            S.mul_(W.slope[part])
        dP = _spread_out(S, P)
        # do' = v' dP' + dv' P'
        torch.bmm(v[keys].mT, dP.mT, out=do[part].mT).baddbmm_(dv[keys].mT, P.mT)
    return heads(do, q.shape[-3])


def vjp(W: Weights, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Triple:
    """`reference.vjp`; all three are [..., k, n] in memory."""
    groups = k.shape[-3]
    q_ = rows(q, groups)
    g_ = rows(g, groups)
    gq, gk, gv = (
        x.new_empty(*x.shape[:-2], size, x.shape[-2]).mT  # column after column
        for x, size in ((q_, q_.shape[-1]), (k, k.shape[-1]), (k, v.shape[-1]))
    )
    for keys, part in _pieces(W.P):
        P = W.P[part]
        gT = _spread_out(torch.bmm(g_[part], v[keys].mT), P)
        if W.slope is not None:
            gT.mul_(W.slope[part])
        # gq' = k' gT',  gk' = q' gT,  gv' = g' P, where rows of other pieces have added theirs
        torch.bmm(k[keys].mT, gT.mT, out=gq[part].mT)
        added = 0 if part[2].start == 0 else 1
        gk[keys].mT.baddbmm_(q_[part].mT, gT, beta=added)
        gv[keys].mT.baddbmm_(g_[part].mT, P, beta=added)
    return heads(gq, q.shape[-3]), gk, gv


def _spread_out(S: Tensor, P: Tensor) -> Tensor:
    """P (S - rowsum(P S)), in place of S."""
    return S.sub_((P * S).sum(-1, keepdim=True)).mul_(P)


Index = tuple[int | slice, int | slice]
Part = tuple[int | slice, int | slice, slice]


def _pieces(P: Tensor) -> Iterator[tuple[Index, Part]]:
    """Which heads, and which of their rows of P [M, G, rows, n'], make a batch of few matrices."""
    members, groups, height, width = P.shape
    row = width * P.element_size()
    piece = PIECE * torch.get_num_threads()
    together = max(1, piece // (height * row))
    tall = max(1, min(height, piece // row))
    # A batch runs along one dimension: over members of a single head, or over the heads of one.
    if groups == 1:
        batches: Iterator[Index] = (
            (slice(i, i + together), 0) for i in range(0, members, together)
        )
    else:
        batches = (
            (m, slice(i, i + together)) for m in range(members) for i in range(0, groups, together)
        )
    for keys in batches:
        for top in range(0, height, tall):
            yield keys, (*keys, slice(top, top + tall))
