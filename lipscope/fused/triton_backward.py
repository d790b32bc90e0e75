"""The fused backward passes of attention, from the saved o and log-sum-exp.

From the value alone, with Z = P * (g v' - (g * o) 1):  gq = Z k,  gk = Z' q,  gv = P' g.

Through value and tangent, in bfloat16 and float16: the gradient of <g, o> + <c, do> in q, k, v, dq,
dk, dv. With the score tangents s = dT minus their mean, w = c v' minus its mean, and

    Z = P * w,     Y = P * (s * w + c dv' - (c * do) 1 + g v' - (g * o) 1):

    gq = Y k + Z dk,   gk = Y' q + Z' dq,   gv = (P * s)' c + P' g,
    gdq = Z k,         gdk = Z' q,          gdv = P' c,

the first two of each line times the scale of the scores.

A kernel for queries and one for keys avoid atomic additions: results do not depend on the order of
execution.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from lipscope.fused.arguments import HALF
from lipscope.fused.pattern import Pattern
from lipscope.fused.reference import Triple
from lipscope.fused.triton_masks import (
    key_runs,
    mask_of,
    mask_words,
    masked,
    tile_at,
    tile_counts,
    unhidden,
)
from lipscope.fused.triton_operands import (
    aligned,
    as_operands,
    blank,
    block,
    ceil_div,
    descriptor,
    padding_of,
    powers,
    product_of,
    spans,
)
from lipscope.fused.triton_tiles import (
    LOG2E,
    add_earlier,
    add_product,
    are_real,
    cap,
    last_key,
    last_query,
    queries_of_program,
    query_range,
    read,
    read_pair,
    read_top,
    row_peak,
    scores,
    unit_of,
)


@triton.jit
@no_type_check
def _onto_queries(
    q, k, v, g, gq, lse, delta, keys, stops, units, scale, softcap, window, shift, n, n_keys,
    start, end, mask, mask_tiles,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRODUCT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    i, h, b = queries_of_program(M)
    group = h // GROUP
    score_unit = scale * unit_of(units, 0)
    dp_unit = unit_of(units, 1)
    k_unit = unit_of(units, 3)
    rows = i + tl.arange(0, M)
    offset = (b * tl.num_programs(1) + h) * n
    top, rest = read_top(lse, offset, rows, n)
    mean = tl.load(delta + offset.to(tl.int64) + rows, mask=rows < n, other=0.0)
    qi, qi_low = read_pair(q, b, h, i, M, K, PRODUCT)
    gi, gi_low = read_pair(g, b, h, i, M, V, PRODUCT)
    acc = tl.zeros([M, K], tl.float32)
    stop = last_key(stops, b, n_keys, end)
    bounds = key_runs(mask, b, h, i, start, stop, shift, window, CAUSAL, MASK, M, N)
    for run in tl.static_range(3):
        if run > 0 or (MASK == 0 and window is not None):
            for step in tl.range(bounds[2 * run], bounds[2 * run + 1], N):
                j = tile_at(mask, b, h, i // M, step, N, MASK)
                words = mask_words(mask, b, h, i, j, n, MASK, M, N)
                kj, kj_low = read_pair(k, b, group, j, N, K, PRODUCT)
                vj, vj_low = read_pair(v, b, group, j, N, V, PRODUCT)
                t = scores(qi, qi_low, kj, kj_low, PRODUCT)
                dp = scores(gi, gi_low, vj, vj_low, PRODUCT)
                t, slope = cap(t, score_unit, softcap)
                t = masked(t, words, mask, mask_tiles, b, h, i, j, n, n_keys, run, MASK, M, N)
                z = tl.exp2(t - top[:, None]) * (dp * dp_unit - mean[:, None])
                z = unhidden(z, 0.0, keys, b, i, j, n_keys, shift, window, run, CAUSAL, MASK, M, N)
                if softcap is not None:
                    z *= slope
                acc = add_product(acc, z, row_peak(z, PRODUCT), kj, kj_low, k_unit, PRODUCT)
    acc = add_earlier(acc * (rest * scale)[:, None], gq, start, b, h, i)
    gq.store([b, h, i, 0], acc.to(gq.dtype).reshape(1, 1, M, K))


@triton.jit
@no_type_check
def _onto_keys(
    q, k, v, g, gk, gv, lse, delta, keys, stops, units, scale, softcap, window, shift, n, n_keys,
    start, end, mask, mask_tiles,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRODUCT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    # Tiles are transposed here, keys by queries: the sums over queries run along columns.
    j = tl.program_id(0) * N
    group = tl.program_id(1)
    b = tl.program_id(2)
    score_unit = scale * unit_of(units, 0)
    dp_unit = unit_of(units, 1)
    q_unit = unit_of(units, 2)
    g_unit = unit_of(units, 4)
    rows = j + tl.arange(0, N)
    reach = last_query(stops, b, j, n, end)
    kj, kj_low = read_pair(k, b, group, j, N, K, PRODUCT)
    vj, vj_low = read_pair(v, b, group, j, N, V, PRODUCT)
    on_k = tl.zeros([N, K], tl.float32)
    on_v = tl.zeros([N, V], tl.float32)
    line = j // N
    bounds = query_range(j, start, reach, shift, window, CAUSAL, M, N)
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
                    qi, qi_low = read_pair(q, b, h, i, M, K, PRODUCT)
                    gi, gi_low = read_pair(g, b, h, i, M, V, PRODUCT)
                    columns = i + tl.arange(0, M)
                    top, rest = read_top(lse, offset, columns, n)
                    mean = tl.load(
                        delta + offset.to(tl.int64) + columns, mask=columns < n, other=0.0
                    )
                    t = scores(kj, kj_low, qi, qi_low, PRODUCT)
                    dp = scores(vj, vj_low, gi, gi_low, PRODUCT)
                    t, slope = cap(t, score_unit, softcap)
                    t = masked(
                        t, words, mask, mask_tiles, b, h, i, j, n, n_keys, run, MASK, M, N, True
                    )
                    p = tl.exp2(t - top[None, :])
                    if PRODUCT == "pair":
                        p *= rest[None, :]
                    p = unhidden(
                        p, 0.0, None, b, i, j, n_keys, shift, window, run, CAUSAL, MASK, M, N, True
                    )
                    z = p * (dp * dp_unit - mean[None, :])
                    if softcap is not None:
                        z *= slope
                    on_v = add_product(on_v, p, 1.0, gi, gi_low, g_unit, PRODUCT)
                    on_k = add_product(on_k, z, row_peak(z, PRODUCT), qi, qi_low, q_unit, PRODUCT)
    if keys is not None:
        real = are_real(keys, b, rows, n_keys)[:, None]
        on_k = tl.where(real, on_k, 0.0)
        on_v = tl.where(real, on_v, 0.0)
    on_k = add_earlier(on_k * scale, gk, start, b, group, j)
    on_v = add_earlier(on_v, gv, start, b, group, j)
    gk.store([b, group, j, 0], on_k.to(gk.dtype).reshape(1, 1, N, K))
    gv.store([b, group, j, 0], on_v.to(gv.dtype).reshape(1, 1, N, V))


VJP_TILES = {
    # (M, N, warps, stages, registers) by product and head dimension, for gq and for gk, gv.
    ("plain", 64): ((128, 64, 8, 2, 128), (64, 64, 4, 2, None)),
    ("plain", 128): ((128, 64, 8, 2, None), (64, 64, 4, 2, None)),
    ("half", 64): ((128, 64, 8, 2, 128), (64, 64, 4, 2, None)),
    ("half", 128): ((128, 32, 8, 2, None), (64, 64, 4, 2, None)),
    ("pair", 64): ((128, 32, 8, 2, 128), (64, 64, 4, 2, None)),
    ("pair", 128): ((64, 64, 4, 2, None), (16, 64, 4, 2, None)),
    ("plain", 256): ((64, 32, 8, 1, None), (32, 64, 8, 1, None)),
    ("half", 256): ((64, 32, 8, 1, None), (32, 64, 8, 1, None)),
}


def vjp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, g: Tensor, pattern: Pattern
) -> Triple:
    """gq, gk, gv from g [..., H, n, m]."""
    (H, n, size), (G, n_keys, m) = q.shape[-3:], v.shape[-3:]
    product = product_of(q.dtype)
    factors = units = None
    if product == "pair":
        a, b, c, d = factors = powers(q, k, v, g)
        units = torch.stack([1 / (a * b), 1 / (c * d), 1 / a, 1 / b, 1 / d])
    qs, ks, vs, gs = as_operands((q, k, v, g), factors)
    B = q.shape[:-3].numel()
    gq = blank((B, H, n, size), q.dtype, q.device)
    gk = blank((B, G, n_keys, size), q.dtype, q.device)
    gv = blank((B, G, n_keys, m), q.dtype, q.device)
    delta = (g.float() * o.float()).sum(-1)
    keys, stops = padding_of(pattern, q.shape[:-3])
    tensors = (lse.contiguous(), delta, keys, stops, units)
    rules = (pattern.scale, pattern.softcap, pattern.window, pattern.shift, n, n_keys)
    K = block(size)
    V = block(m)
    for_queries, for_keys = VJP_TILES[product, max(64, K, V)]
    M, N, warps, stages, registers = for_queries
    for span in spans(n_keys, product, pattern):
        mask, mask_tiles, kind = mask_of(pattern, q.shape, n_keys, keys, M, N, span=span)
        _onto_queries[ceil_div(n, M), H, B](
            descriptor(qs, M), descriptor(ks, N), descriptor(vs, N), descriptor(gs, M),
            descriptor(gq, M),
            *tensors, *rules, *span, mask, mask_tiles, H // G, pattern.causal, kind, product,
            M, N, K, V,
            num_warps=warps, num_stages=stages, maxnreg=registers,
        )  # fmt: skip
    M, N, warps, stages, registers = for_keys
    for span in spans(n, product, pattern, H // G):
        mask, mask_tiles, kind = mask_of(
            pattern, q.shape, n_keys, keys, M, N, over_queries=True, span=span
        )
        _onto_keys[ceil_div(n_keys, N), G, B](
            descriptor(qs, M), descriptor(ks, N), descriptor(vs, N), descriptor(gs, M),
            descriptor(gk, N), descriptor(gv, N),
            *tensors, *rules, *span, mask, mask_tiles, H // G, pattern.causal, kind, product,
            M, N, K, V,
            num_warps=warps, num_stages=stages, maxnreg=registers,
        )  # fmt: skip
    return gq.view(q.shape), gk.view(k.shape), gv.view(v.shape)


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
def _second_onto_queries(
    q, k, v, dq, dk, dv, g, c, o, do, gq, gdq, lse, drift, means, keys, stops, mask, mask_tiles,
    scale, window, shift, n, n_keys, total,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRODUCT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    i, h, b = queries_of_program(M)
    group = h // GROUP
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
    stop = last_key(stops, b, n_keys, None)
    bounds = key_runs(mask, b, h, i, None, stop, shift, window, CAUSAL, MASK, M, N)
    for run in tl.static_range(3):
        if run > 0 or (MASK == 0 and window is not None):
            for step in tl.range(bounds[2 * run], bounds[2 * run + 1], N):
                j = tile_at(mask, b, h, i // M, step, N, MASK)
                words = mask_words(mask, b, h, i, j, n, MASK, M, N)
                kj = read(k, b, group, j, N, K)
                dkj = read(dk, b, group, j, N, K)
                vj = read(v, b, group, j, N, V)
                dvj = read(dv, b, group, j, N, V)
                t = tl.dot(qi, kj.T) * (scale * LOG2E)
                s = tl.dot(qi, dkj.T, tl.dot(dqi, kj.T)) * scale - mean_s[:, None]
                w = tl.dot(ci, vj.T) - mean_w[:, None]
                y = tl.dot(ci, dvj.T, tl.dot(gi, vj.T)) - mean_y[:, None]
                t = masked(t, words, mask, mask_tiles, b, h, i, j, n, n_keys, run, MASK, M, N)
                p = tl.exp2(t - top[:, None])
                p = unhidden(p, 0.0, keys, b, i, j, n_keys, shift, window, run, CAUSAL, MASK, M, N)
                y = p * (s * w + y)
                z = p * w
                on_q = add_product(on_q, y, row_peak(y, PRODUCT), kj, kj, 1.0, PRODUCT)
                on_q = add_product(on_q, z, row_peak(z, PRODUCT), dkj, dkj, 1.0, PRODUCT)
                on_dq = add_product(on_dq, z, row_peak(z, PRODUCT), kj, kj, 1.0, PRODUCT)
    gq.store([b, h, i, 0], (on_q * scale).to(gq.dtype).reshape(1, 1, M, K))
    gdq.store([b, h, i, 0], (on_dq * scale).to(gdq.dtype).reshape(1, 1, M, K))


@triton.jit
@no_type_check
def _second_onto_keys(
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
    reach = last_query(stops, b, j, n, None)
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
                    t = masked(
                        t, words, mask, mask_tiles, b, h, i, j, n, n_keys, run, MASK, M, N, True
                    )
                    p = tl.exp2(t - top[None, :])
                    p = unhidden(
                        p, 0.0, None, b, i, j, n_keys, shift, window, run, CAUSAL, MASK, M, N, True
                    )
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


SECOND_TILES = {
    # (M, N, warps, stages) by the larger head dimension, onto queries and onto keys.
    64: ((128, 64, 8, 2), (32, 64, 4, 2)),
    128: ((64, 32, 4, 2), (32, 64, 8, 1)),
}


def supports_both_vjp(q: Tensor, v: Tensor, pattern: Pattern) -> bool:
    """Whether `both_vjp` can differentiate what the other kernels compute."""
    size = max(block(q.shape[-1]), block(v.shape[-1]))
    return q.dtype in HALF and size <= max(SECOND_TILES) and pattern.softcap is None


def both_vjp(
    q: Tensor, k: Tensor, v: Tensor, tangent: Triple, g: Tensor, c: Tensor,
    o: Tensor, do: Tensor, lse: Tensor, drift: Tensor, pattern: Pattern,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of <g, o> + <c, do>, in q, k, v, dq, dk, dv; drift is the row mean of dT."""
    (H, n, size), (G, n_keys, m) = q.shape[-3:], v.shape[-3:]
    K = block(size)
    V = block(m)
    B = q.shape[:-3].numel()
    product = product_of(q.dtype)
    operands = [aligned(x) for x in (q, k, v, *tangent, g, c)]
    gq, gdq = (blank((B, H, n, size), q.dtype, q.device) for _ in range(2))
    gk, gdk = (blank((B, G, n_keys, size), q.dtype, q.device) for _ in range(2))
    gv, gdv = (blank((B, G, n_keys, m), q.dtype, q.device) for _ in range(2))
    means = torch.empty(2, *lse.shape, dtype=torch.float32, device=q.device)
    keys, stops = padding_of(pattern, q.shape[:-3])
    rows = (lse.contiguous(), drift.contiguous(), means, keys, stops)
    rules = (pattern.scale, pattern.window, pattern.shift, n, n_keys, lse.numel())
    for_queries, for_keys = SECOND_TILES[max(64, K, V)]
    by_query = (True, False, False, True, False, False, True, True)  # rows of q, k, v, dq, ...
    for kernel, (M, N, warps, stages), out, over_queries, programs in (
        (_second_onto_queries, for_queries, (aligned(o), aligned(do), gq, gdq), False, (n, H)),
        (_second_onto_keys, for_keys, (gk, gv, gdk, gdv), True, (n_keys, G)),
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
