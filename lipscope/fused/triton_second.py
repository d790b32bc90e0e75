"""The fused backward pass through value and tangent, for bfloat16 and float16.

The gradient of <g, o> + <c, do> in q, k, v, dq, dk, dv. With the score tangents s = dT minus their
mean, w = c v' minus its mean, and

    Z = P * w,     Y = P * (s * w + c dv' - (c * do) 1 + g v' - (g * o) 1):

    gq = Y k + Z dk,   gk = Y' q + Z' dq,   gv = (P * s)' c + P' g,
    gdq = Z k,         gdk = Z' q,          gdv = P' c,

the first two of each line times the scale of the scores.

Two kernels instead of one avoid atomic additions: results do not depend on the order of execution.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from lipscope.fused.pattern import Pattern
from lipscope.fused.triton_masks import mask_of, mask_words, masked, tile_at, tile_counts
from lipscope.fused.triton_operands import (
    aligned,
    blank,
    block,
    ceil_div,
    descriptor,
    padding_of,
    product_of,
)
from lipscope.fused.triton_tiles import (
    LOG2E,
    add_product,
    are_real,
    key_range,
    query_range,
    read,
    read_top,
    row_peak,
    visible,
)


@triton.jit
@no_type_check
def _rows_of(lse, drift, means, offset, rows, n, TOTAL: tl.constexpr):
    """Per query: log-sum-exp, the mean of dT, c * o, and c * do + g * o."""
    top, _ = read_top(lse, offset, rows, n)
    at = offset.to(tl.int64) + rows
    mean_s = tl.load(drift + at, mask=rows < n, other=0.0)
    mean_w = tl.load(means + at, mask=rows < n, other=0.0)
    mean_y = tl.load(means + TOTAL + at, mask=rows < n, other=0.0)
    return top, mean_s, mean_w, mean_y


@triton.jit
@no_type_check
def _onto_queries(
    q, k, v, dq, dk, dv, g, c, o, do, gq, gdq, lse, drift, means, keys, stops, mask, mask_tiles,
    scale, window, shift, n, n_keys, total,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRODUCT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    # The longest rows of a causal mask start first, so that no late block keeps the device waiting.
    i = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    h = tl.program_id(1)
    b = tl.program_id(2)
    group = h // GROUP
    stop = n_keys
    if stops is not None:
        stop = tl.load(stops + b)
    rows = i + tl.arange(0, M)
    offset = (b * tl.num_programs(1) + h) * n
    qi = read(q, b, h, i, M, K)
    dqi = read(dq, b, h, i, M, K)
    gi = read(g, b, h, i, M, V)
    ci = read(c, b, h, i, M, V)
    top, _ = read_top(lse, offset, rows, n)
    at = offset.to(tl.int64) + rows
    mean_s = tl.load(drift + at, mask=rows < n, other=0.0)
    # Products with o are float32, as o is. The other kernel reads them.
    oi = read(o, b, h, i, M, V).to(tl.float32)
    doi = read(do, b, h, i, M, V).to(tl.float32)
    mean_w = tl.sum(ci.to(tl.float32) * oi, 1)
    mean_y = tl.sum(gi.to(tl.float32) * oi + ci.to(tl.float32) * doi, 1)
    tl.store(means + at, mean_w, mask=rows < n)
    tl.store(means + total + at, mean_y, mask=rows < n)
    on_q = tl.zeros([M, K], tl.float32)
    on_dq = tl.zeros([M, K], tl.float32)
    bounds = key_range(i, None, stop, shift, window, CAUSAL, M, N)
    line = i // M
    if MASK != 0:
        mixed, all_tiles = tile_counts(mask, b, h, line)
        bounds = (0, 0, mixed * N, all_tiles * N, 0, mixed * N)
    for run in tl.static_range(3):
        if run > 0 or (MASK == 0 and window is not None):
            for step in tl.range(bounds[2 * run], bounds[2 * run + 1], N):
                j = tile_at(mask, b, h, line, step, N, MASK)
                words = mask_words(mask, b, h, i, j, n, MASK, M, N)
                kj = read(k, b, group, j, N, K)
                dkj = read(dk, b, group, j, N, K)
                vj = read(v, b, group, j, N, V)
                dvj = read(dv, b, group, j, N, V)
                t = tl.dot(qi, kj.T) * (scale * LOG2E)
                s = tl.dot(qi, dkj.T, tl.dot(dqi, kj.T)) * scale - mean_s[:, None]
                w = tl.dot(ci, vj.T) - mean_w[:, None]
                y = tl.dot(ci, dvj.T, tl.dot(gi, vj.T)) - mean_y[:, None]
                columns = j + tl.arange(0, N)
                if run != 1:
                    t = masked(t, words, mask, mask_tiles, b, h, i, j, n, n_keys, MASK, M, N, False)
                p = tl.exp2(t - top[:, None])
                if run != 1 and MASK != 1:
                    seen = visible(rows[:, None], columns[None, :], n_keys, shift, window, CAUSAL)
                    p = tl.where(seen, p, 0.0)
                if keys is not None:
                    p = tl.where(are_real(keys, b, columns, n_keys)[None, :], p, 0.0)
                y = p * (s * w + y)
                z = p * w
                on_q = add_product(on_q, y, row_peak(y, PRODUCT), kj, kj, 1.0, PRODUCT)
                on_q = add_product(on_q, z, row_peak(z, PRODUCT), dkj, dkj, 1.0, PRODUCT)
                on_dq = add_product(on_dq, z, row_peak(z, PRODUCT), kj, kj, 1.0, PRODUCT)
    gq.store([b, h, i, 0], (on_q * scale).to(gq.dtype).reshape(1, 1, M, K))
    gdq.store([b, h, i, 0], (on_dq * scale).to(gdq.dtype).reshape(1, 1, M, K))


@triton.jit
@no_type_check
def _onto_keys(
    q, k, v, dq, dk, dv, g, c, gk, gv, gdk, gdv, lse, drift, means, keys, stops, mask, mask_tiles,
    scale, window, shift, n, n_keys, total,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRODUCT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    # Tiles are transposed here, keys by queries: the sums over queries run along columns.
    j = tl.program_id(0) * N
    group = tl.program_id(1)
    b = tl.program_id(2)
    rows = j + tl.arange(0, N)
    reach = n
    if stops is not None:
        reach = tl.where(j < tl.load(stops + b), n, 0)
    kj = read(k, b, group, j, N, K)
    dkj = read(dk, b, group, j, N, K)
    vj = read(v, b, group, j, N, V)
    dvj = read(dv, b, group, j, N, V)
    on_k = tl.zeros([N, K], tl.float32)
    on_dk = tl.zeros([N, K], tl.float32)
    on_v = tl.zeros([N, V], tl.float32)
    on_dv = tl.zeros([N, V], tl.float32)
    line = j // N
    bounds = query_range(j, None, reach, shift, window, CAUSAL, M, N)
    for member in tl.range(GROUP):
        h = group * GROUP + member
        offset = (b * tl.num_programs(1) * GROUP + h) * n
        if MASK != 0:
            mixed, all_tiles = tile_counts(mask, b, h, line)
            bounds = (0, mixed * M, mixed * M, all_tiles * M, 0, 0)
        for run in tl.static_range(3):
            if (
                run == 1
                or (run == 0 and (CAUSAL or MASK != 0))
                or (window is not None and MASK == 0)
            ):
                for step in tl.range(bounds[2 * run], bounds[2 * run + 1], M):
                    i = tile_at(mask, b, h, line, step, M, MASK)
                    words = mask_words(mask, b, h, i, j, n, MASK, M, N)
                    qi = read(q, b, h, i, M, K)
                    dqi = read(dq, b, h, i, M, K)
                    gi = read(g, b, h, i, M, V)
                    ci = read(c, b, h, i, M, V)
                    columns = i + tl.arange(0, M)
                    top, mean_s, mean_w, mean_y = _rows_of(
                        lse, drift, means, offset, columns, n, total
                    )
                    t = tl.dot(kj, qi.T) * (scale * LOG2E)
                    s = tl.dot(dkj, qi.T, tl.dot(kj, dqi.T)) * scale - mean_s[None, :]
                    w = tl.dot(vj, ci.T) - mean_w[None, :]
                    y = tl.dot(dvj, ci.T, tl.dot(vj, gi.T)) - mean_y[None, :]
                    if run != 1:
                        t = masked(
                            t, words, mask, mask_tiles, b, h, i, j, n, n_keys, MASK, M, N, True
                        )
                    p = tl.exp2(t - top[None, :])
                    if run != 1 and MASK != 1:
                        seen = visible(
                            columns[None, :], rows[:, None], n_keys, shift, window, CAUSAL
                        )
                        p = tl.where(seen, p, 0.0)
                    y = p * (s * w + y)
                    z = p * w
                    u = p * s
                    on_k = add_product(on_k, y, row_peak(y, PRODUCT), qi, qi, 1.0, PRODUCT)
                    on_k = add_product(on_k, z, row_peak(z, PRODUCT), dqi, dqi, 1.0, PRODUCT)
                    on_dk = add_product(on_dk, z, row_peak(z, PRODUCT), qi, qi, 1.0, PRODUCT)
                    on_v = add_product(on_v, u, row_peak(u, PRODUCT), ci, ci, 1.0, PRODUCT)
                    on_v = add_product(on_v, p, 1.0, gi, gi, 1.0, PRODUCT)
                    on_dv = add_product(on_dv, p, 1.0, ci, ci, 1.0, PRODUCT)
    if keys is not None:
        real = are_real(keys, b, rows, n_keys)[:, None]
        on_k = tl.where(real, on_k, 0.0)
        on_v = tl.where(real, on_v, 0.0)
        on_dk = tl.where(real, on_dk, 0.0)
        on_dv = tl.where(real, on_dv, 0.0)
    gk.store([b, group, j, 0], (on_k * scale).to(gk.dtype).reshape(1, 1, N, K))
    gv.store([b, group, j, 0], on_v.to(gv.dtype).reshape(1, 1, N, V))
    gdk.store([b, group, j, 0], (on_dk * scale).to(gdk.dtype).reshape(1, 1, N, K))
    gdv.store([b, group, j, 0], on_dv.to(gdv.dtype).reshape(1, 1, N, V))


TILES = {
    # (M, N, warps, stages) by the larger head dimension, onto queries and onto keys.
    64: ((128, 64, 8, 2), (32, 64, 4, 2)),
    128: ((64, 32, 4, 2), (32, 64, 8, 1)),
}

Triple = tuple[Tensor, Tensor, Tensor]


def unsupported(q: Tensor, v: Tensor, pattern: Pattern) -> str | None:
    """Why these kernels cannot do what the others can, or None."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the fused backward through a tangent is for bfloat16 and float16, not {q.dtype}"
    if max(block(q.shape[-1]), block(v.shape[-1])) > max(TILES):
        sizes = f"{q.shape[-1]} and {v.shape[-1]}"
        return f"head dimensions up to {max(TILES)} fit on the chip here; these are {sizes}"
    if pattern.softcap is not None:
        return "the fused backward through a tangent supports no softcap"
    return None


def both_vjp(
    q: Tensor, k: Tensor, v: Tensor, tangent: Triple, g: Tensor, c: Tensor,
    o: Tensor, do: Tensor, lse: Tensor, drift: Tensor, pattern: Pattern,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of <g, o> + <c, do>, in q, k, v, dq, dk, dv; drift is the row mean of dT."""
    (H, n, size), (G, n_keys, m) = q.shape[-3:], v.shape[-3:]
    K = block(size)
    V = block(m)
    B = q.shape[:-3].numel()
    product = product_of(q.dtype, "half")
    operands = [aligned(x) for x in (q, k, v, *tangent, g, c)]
    gq, gdq = (blank((B, H, n, size), q.dtype, q.device) for _ in range(2))
    gk, gdk = (blank((B, G, n_keys, size), q.dtype, q.device) for _ in range(2))
    gv, gdv = (blank((B, G, n_keys, m), q.dtype, q.device) for _ in range(2))
    means = torch.empty(2, *lse.shape, dtype=torch.float32, device=q.device)
    keys, stops = padding_of(pattern, q.shape[:-3])
    rows = (lse.contiguous(), drift.contiguous(), means, keys, stops)
    rules = (pattern.scale, pattern.window, pattern.shift, n, n_keys, lse.numel())
    for_queries, for_keys = TILES[max(64, K, V)]
    by_query = (True, False, False, True, False, False, True, True)  # rows of q, k, v, dq, ...
    for kernel, (M, N, warps, stages), out, over_queries, programs in (
        (_onto_queries, for_queries, (aligned(o), aligned(do), gq, gdq), False, (n, H)),
        (_onto_keys, for_keys, (gk, gv, gdk, gdv), True, (n_keys, G)),
    ):
        mask, mask_tiles, kind = mask_of(pattern, q.shape, n_keys, keys, M, N, over_queries)
        kernel[ceil_div(programs[0], N if over_queries else M), programs[1], B](
            *(descriptor(x, M if at else N) for x, at in zip(operands, by_query, strict=True)),
            *(descriptor(x, N if over_queries else M) for x in out),
            *rows, mask, mask_tiles, *rules, H // G, pattern.causal, kind, product, M, N, K, V,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return (
        gq.view(q.shape), gk.view(k.shape), gv.view(v.shape),
        gdq.view(q.shape), gdk.view(k.shape), gdv.view(v.shape),
    )  # fmt: skip
