"""The fused value and tangent of attention, apart or in one launch.

With W = P * dT:  o = P v  and  do = P dv + W v - (W 1) o. The value comes with each row's
log-sum-exp, from which derivatives are computed. `value_and_tangent` takes one running softmax for
both, in bfloat16 and float16.
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
    BYTES,
    bytes_of,
    key_runs,
    mask_of,
    mask_words,
    masked,
    row_level,
    tile_at,
    unhidden,
    words_of_step,
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
    to_fill,
)
from lipscope.fused.triton_tiles import (
    LOG2E,
    add_earlier,
    add_low,
    add_product,
    cap,
    last_key,
    queries_of_program,
    read,
    read_pair,
    read_top,
    rounded,
    row_peak,
    scores,
    unit_of,
)


@triton.jit
@no_type_check
def _forward(
    q, k, v, o, lse, keys, stops, sinks, units, mask, mask_tiles, scale, softcap, window, shift, n,
    n_keys,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRODUCT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    i, h, b = queries_of_program(M)
    g = h // GROUP
    score_unit = scale * unit_of(units, 0)
    v_unit = unit_of(units, 1)
    rows = i + tl.arange(0, M)
    qi, qi_low = read_pair(q, b, h, i, M, K, PRODUCT)
    acc = tl.zeros([M, V], tl.float32)
    total = tl.zeros([M], tl.float32)
    lost = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    stop = last_key(stops, b, n_keys, None)
    bounds = key_runs(mask, b, h, i, None, stop, shift, window, CAUSAL, MASK, M, N)
    for run in tl.static_range(3):
        if run > 0 or (MASK == 0 and window is not None):
            for step in tl.range(bounds[2 * run], bounds[2 * run + 1], N):
                j = tile_at(mask, b, h, i // M, step, N, MASK)
                words = mask_words(mask, b, h, i, j, n, MASK, M, N)
                kj, kj_low = read_pair(k, b, g, j, N, K, PRODUCT)
                vj, vj_low = read_pair(v, b, g, j, N, V, PRODUCT)
                t = scores(qi, qi_low, kj, kj_low, PRODUCT)
                t, _ = cap(t, score_unit, softcap)
                t = masked(t, words, mask, mask_tiles, b, h, i, j, n, n_keys, run, MASK, M, N)
                t = unhidden(
                    t, float("-inf"), keys, b, i, j, n_keys, shift, window, run, CAUSAL, MASK, M, N
                )
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


FORWARD_TILES = {
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
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, keep_digits: bool = True
) -> tuple[Tensor, Tensor]:
    """o [..., H, n, m], and lse [..., H, n] in float32, +inf for a fully masked row.

    With `keep_digits`, o is float32 as well, for derivatives to come.
    """
    (H, n, _), (G, n_keys, m) = q.shape[-3:], v.shape[-3:]
    product = product_of(q.dtype)
    K = block(q.shape[-1])
    V = block(m)
    M, N, warps, stages = FORWARD_TILES[product, max(64, K, V)]
    factors = units = None
    if product == "pair":
        a, b, c = factors = powers(q, k, v)
        units = torch.stack([1 / (a * b), 1 / c])
    qs, ks, vs = as_operands((q, k, v), factors)
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


@triton.jit
@no_type_check
def _jvp(
    q, k, v, dq, dk, dv, o, do, lse, means, keys, stops, units, mask, mask_tiles, scale, softcap,
    window, shift, n, n_keys, start, end,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRODUCT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    i, h, b = queries_of_program(M)
    g = h // GROUP
    factor = 1.0
    if scale is not None:
        factor = scale
    score_unit = factor * unit_of(units, 0)
    dscore_unit = factor * unit_of(units, 1)
    v_unit = unit_of(units, 2) * dscore_unit
    dv_unit = unit_of(units, 3)
    rows = i + tl.arange(0, M)
    top, rest = read_top(lse, (b * tl.num_programs(1) + h) * n, rows, n)
    qi, qi_low = read_pair(q, b, h, i, M, K, PRODUCT)
    dqi, dqi_low = read_pair(dq, b, h, i, M, K, PRODUCT)
    acc = tl.zeros([M, V], tl.float32)
    drift = tl.zeros([M], tl.float32)
    mean = tl.zeros([M], tl.float32)
    stop = last_key(stops, b, n_keys, end)
    bounds = key_runs(mask, b, h, i, start, stop, shift, window, CAUSAL, MASK, M, N)
    for run in tl.static_range(3):
        if run > 0 or (MASK == 0 and window is not None):
            for step in tl.range(bounds[2 * run], bounds[2 * run + 1], N):
                j = tile_at(mask, b, h, i // M, step, N, MASK)
                words = mask_words(mask, b, h, i, j, n, MASK, M, N)
                kj, kj_low = read_pair(k, b, g, j, N, K, PRODUCT)
                dkj, dkj_low = read_pair(dk, b, g, j, N, K, PRODUCT)
                vj, vj_low = read_pair(v, b, g, j, N, V, PRODUCT)
                dvj, dvj_low = read_pair(dv, b, g, j, N, V, PRODUCT)
                t = scores(qi, qi_low, kj, kj_low, PRODUCT)
                dt = add_low(tl.zeros([M, N], tl.float32), dqi, dqi_low, kj, kj_low, PRODUCT)
                dt = add_low(dt, qi, qi_low, dkj, dkj_low, PRODUCT)
                dt = tl.dot(qi, dkj.T, tl.dot(dqi, kj.T, dt))
                if PRODUCT == "plain" and scale is not None:  # bf16 has the range, and no units
                    dt *= dscore_unit
                t, slope = cap(t, score_unit, softcap)
                t = masked(t, words, mask, mask_tiles, b, h, i, j, n, n_keys, run, MASK, M, N)
                p = tl.exp2(t - top[:, None])
                p = unhidden(p, 0.0, keys, b, i, j, n_keys, shift, window, run, CAUSAL, MASK, M, N)
                w = p * dt
                if softcap is not None:
                    w *= slope
                if means is not None:
                    mean += tl.sum(w, 1)
                # Rounded once for both sums: where P is nearly one-hot, W v and (W 1) o cancel,
                # and two different roundings of W would be all that is left. Derivatives to come
                # subtract the mean from dT as it is, and need it as it is.
                w = rounded(w, PRODUCT)
                drift += tl.sum(w, 1)
                acc = add_product(acc, p, 1.0, dvj, dvj_low, dv_unit, PRODUCT)
                acc = add_product(acc, w, row_peak(w, PRODUCT), vj, vj_low, v_unit, PRODUCT)
    if PRODUCT != "plain":
        drift *= dscore_unit
        mean *= dscore_unit
    acc = (acc - drift[:, None] * read(o, b, h, i, M, V).to(tl.float32)) * rest[:, None]
    if means is not None:
        at = means + (b * tl.num_programs(1) + h).to(tl.int64) * n + rows
        mean *= rest
        if start is not None:  # noqa: SIM102 (Triton compiles both sides of an `and`)
            if start > 0:
                mean += tl.load(at, mask=rows < n, other=0.0)
        tl.store(at, mean, mask=rows < n)
    acc = add_earlier(acc, do, start, b, h, i)
    do.store([b, h, i, 0], acc.to(do.dtype).reshape(1, 1, M, V))


JVP_TILES = {
    # (M, N, warps, stages, registers) by product and head dimension:
    # M queries per program, N keys per step.
    ("plain", 64): (128, 64, 8, 2, 128),
    ("plain", 128): (128, 64, 8, 2, None),
    ("half", 64): (128, 32, 8, 2, 128),
    ("half", 128): (128, 32, 8, 2, None),
    ("pair", 64): (128, 64, 8, 2, None),
    ("pair", 128): (64, 32, 4, 2, None),
    ("plain", 256): (64, 32, 8, 1, None),
    ("half", 256): (64, 32, 8, 1, None),
}


def jvp_and_drift(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tangent: Triple, pattern: Pattern
) -> tuple[Tensor, Tensor]:
    """`jvp`, and the mean of dT over each row of P [..., H, n]."""
    drift = to_fill(torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))
    return jvp(q, k, v, o, lse, tangent, pattern, drift), drift


def jvp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tangent: Triple, pattern: Pattern,
    drift: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """do [..., H, n, m] along (dq, dk, dv)."""
    dq, dk, dv = tangent
    (H, n, _), (G, n_keys, m) = q.shape[-3:], v.shape[-3:]
    product = product_of(q.dtype)
    K = block(q.shape[-1])
    V = block(m)
    M, N, warps, stages, registers = JVP_TILES[product, max(64, K, V)]
    factors = units = None
    if product == "pair":
        a, b, c, d, e, f = powers(q, k, v, dv, dq, dk)
        e = torch.minimum(e / a, f / b)  # one scale for both, because dq k' and q dk' are added
        factors = a, b, c, a * e, b * e, d
        units = torch.stack([1 / (a * b), 1 / (a * b * e), 1 / c, 1 / d])
    qs, ks, vs, dqs, dks, dvs = as_operands((q, k, v, dq, dk, dv), factors)
    B = q.shape[:-3].numel()
    keys, stops = padding_of(pattern, q.shape[:-3])
    do = blank((B, H, n, m), q.dtype, q.device)
    saved = aligned(o)
    lse = lse.contiguous()
    scale = None if pattern.scale == 1 else pattern.scale  # a factor of one would be multiplied by
    for start, end in spans(n_keys, product, pattern):
        mask, mask_tiles, kind = mask_of(pattern, q.shape, n_keys, keys, M, N, span=(start, end))
        _jvp[ceil_div(n, M), H, B](
            descriptor(qs, M), descriptor(ks, N), descriptor(vs, N),
            descriptor(dqs, M), descriptor(dks, N), descriptor(dvs, N),
            descriptor(saved, M), descriptor(do, M),
            lse, drift, keys, stops, units, mask, mask_tiles, scale, pattern.softcap,
            pattern.window, pattern.shift, n, n_keys, start, end,
            H // G, pattern.causal, kind, product, M, N, K, V,
            num_warps=warps, num_stages=stages, maxnreg=registers,
        )  # fmt: skip
    return do.view(*q.shape[:-1], m)


@triton.jit
@no_type_check
def _value_and_tangent(
    q, k, v, dq, dk, dv, o, do, lse, drift, keys, stops, mask, mask_tiles, scale, window,
    shift, n, n_keys,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRODUCT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    i, h, b = queries_of_program(M)
    g = h // GROUP
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
    line = i // M
    stop = last_key(stops, b, n_keys, None)
    bounds = key_runs(mask, b, h, i, None, stop, shift, window, CAUSAL, MASK, M, N)
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
                t = masked(t, words, mask, mask_tiles, b, h, i, j, n, n_keys, run, MASK, M, N)
                t = unhidden(
                    t, float("-inf"), keys, b, i, j, n_keys, shift, window, run, CAUSAL, MASK, M, N
                )
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


BOTH_TILES = {
    # (M, N, warps, stages) by the larger head dimension: M queries per program, N keys per step.
    64: (64, 64, 4, 3),
    128: (128, 32, 8, 2),
    256: (64, 32, 8, 1),
}


def supports_one_launch(q: Tensor, pattern: Pattern) -> bool:
    """Whether `value_and_tangent` can do what `forward` and `jvp` can."""
    special = (pattern.softcap, pattern.sinks, pattern.queries)
    return q.dtype in HALF and all(x is None for x in special)


def value_and_tangent(
    q: Tensor, k: Tensor, v: Tensor, tangent: Triple, pattern: Pattern, keep_digits: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, do, lse (+inf for a fully masked row), and the mean score tangent of each row.

    With `keep_digits`, o is float32, for derivatives to come; without, the means are not computed.
    """
    (H, n, _), (G, n_keys, m) = q.shape[-3:], v.shape[-3:]
    K = block(q.shape[-1])
    V = block(m)
    B = q.shape[:-3].numel()
    M, N, warps, stages = BOTH_TILES[max(64, K, V)]
    qs, ks, vs, dqs, dks, dvs = (aligned(x) for x in (q, k, v, *tangent))
    keys, stops = padding_of(pattern, q.shape[:-3])
    o = blank((B, H, n, m), torch.float32 if keep_digits else q.dtype, q.device)
    do = blank((B, H, n, m), q.dtype, q.device)
    lse, drift = to_fill(torch.empty(2, B, H, n, dtype=torch.float32, device=q.device))
    masking = bytes_of(pattern, q.shape, n_keys, M, N)
    mask, mask_tiles, kind = masking or mask_of(pattern, q.shape, n_keys, keys, M, N)
    # Two programs share the memory of a processor; with bytes of masks in every stage, one would.
    stages -= 1 if kind == BYTES and stages > 2 else 0
    _value_and_tangent[ceil_div(n, M), H, B](
        descriptor(qs, M), descriptor(ks, N), descriptor(vs, N),
        descriptor(dqs, M), descriptor(dks, N), descriptor(dvs, N),
        descriptor(o, M), descriptor(do, M),
        lse, drift if keep_digits else None, keys, stops, mask, mask_tiles, pattern.scale,
        pattern.window, pattern.shift, n, n_keys, H // G, pattern.causal, kind,
        product_of(q.dtype), M, N, K, V,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    shape = (*q.shape[:-1], m)
    rows = q.shape[:-1]
    return o.view(shape), do.view(shape), lse.view(rows), drift.view(rows)
