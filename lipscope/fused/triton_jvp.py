"""The fused tangent of attention from o and lse: do = P dv + W v - (W 1) o with W = P * dT."""

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
    aligned,
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
    to_fill,
)
from lipscope.fused.triton_tiles import (
    add_earlier,
    add_low,
    add_product,
    are_real,
    cap,
    key_range,
    read,
    read_low,
    read_top,
    rounded,
    row_peak,
    scores,
    visible,
)


@triton.jit
@no_type_check
def _jvp(
    q, k, v, dq, dk, dv, o, do, lse, means, keys, stops, units, mask, mask_tiles, scale, softcap,
    window, shift, n, n_keys, start, end,
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
    if end is not None:
        stop = tl.minimum(stop, end)
    score_unit = 1.0
    dscore_unit = 1.0
    v_unit = 1.0
    dv_unit = 1.0
    if scale is not None:
        score_unit = scale
        dscore_unit = scale
        v_unit = scale
    if units is not None:
        score_unit = score_unit * tl.load(units)
        dscore_unit = dscore_unit * tl.load(units + 1)
        v_unit = tl.load(units + 2) * dscore_unit
        dv_unit = tl.load(units + 3)
    rows = i + tl.arange(0, M)
    top, rest = read_top(lse, (b * tl.num_programs(1) + h) * n, rows, n)
    qi = read(q, b, h, i, M, K)
    dqi = read(dq, b, h, i, M, K)
    qi_low = read_low(q, b, h, i, qi, PRODUCT)
    dqi_low = read_low(dq, b, h, i, dqi, PRODUCT)
    acc = tl.zeros([M, V], tl.float32)
    drift = tl.zeros([M], tl.float32)
    mean = tl.zeros([M], tl.float32)
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
                kj = read(k, b, g, j, N, K)
                dkj = read(dk, b, g, j, N, K)
                vj = read(v, b, g, j, N, V)
                dvj = read(dv, b, g, j, N, V)
                kj_low = read_low(k, b, g, j, kj, PRODUCT)
                dkj_low = read_low(dk, b, g, j, dkj, PRODUCT)
                vj_low = read_low(v, b, g, j, vj, PRODUCT)
                dvj_low = read_low(dv, b, g, j, dvj, PRODUCT)
                t = scores(qi, qi_low, kj, kj_low, PRODUCT)
                dt = add_low(tl.zeros([M, N], tl.float32), dqi, dqi_low, kj, kj_low, PRODUCT)
                dt = add_low(dt, qi, qi_low, dkj, dkj_low, PRODUCT)
                dt = tl.dot(qi, dkj.T, tl.dot(dqi, kj.T, dt))
                if PRODUCT == "plain" and scale is not None:  # bf16 has the range, and no units
                    dt *= dscore_unit
                t, slope = cap(t, score_unit, softcap)
                columns = j + tl.arange(0, N)
                if run != 1:
                    t = masked(t, words, mask, mask_tiles, b, h, i, j, n, n_keys, MASK, M, N, False)
                p = tl.exp2(t - top[:, None])
                if run != 1 and MASK != 1:
                    seen = visible(rows[:, None], columns[None, :], n_keys, shift, window, CAUSAL)
                    p = tl.where(seen, p, 0.0)
                if keys is not None:
                    p = tl.where(are_real(keys, b, columns, n_keys)[None, :], p, 0.0)
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


TILES = {
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

Triple = tuple[Tensor, Tensor, Tensor]


def jvp(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tangent: Triple, pattern: Pattern,
    precision: Precision = "pair",
) -> Tensor:  # fmt: skip
    """do [..., H, n, m] along (dq, dk, dv)."""
    return _launch(q, k, v, o, lse, tangent, pattern, precision, None)


def jvp_and_drift(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tangent: Triple, pattern: Pattern
) -> tuple[Tensor, Tensor]:
    """`jvp`, and the mean of dT over each row of P [..., H, n]."""
    drift = to_fill(torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))
    return _launch(q, k, v, o, lse, tangent, pattern, "pair", drift), drift


def _launch(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tangent: Triple, pattern: Pattern,
    precision: Precision, drift: Tensor | None,
) -> Tensor:  # fmt: skip
    dq, dk, dv = tangent
    (H, n, _), (G, n_keys, m) = q.shape[-3:], v.shape[-3:]
    product = product_of(q.dtype, precision)
    K = block(q.shape[-1])
    V = block(m)
    M, N, warps, stages, registers = TILES[product, max(64, K, V)]
    factors = units = None
    if needs_scaling(q.dtype, product):
        a, b, c, d, e, f = powers(q, k, v, dv, dq, dk)
        e = torch.minimum(e / a, f / b)  # one scale for both, because dq k' and q dk' are added
        factors = a, b, c, a * e, b * e, d
        units = torch.stack([1 / (a * b), 1 / (a * b * e), 1 / c, 1 / d])
    qs, ks, vs, dqs, dks, dvs = as_operands((q, k, v, dq, dk, dv), factors, product)
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
