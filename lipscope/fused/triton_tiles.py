"""What the Triton kernels share: tiles, visible ranges, and products in three precisions.

PRODUCT is "plain" (bf16 operands), "half" (fp16) or "pair" (float32 as two fp16). Kernels are
compiled from their source: `no_type_check` keeps run-time type checkers from wrapping them.
"""

from typing import no_type_check

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def queries_of_program(M: tl.constexpr):
    """The first query of this program, its head, and its member of the batch."""
    # The longest rows of a causal mask start first, so that no late block keeps the device waiting.
    return (tl.num_programs(0) - 1 - tl.program_id(0)) * M, tl.program_id(1), tl.program_id(2)


@triton.jit
@no_type_check
def last_key(stops, b, n_keys, end):
    """Where the keys of this member stop: before the padding at the end, and before `end`."""
    stop = n_keys
    if stops is not None:
        stop = tl.load(stops + b)
    if end is not None:
        stop = tl.minimum(stop, end)
    return stop


@triton.jit
@no_type_check
def last_query(stops, b, j, n, end):
    """Where the queries that see keys from j on stop: at 0 if these keys are padding."""
    stop = n
    if stops is not None:
        stop = tl.where(j < tl.load(stops + b), n, 0)
    if end is not None:
        stop = tl.minimum(stop, end)
    return stop


@triton.jit
@no_type_check
def unit_of(units, index):
    """One of the units that operands were scaled by; 1 where they were not scaled."""
    unit = 1.0
    if units is not None:
        unit = tl.load(units + index)
    return unit


@triton.jit
@no_type_check
def read(source, b, h, i, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows i, i + 1, ... of one head; rows outside the tensor read as zero."""
    return source.load([b, h, i, 0]).reshape(ROWS, COLUMNS)


@triton.jit
@no_type_check
def read_pair(source, b, h, i, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRODUCT: tl.constexpr):
    """`read`, and the low halves, stored a batch further; a placeholder if there are none."""
    high = read(source, b, h, i, ROWS, COLUMNS)
    low = high
    if PRODUCT == "pair":
        low = read(source, b + tl.num_programs(2), h, i, ROWS, COLUMNS)
    return high, low


@triton.jit
@no_type_check
def add_low(acc, a, a_low, b, b_low, PRODUCT: tl.constexpr):
    """acc plus the part of a b' that involves low halves."""
    # Small parts are added first: tensor cores truncate relative to the size of the running sum.
    if PRODUCT == "pair":
        acc = tl.dot(a_low, b.T, acc)
        acc = tl.dot(a, b_low.T, acc)
    return acc


@triton.jit
@no_type_check
def scores(a, a_low, b, b_low, PRODUCT: tl.constexpr):
    """a b'."""
    acc = tl.zeros([a.shape[0], b.shape[0]], tl.float32)
    return tl.dot(a, b.T, add_low(acc, a, a_low, b, b_low, PRODUCT))


@triton.jit
@no_type_check
def add_product(acc, a, peak, b, b_low, unit, PRODUCT: tl.constexpr):
    """acc + unit a b for a float32 tile a whose rows stay below `peak`."""
    # fp16 has 5 exponent bits: a is scaled to 2^14 first, so that nothing relevant under- or
    # overflows. The sum over tiles is kept outside the tensor cores, which truncate: over thousands
    # of tiles that would be visible.
    if PRODUCT == "plain":
        acc = tl.dot(a.to(b.dtype), b, acc)
    else:
        a = a * (16384.0 / peak)
        high = a.to(b.dtype)
        part = tl.zeros_like(acc)
        if PRODUCT == "pair":
            part = tl.dot((a - high.to(tl.float32)).to(b.dtype), b, part)
            part = tl.dot(high, b_low, part)
        part = tl.dot(high, b, part)
        acc += part * (peak * (unit / 16384.0))
    return acc


@triton.jit
@no_type_check
def rounded(a, PRODUCT: tl.constexpr):
    """a as `add_product` rounds it, where that matters: bf16 only."""
    # fl(65537 a) - 65536 a is a rounded to bf16, computed in float32: cheaper than converting there
    # and back. fp16 operands are scaled by their row's peak, which they then represent exactly.
    return (
        tl.fma(a, tl.full(a.shape, -65536.0, tl.float32), a * 65537.0) if PRODUCT == "plain" else a
    )


@triton.jit
@no_type_check
def row_peak(a, PRODUCT: tl.constexpr):
    """The largest entry of each row, [rows, 1], where `add_product` needs it."""
    return 1.0 if PRODUCT == "plain" else tl.maximum(tl.max(tl.abs(a), 1), 1e-30)[:, None]


@triton.jit
@no_type_check
def tanh(x):
    """tanh to 2e-7, near zero by its Taylor series, because (1 - e) / (1 + e) cancels there."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - e) / (1 + e)
    y = x * x
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
@no_type_check
def cap(t, unit, softcap):
    """The score c tanh(t unit / c) in units of log 2, and its slope (unused without a cap)."""
    if softcap is None:
        score = t * (unit * LOG2E)
        slope = t
    else:
        bend = tanh(t * (unit / softcap))
        score = bend * (softcap * LOG2E)
        slope = 1 - bend * bend
    return score, slope


@triton.jit
@no_type_check
def visible(i, j, n_keys, shift, window, CAUSAL: tl.constexpr):
    """Whether query i sees key j, for broadcastable i and j."""
    seen = j < n_keys
    if CAUSAL:
        seen = seen & (j <= i + shift)
    if window is not None:
        seen = seen & (j > i + shift - window)
    return seen


@triton.jit
@no_type_check
def key_range(
    i, start, stop, shift, window, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """Runs of key tiles that queries i .. i + M see: cut on the left, whole, cut on the right."""
    first = 0
    whole = 0
    if start is not None:
        first = start
        whole = start
    last = stop
    cut = stop // N * N
    if CAUSAL:
        last = tl.minimum(last, tl.maximum(i + M + shift, 0))
        cut = tl.minimum(cut, tl.maximum(i + shift + 1, 0) // N * N)
    if window is not None:
        first = tl.maximum(i + shift - window + 1, first) // N * N
        whole = tl.cdiv(tl.maximum(i + M + shift - window, whole), N) * N
    return first, tl.minimum(whole, last), whole, cut, tl.maximum(whole, cut), last


@triton.jit
@no_type_check
def query_range(
    j, start, stop, shift, window, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """Runs of query tiles that see keys j .. j + N: cut on the left, whole, cut on the right.

    A last tile that ends beyond the queries counts as whole: missing rows have no weight
    (`read_top`).
    """
    first = 0
    whole = 0
    if start is not None:
        first = start
        whole = start
    last = stop
    cut = tl.cdiv(stop, M) * M
    if CAUSAL:
        first = tl.maximum(j - shift, first) // M * M
        whole = tl.cdiv(tl.maximum(j + N - 1 - shift, whole), M) * M
    if window is not None:
        last = tl.minimum(last, tl.maximum(j + N - 1 - shift + window, 0))
        cut = tl.minimum(cut, tl.maximum(j - shift + window, 0) // M * M)
    return first, tl.minimum(whole, last), whole, cut, tl.maximum(whole, cut), last


@triton.jit
@no_type_check
def read_top(lse, offset, rows, n):
    """Log-sum-exp in units of log 2, and the factor 1 + O(2^-24) by which its rounding is undone.

    Of a row that sees nothing it is +inf, so that the weights are zero.
    """
    value = tl.load(lse + offset.to(tl.int64) + rows, mask=rows < n, other=float("inf"))
    top = value * LOG2E
    rest = tl.where(
        top == float("inf"), 0.0, tl.fma(value, tl.full(value.shape, LOG2E, tl.float32), -top)
    )
    return top, tl.exp2(-rest)


@triton.jit
@no_type_check
def add_earlier(acc, sums, start, b, h, i):
    """acc plus the sums of earlier spans, if there are several (`triton_operands.spans`)."""
    if start is not None:  # noqa: SIM102 (Triton compiles both sides of an `and`)
        if start > 0:
            acc += sums.load([b, h, i, 0]).reshape(acc.shape)
    return acc


@triton.jit
@no_type_check
def are_real(keys, b, j, n_keys):
    """Which of the keys j are not padding."""
    return tl.load(keys + b.to(tl.int64) * n_keys + j, mask=j < n_keys, other=0) > 0
