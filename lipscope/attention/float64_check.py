"""How far a product in low precision is from float64: rows of J v, recomputed in float64.

Numbers in float32 and half precision are exact in float64, so the difference is the whole effect of
rounding, whatever cancels along the way. Short sequences are compared in all rows, long ones in the
rows where J v is largest and in rows drawn at random, which represent the others: for each member,
or each head of each member, its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipscope.attention.scores import L2, Dot, augment
from lipscope.fused.primitive import attend
from lipscope.linalg.operator import LOCAL, Space

if TYPE_CHECKING:
    from lipscope.attention.layer import SelfAttention

ROWS = 64
"""Number of rows compared; sequences up to this length are compared in full."""

NUMBERS = 1 << 24
"""Numbers of queries, keys or values in memory; beyond that, heads are taken one by one."""

Comparison = Callable[[Tensor, Tensor, int], Tensor]


def compare(
    f: SelfAttention, X: Tensor, apart: bool, basis: Tensor | None, space: Space = LOCAL
) -> Comparison:
    """A function of tangents [B, n, r], products [B, n, m] and a seed that returns error norms [B].

    X is [M, n, d] and B counts members, or heads of members with `apart`. basis [B | 1, d, r] maps
    tangents to token space; None if they are there already. The seed draws the rows. With several
    ranks, X, tangents and products belong to this rank's tokens, and the rows are chosen among all.
    """

    def difference(tangent: Tensor, product: Tensor, seed: int) -> Tensor:
        n = X.shape[1]
        members = X.shape[0]
        product = product.reshape(-1, n, product.shape[-1])
        E = tangent.double().reshape(product.shape[0], n, -1)
        E = E if basis is None else E @ basis.double().mT
        E = E.reshape(members, -1, n, X.shape[-1])  # one tangent for all heads, or one per head
        size = space.gather(product.double().square().sum(dim=-1, keepdim=True))[..., 0]
        index, share = _rows(size, seed)
        per_head = index.reshape(members, -1, index.shape[-1])  # [M, H | 1, rows]
        whole = members * space.global_shape((n,))[0] * f.Q.shape[0] <= NUMBERS
        step = f.heads if whole else 1
        cuts = [slice(h, h + step) for h in range(0, f.heads, step)]
        with torch.no_grad():
            heads = torch.cat([_head_rows(f, X, E, cut, per_head, space) for cut in cuts], dim=1)
            if apart:
                exact = heads.flatten(0, 1)
            else:
                exact = heads.transpose(1, 2).flatten(-2)
                exact = exact if f.O is None else exact @ f.O.double().T
        off = (exact - space.rows(product, index).double()).square().sum(dim=-1)
        return (off * share).sum(dim=-1).sqrt().cpu()

    return difference


def _rows(size: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to compare [B, rows], by their size [B, n], and how many rows each of them represents.

    A loud member must not choose for the others: their errors may be in rows where it has none.
    """
    n = size.shape[1]
    if n <= ROWS:
        return torch.arange(n, device=size.device).expand_as(size), torch.ones_like(size[0])
    # Errors tend to be where the product is; a random half keeps the estimate of the rest unbiased.
    top = size.nan_to_num().topk(ROWS // 2).indices
    g = torch.Generator().manual_seed(seed)
    lots = torch.rand(size.shape, generator=g, dtype=torch.float32).to(size.device)
    drawn = lots.scatter(1, top, -1.0).topk(min(ROWS // 2, n - ROWS // 2)).indices
    share = torch.ones(top.shape[1] + drawn.shape[1], dtype=torch.float64, device=size.device)
    share[top.shape[1] :] = (n - top.shape[1]) / drawn.shape[1]
    return torch.cat([top, drawn], dim=1), share


def _head_rows(
    f: SelfAttention, X: Tensor, E: Tensor, cut: slice, index: Tensor, space: Space
) -> Tensor:
    """Rows `index` [M, H | 1, rows] of J E before the output projection, in float64.

    Returns [M, heads in cut, rows, m].
    """
    index = index if index.shape[1] == 1 else index[:, cut]
    X = X if f.padding is None else X * space.shard(f.padding, -1)[..., None]
    tokens = X.double()[:, None]
    shared = E.shape[1] == 1
    E = E if shared else E[:, cut]
    rope = f.kernel.rope if isinstance(f.kernel, Dot) else None
    per = f.heads // f.groups

    def heads(W: Tensor, name: str) -> Tensor:
        if name == "q":
            return W.unflatten(0, (f.heads, -1))[cut]
        if shared:
            return W.unflatten(0, (f.groups, -1))[cut.start // per : -(-cut.stop // per)]
        return f.per_head(W)[cut]  # query heads that share keys have different tangents of them

    point = []
    tangent = []
    for name, W, b in zip("qkv", (f.Q, f.K, f.V), f.biases or (None,) * 3, strict=True):
        x = tokens
        dx = E
        if name == "q" and rope is None:  # which rotates all rows
            x = space.rows(x, index)
            dx = space.rows(dx, index)
        W = heads(W.double(), name)
        x = _projected(x, W)
        dx = _projected(dx, W)
        if b is not None:
            x = x + heads(b.double(), name)[:, None]
        if rope is not None and name != "v":
            x = rope.turn(x)
            dx = rope.turn(dx)
        if name != "q":
            x = space.gather(x)
            dx = space.gather(dx)
        elif rope is not None:
            x = space.rows(x, index)
            dx = space.rows(dx, index)
        point.append(x)
        tangent.append(dx)
    sinks = None if f.kernel.sinks is None else f.kernel.sinks.double()[cut]
    mask = _mask_rows(f, index, cut, point[1].shape[-2])

    def rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = f.scale
        if isinstance(f.kernel, L2):
            (q, k), scale = augment(f.kernel, q, k), 1.0
        return attend(q, k, v, scale=scale, mask=mask, softcap=f.kernel.softcap, sinks=sinks)

    return torch.func.jvp(rows, tuple(point), tuple(tangent))[1]


def _projected(x: Tensor, W: Tensor) -> Tensor:
    """x [M, 1, n, d] or [M, h, n, d] through the heads of W [h, k, d]: [M, h, n, k]."""
    if x.shape[1] > 1:
        return x @ W.mT
    # One large product instead of many small ones.
    return (x[:, 0] @ W.flatten(0, 1).T).unflatten(-1, W.shape[:2]).transpose(1, 2)


def _mask_rows(f: SelfAttention, index: Tensor, cut: slice, n: int) -> Tensor:
    """Which keys the queries `index` [M, H | 1, rows] see, [M, H | 1, rows, n]; additive if the
    mask is.
    """
    i = index[..., None]
    j = torch.arange(n, device=index.device)
    seen = torch.ones(1, n, dtype=torch.bool, device=index.device)
    if f.causal:
        seen = seen & (j <= i)
    if f.window:
        seen = seen & (j > i - f.window)
    if f.padding is not None:
        real = f.padding.reshape(-1, 1, n)  # [M | 1, 1, n]
        seen = seen & real[:, :, None] & real.take_along_dim(index, dim=-1)[..., None]
    if f.mask is None:
        return seen
    mask = f.mask_per_head
    assert mask is not None
    mask = mask[(None,) * (4 - mask.ndim)]
    mask = (mask if mask.shape[1] == 1 else mask[:, cut]).expand(-1, -1, n, n)
    rows = mask.take_along_dim(i, dim=-2)
    if rows.dtype == torch.bool:
        return seen & rows
    return torch.where(seen, rows.double(), -torch.inf)
