"""Fused attention that also returns each row's log-sum-exp, from which derivatives are computed."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from lipscope.fused.pattern import Pattern
from lipscope.fused.triton_masks import (
    mask_of,
    mask_words,
    masked,
    row_level,
    tile_at,
    tile_counts,
)
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
    to_fill,
)
from lipscope.fused.triton_tiles import (
    LOG2E,
    add_product,
    are_real,
    cap,
    key_range,
    read,
    read_low,
    scores,
    visible,
)


@triton.jit
@no_type_check
def _forward(
    q, k, v, o, lse, keys, stops, sinks, units, mask, mask_tiles, scale, softcap, window, shift, n,
    n_keys,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRODUCT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    # The longest rows of a causal mask start first, so that no late block keeps the device waiting.
    i = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    h = tl.program_id(1)
    b = tl.program_id(2)
    g = h // GROUP
    stop = n_keys
    if stops is not None:
        stop = tl.load(stops + b)
    score_unit = scale
    v_unit = 1.0
    if units is not None:
        score_unit = scale * tl.load(units)
        v_unit = tl.load(units + 1)
    rows = i + tl.arange(0, M)
    qi = read(q, b, h, i, M, K)
    qi_low = read_low(q, b, h, i, qi, PRODUCT)
    acc = tl.zeros([M, V], tl.float32)
    total = tl.zeros([M], tl.float32)
    lost = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
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
                kj = read(k, b, g, j, N, K)
                vj = read(v, b, g, j, N, V)
                kj_low = read_low(k, b, g, j, kj, PRODUCT)
                vj_low = read_low(v, b, g, j, vj, PRODUCT)
                t = scores(qi, qi_low, kj, kj_low, PRODUCT)
                t, _ = cap(t, score_unit, softcap)
                columns = j + tl.arange(0, N)
                if run != 1:
                    t = masked(t, words, mask, mask_tiles, b, h, i, j, n, n_keys, MASK, M, N, False)
                if run != 1 and MASK != 1:
                    seen = visible(rows[:, None], columns[None, :], n_keys, shift, window, CAUSAL)
                    t = tl.where(seen, t, float("-inf"))
                if keys is not None:
                    t = tl.where(are_real(keys, b, columns, n_keys)[None, :], t, float("-inf"))
                last = top
                top = tl.maximum(top, tl.max(t, 1))
                base = tl.where(top == float("-inf"), 0.0, top)
                p = tl.exp2(t - base[:, None])
                shrink = tl.exp2(last - base)
                # Kahan summation: thousands of tiles would otherwise cost a digit of lse.
                more = tl.sum(p, 1) - lost * shrink
                total, before = total * shrink + more, total * shrink
                lost = (total - before) - more
                acc = add_product(acc * shrink[:, None], p, 1.0, vj, vj_low, v_unit, PRODUCT)
    level = row_level(mask, b, h, rows, n, MASK)
    _finish(o, lse, sinks, level, acc, top, total, rows, i, h, b, n, M, V)


@triton.jit
@no_type_check
def _finish(
    o, lse, sinks, level, acc, top, total, rows, i, h, b, n, M: tl.constexpr, V: tl.constexpr
):
    """o = acc / total, with the sink in the total; a row that sees nothing is 0, its lse +inf."""
    seen = top > float("-inf")
    if sinks is not None:
        # A sink far above its row takes all the weight; inf - inf would be NaN.
        sink = tl.minimum((tl.load(sinks + h).to(tl.float32) - level) * LOG2E, 3e38)
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        acc *= shrink[:, None]
        total = total * shrink + tl.exp2(sink - higher)
        top = higher
    value = tl.where(seen, (top + tl.log2(total)) / LOG2E, float("inf"))
    out = tl.where(seen[:, None], acc / total[:, None], 0.0)
    tl.store(lse + (b * tl.num_programs(1) + h).to(tl.int64) * n + rows, value, mask=rows < n)
    o.store([b, h, i, 0], out.to(o.dtype).reshape(1, 1, M, V))


TILES = {
    # (M, N, warps, stages) by product and head dimension: M queries per program, N keys per step.
    ("plain", 64): (128, 64, 8, 3),
    ("plain", 128): (128, 64, 8, 3),
    ("half", 64): (128, 64, 8, 2),
    ("half", 128): (128, 64, 8, 2),
    ("pair", 64): (128, 64, 8, 2),
    ("pair", 128): (128, 32, 8, 2),
    ("plain", 256): (64, 32, 8, 2),
    ("half", 256): (64, 32, 8, 2),
}


def forward(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, precision: Precision = "pair",
    keep_digits: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [..., H, n, m], and lse [..., H, n] in float32, +inf for a fully masked row.

    With `keep_digits`, o is float32 as well, for derivatives to come.
    """
    (H, n, _), (G, n_keys, m) = q.shape[-3:], v.shape[-3:]
    product = product_of(q.dtype, precision)
    K = block(q.shape[-1])
    V = block(m)
    M, N, warps, stages = TILES[product, max(64, K, V)]
    factors = units = None
    if needs_scaling(q.dtype, product):
        a, b, c = factors = powers(q, k, v)
        units = torch.stack([1 / (a * b), 1 / c])
    qs, ks, vs = as_operands((q, k, v), factors, product)
    B = q.shape[:-3].numel()
    keys, stops = padding_of(pattern, q.shape[:-3])
    o = blank((B, H, n, m), torch.float32 if keep_digits else q.dtype, q.device)
    lse = to_fill(torch.empty(B, H, n, dtype=torch.float32, device=q.device))
    mask, mask_tiles, kind = mask_of(pattern, q.shape, n_keys, keys, M, N)
    _forward[ceil_div(n, M), H, B](
        descriptor(qs, M), descriptor(ks, N), descriptor(vs, N), descriptor(o, M), lse, keys, stops,
        pattern.sinks, units, mask, mask_tiles, pattern.scale, pattern.softcap, pattern.window,
        pattern.shift, n, n_keys, H // G, pattern.causal, kind, product, M, N, K, V,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    o = o.view(*q.shape[:-1], m)
    lse = lse.view(q.shape[:-1])
    if pattern.queries is not None:
        real = pattern.queries[..., None, :]
        o = o.where(real[..., None], 0)
        lse = lse.where(real, torch.inf)
    return o, lse
