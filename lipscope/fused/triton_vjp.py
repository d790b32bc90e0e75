"""The fused cotangent of attention from the saved o and lse: a kernel for gq, one for gk and gv.

With Z = P * (g v' - (g * o) 1):  gq = Z k,  gk = Z' q,  gv = P' g. Two kernels instead of one avoid
atomic additions, so that results do not depend on the order of execution.
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
    Precision,
    as_operands,
    blank,
    block,
    ceil_div,
    descriptor,
    needs_scaling,
    padding_of,
    powers,
    product_of,
    spans,
)
from lipscope.fused.triton_tiles import (
    add_earlier,
    add_product,
    are_real,
    cap,
    key_range,
    query_range,
    read,
    read_low,
    read_top,
    row_peak,
    scores,
    visible,
)


@triton.jit
@no_type_check
def _onto_queries(
    q, k, v, g, gq, lse, delta, keys, stops, units, scale, softcap, window, shift, n, n_keys,
    start, end, mask, mask_tiles,
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
    if end is not None:
        stop = tl.minimum(stop, end)
    score_unit = scale
    dp_unit = 1.0
    k_unit = 1.0
    if units is not None:
        score_unit = scale * tl.load(units)
        dp_unit = tl.load(units + 1)
        k_unit = tl.load(units + 3)
    rows = i + tl.arange(0, M)
    offset = (b * tl.num_programs(1) + h) * n
    top, rest = read_top(lse, offset, rows, n)
    mean = tl.load(delta + offset.to(tl.int64) + rows, mask=rows < n, other=0.0)
    qi = read(q, b, h, i, M, K)
    gi = read(g, b, h, i, M, V)
    qi_low = read_low(q, b, h, i, qi, PRODUCT)
    gi_low = read_low(g, b, h, i, gi, PRODUCT)
    acc = tl.zeros([M, K], tl.float32)
    bounds = key_range(i, start, stop, shift, window, CAUSAL, M, N)
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
                vj = read(v, b, group, j, N, V)
                kj_low = read_low(k, b, group, j, kj, PRODUCT)
                vj_low = read_low(v, b, group, j, vj, PRODUCT)
                t = scores(qi, qi_low, kj, kj_low, PRODUCT)
                dp = scores(gi, gi_low, vj, vj_low, PRODUCT)
                t, slope = cap(t, score_unit, softcap)
                columns = j + tl.arange(0, N)
                if run != 1:
                    t = masked(t, words, mask, mask_tiles, b, h, i, j, n, n_keys, MASK, M, N, False)
                z = tl.exp2(t - top[:, None]) * (dp * dp_unit - mean[:, None])
                if run != 1 and MASK != 1:
                    seen = visible(rows[:, None], columns[None, :], n_keys, shift, window, CAUSAL)
                    z = tl.where(seen, z, 0.0)
                if keys is not None:
                    z = tl.where(are_real(keys, b, columns, n_keys)[None, :], z, 0.0)
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
    score_unit = scale
    dp_unit = 1.0
    q_unit = 1.0
    g_unit = 1.0
    if units is not None:
        score_unit = scale * tl.load(units)
        dp_unit = tl.load(units + 1)
        q_unit = tl.load(units + 2)
        g_unit = tl.load(units + 4)
    rows = j + tl.arange(0, N)
    reach = n
    if stops is not None:
        reach = tl.where(j < tl.load(stops + b), n, 0)
    if end is not None:
        reach = tl.minimum(reach, end)
    kj = read(k, b, group, j, N, K)
    vj = read(v, b, group, j, N, V)
    kj_low = read_low(k, b, group, j, kj, PRODUCT)
    vj_low = read_low(v, b, group, j, vj, PRODUCT)
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
                    qi = read(q, b, h, i, M, K)
                    gi = read(g, b, h, i, M, V)
                    qi_low = read_low(q, b, h, i, qi, PRODUCT)
                    gi_low = read_low(g, b, h, i, gi, PRODUCT)
                    columns = i + tl.arange(0, M)
                    top, rest = read_top(lse, offset, columns, n)
                    mean = tl.load(
                        delta + offset.to(tl.int64) + columns, mask=columns < n, other=0.0
                    )
                    t = scores(kj, kj_low, qi, qi_low, PRODUCT)
                    dp = scores(vj, vj_low, gi, gi_low, PRODUCT)
                    t, slope = cap(t, score_unit, softcap)
                    if run != 1:
                        t = masked(
                            t, words, mask, mask_tiles, b, h, i, j, n, n_keys, MASK, M, N, True
                        )
                    p = tl.exp2(t - top[None, :])
                    if PRODUCT == "pair":
                        p *= rest[None, :]
                    if run != 1 and MASK != 1:
                        seen = visible(
                            columns[None, :], rows[:, None], n_keys, shift, window, CAUSAL
                        )
                        p = tl.where(seen, p, 0.0)
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


TILES = {
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

Triple = tuple[Tensor, Tensor, Tensor]


def vjp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, g: Tensor, pattern: Pattern,
    precision: Precision = "pair",
) -> Triple:  # fmt: skip
    """gq, gk, gv from g [..., H, n, m]."""
    (H, n, size), (G, n_keys, m) = q.shape[-3:], v.shape[-3:]
    product = product_of(q.dtype, precision)
    factors = units = None
    if needs_scaling(q.dtype, product):
        a, b, c, d = factors = powers(q, k, v, g)
        units = torch.stack([1 / (a * b), 1 / (c * d), 1 / a, 1 / b, 1 / d])
    qs, ks, vs, gs = as_operands((q, k, v, g), factors, product)
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
    for_queries, for_keys = TILES[product, max(64, K, V)]
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
