"""Value and tangent of attention in one launch, for bfloat16 and float16.

With W = P * dT:  o = P v  and  do = P dv + W v - (W 1) o. One running softmax serves both.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from lipscope.fused.pattern import Pattern
from lipscope.fused.triton_masks import (
    BYTES,
    bytes_of,
    mask_of,
    masked,
    tile_at,
    tile_counts,
    words_of_step,
)
from lipscope.fused.triton_operands import (
    aligned,
    blank,
    block,
    ceil_div,
    descriptor,
    padding_of,
    product_of,
    to_fill,
)
from lipscope.fused.triton_tiles import (
    LOG2E,
    add_product,
    are_real,
    key_range,
    read,
    rounded,
    row_peak,
    visible,
)


@triton.jit
@no_type_check
def _value_and_tangent(
    q, k, v, dq, dk, dv, o, do, lse, drift, keys, stops, mask, mask_tiles, scale, window,
    shift, n, n_keys,
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
    rows = i + tl.arange(0, M)
    unit = scale * LOG2E
    qi = read(q, b, h, i, M, K)
    dqi = read(dq, b, h, i, M, K)
    value = tl.zeros([M, V], tl.float32)
    moved = tl.zeros([M, V], tl.float32)
    total = tl.zeros([M], tl.float32)
    shift_of_mean = tl.zeros([M], tl.float32)
    mean = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    bounds = key_range(i, None, stop, shift, window, CAUSAL, M, N)
    line = i // M
    if MASK == 1 or MASK == 2:
        mixed, all_tiles = tile_counts(mask, b, h, line)
        bounds = (0, 0, mixed * N, all_tiles * N, 0, mixed * N)
    for run in tl.static_range(3):
        if run > 0 or (MASK % 3 == 0 and window is not None):
            end = bounds[2 * run + 1]
            if run == 2 and MASK == 1:
                ahead = words_of_step(mask, b, h, i, line, 0, end, n, MASK, M, N)
            for step in tl.range(bounds[2 * run], end, N):
                j = tile_at(mask, b, h, line, step, N, MASK)
                words = (0, 0)
                if run == 2 and MASK == 1:
                    # Read a tile ahead, the words are there when the scores are.
                    words = ahead
                    ahead = words_of_step(mask, b, h, i, line, step + N, end, n, MASK, M, N)
                kj = read(k, b, g, j, N, K)
                dkj = read(dk, b, g, j, N, K)
                vj = read(v, b, g, j, N, V)
                dvj = read(dv, b, g, j, N, V)
                t = tl.dot(qi, kj.T)
                if MASK == 2:
                    t *= unit
                dt = tl.dot(qi, dkj.T, tl.dot(dqi, kj.T)) * scale
                columns = j + tl.arange(0, N)
                if run != 1 or MASK == 3:
                    t = masked(t, words, mask, mask_tiles, b, h, i, j, n, n_keys, MASK, M, N, False)
                if run != 1 and MASK != 1:
                    seen = visible(rows[:, None], columns[None, :], n_keys, shift, window, CAUSAL)
                    t = tl.where(seen, t, float("-inf"))
                if keys is not None:
                    t = tl.where(are_real(keys, b, columns, n_keys)[None, :], t, float("-inf"))
                # The largest product is that of the largest score, as the scale is positive: one
                # multiplication for a row, and for an entry part of the subtraction.
                highest = tl.max(t, 1) if MASK == 2 else tl.max(t, 1) * unit
                last = top
                top = tl.maximum(top, highest)
                base = tl.where(top == float("-inf"), 0.0, top)
                fall = t - base[:, None] if MASK == 2 else t * unit - base[:, None]
                p = tl.exp2(fall)
                shrink = tl.exp2(last - base)
                w = p * dt
                if drift is not None:
                    mean = mean * shrink + tl.sum(w, 1)
                # Rounded once for both sums: where P is nearly one-hot, W v and (W 1) o cancel,
                # and two different roundings of W would be all that is left. Derivatives to come
                # subtract the mean from dT as it is, and need it as it is.
                w = rounded(w, PRODUCT)
                total = total * shrink + tl.sum(p, 1)
                shift_of_mean = shift_of_mean * shrink + tl.sum(w, 1)
                value = add_product(value * shrink[:, None], p, 1.0, vj, vj, 1.0, PRODUCT)
                moved = add_product(moved * shrink[:, None], p, 1.0, dvj, dvj, 1.0, PRODUCT)
                moved = add_product(moved, w, row_peak(w, PRODUCT), vj, vj, 1.0, PRODUCT)
    seen = top > float("-inf")
    total = tl.where(seen, total, 1.0)
    out = value / total[:, None]
    tangent = moved / total[:, None] - (shift_of_mean / total)[:, None] * out
    offset = (b * tl.num_programs(1) + h).to(tl.int64) * n + rows
    tl.store(lse + offset, tl.where(seen, (top + tl.log2(total)) / LOG2E, float("inf")), rows < n)
    if drift is not None:
        tl.store(drift + offset, mean / total, mask=rows < n)
    o.store([b, h, i, 0], out.to(o.dtype).reshape(1, 1, M, V))
    do.store([b, h, i, 0], tangent.to(do.dtype).reshape(1, 1, M, V))


TILES = {
    # (M, N, warps, stages) by the larger head dimension: M queries per program, N keys per step.
    64: (64, 64, 4, 3),
    128: (128, 32, 8, 2),
    256: (64, 32, 8, 1),
}

Triple = tuple[Tensor, Tensor, Tensor]


def unsupported(q: Tensor, pattern: Pattern) -> str | None:
    """Why this kernel cannot do what the others can, or None."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"one launch for value and tangent is for bfloat16 and float16, not {q.dtype}"
    if pattern.softcap is not None or pattern.sinks is not None or pattern.queries is not None:
        return "one launch for value and tangent supports no softcap, sinks or padded queries"
    return None


def value_and_tangent(
    q: Tensor, k: Tensor, v: Tensor, tangent: Triple, pattern: Pattern,
    keep_digits: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, do, lse (+inf for a fully masked row), and the mean score tangent of each row.

    With `keep_digits`, o is float32, for derivatives to come; without, the means are not computed.
    """
    (H, n, _), (G, n_keys, m) = q.shape[-3:], v.shape[-3:]
    K = block(q.shape[-1])
    V = block(m)
    B = q.shape[:-3].numel()
    M, N, warps, stages = TILES[max(64, K, V)]
    qs, ks, vs, dqs, dks, dvs = (aligned(x) for x in (q, k, v, *tangent))
    keys, stops = padding_of(pattern, q.shape[:-3])
    o = blank((B, H, n, m), torch.float32 if keep_digits else q.dtype, q.device)
    do = blank((B, H, n, m), q.dtype, q.device)
    lse, drift = to_fill(torch.empty(2, B, H, n, dtype=torch.float32, device=q.device))
    masking = bytes_of(pattern, q.shape, n_keys, M, N)
    masking = masking or mask_of(pattern, q.shape, n_keys, keys, M, N)
    mask, mask_tiles, kind = masking
    # Two programs share the memory of a processor; with bytes of masks in every stage, one would.
    stages -= 1 if kind == BYTES and stages > 2 else 0
    _value_and_tangent[ceil_div(n, M), H, B](
        descriptor(qs, M), descriptor(ks, N), descriptor(vs, N),
        descriptor(dqs, M), descriptor(dks, N), descriptor(dvs, N),
        descriptor(o, M), descriptor(do, M),
        lse, drift if keep_digits else None, keys, stops, mask, mask_tiles, pattern.scale,
        pattern.window, pattern.shift, n, n_keys, H // G, pattern.causal, kind,
        product_of(q.dtype, "half"), M, N, K, V,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    shape = (*q.shape[:-1], m)
    rows = q.shape[:-1]
    return o.view(shape), do.view(shape), lse.view(rows), drift.view(rows)
