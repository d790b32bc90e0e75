"""Explicit masks in the kernels: the tiles of scores a mask leaves, and the level of its rows.

Tiles in which no query sees a key are skipped; those in which every query sees every key come last
and read no mask. What a boolean mask, causal order, window and padding leave of the others is kept
as bits, a word for 32 keys. The level of a row is the largest entry of an additive mask that it
sees; it is taken out before the mask meets the scores (`pattern.without_level`).
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lipscope.fused.pattern import Pattern, distinct
from lipscope.fused.triton_operands import aligned, ceil_div, power_of_two
from lipscope.fused.triton_tiles import are_real, key_range, visible

NONE = 0
BOOLEAN = 1
ADDITIVE = 2
BYTES = 3
"""The kinds of mask a kernel is compiled for; BYTES is a boolean one as it is, without a survey."""

PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)
"""Whether kernels are compiled for CUDA; the interpreter knows no instructions of a device."""


class Mask(NamedTuple):
    """What a kernel reads of a mask. A stride is 0 where the mask is broadcast."""

    words: Tensor  # [B' * H' * n', words]: bits of visible keys, unused by additive masks
    words_batch: int
    words_head: int
    words_row: int
    entries: Tensor
    batch: int
    head: int
    row: int
    column: int
    last_batch: int  # 0 where the mask is broadcast over the batch
    last_head: int
    level: Tensor  # [B' * H' * n], unused by boolean masks
    level_batch: int
    level_head: int
    tiles: Tensor  # [B' * H' * lines, width]: indices of mixed tiles, then of whole ones
    counts: Tensor  # [B' * H' * lines, 2]: how many are mixed, and how many there are
    tiles_batch: int
    tiles_head: int
    width: int


class Bytes(NamedTuple):
    """The part of a Mask that is needed to read it by tiles."""

    last_batch: int
    last_head: int


class Masking(NamedTuple):
    """The mask of a pattern as a kernel gets it; (None, None, NONE) without a mask."""

    mask: Mask | Bytes | None
    mask_tiles: TensorDescriptor | None  # the entries by tiles, if nothing is broadcast in them
    kind: int


@triton.jit
@no_type_check
def tile_counts(mask, b, h, line):
    """How many tiles of a line (of queries, or of keys) are mixed, and how many to visit."""
    at = mask.counts + 2 * (b * mask.tiles_batch + h * mask.tiles_head + line)
    return tl.load(at), tl.load(at + 1)


@triton.jit
@no_type_check
def key_runs(
    mask, b, h, i, start, stop, shift, window,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`key_range`, or the runs of the tiles that a survey of the mask has left."""
    bounds = key_range(i, start, stop, shift, window, CAUSAL, M, N)
    if MASK == 1 or MASK == 2:
        mixed, all_tiles = tile_counts(mask, b, h, i // M)
        bounds = (0, 0, mixed * N, all_tiles * N, 0, mixed * N)
    return bounds


@triton.jit
@no_type_check
def tile_at(mask, b, h, line, step, SIZE: tl.constexpr, MASK: tl.constexpr):
    """Where the tile of this step starts; without a mask, the step itself."""
    start = step
    if MASK == 1 or MASK == 2:
        where = (b * mask.tiles_batch + h * mask.tiles_head + line).to(tl.int64) * mask.width
        start = tl.load(mask.tiles + where + step // SIZE) * SIZE
    return start


@triton.jit
@no_type_check
def mask_words(mask, b, h, i, j, n, MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The bits of queries i .. i + M and keys j .. j + N, two words for each query.

    To be read before the scores are computed: nothing then waits for them.
    """
    low = 0
    high = 0
    if MASK == 1:
        rows = i + tl.arange(0, M)
        at = _words_of(mask, b, h, rows) + j // 32
        low = tl.load(at, mask=rows < n, other=0)
        high = low
        if N == 64:
            high = tl.load(at + 1, mask=rows < n, other=0)
    return low, high


@triton.jit
@no_type_check
def words_of_step(
    mask, b, h, i, line, step, end, n, MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """`mask_words` of the tile of this step, or of the last step where `end` has been reached."""
    start = tile_at(mask, b, h, line, tl.maximum(tl.minimum(step, end - N), 0), N, MASK)
    start = tl.where(end > 0, start, 0)  # no tile at all: what the list holds was never written
    return mask_words(mask, b, h, i, start, n, MASK, M, N)


@triton.jit
@no_type_check
def masked(
    t, words, mask, mask_tiles, b, h, i, j, n, n_keys, RUN: tl.constexpr,
    MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KEYS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Scores t (in units of log 2) of queries i .. i + M and keys j .. j + N under the mask.

    Tiles are [M, N], or with KEYS_FIRST [N, M]; those of RUN 1 are whole.
    """
    if MASK == 3:
        four_each = _entries(mask, mask_tiles, b, h, i, j // 4, n, n_keys, M, N // 4)
        words = _packed(four_each, M, N)
    if (RUN != 1 and MASK == 1) or MASK == 3:
        # A word holds 32 keys of a row: far less to move than a tile of bytes.
        column = tl.arange(0, N)[:, None] if KEYS_FIRST else tl.arange(0, N)[None, :]
        low = _beside(words[0], KEYS_FIRST)
        high = _beside(words[1], KEYS_FIRST)
        word = tl.where((column & 32) == 0, low, high)
        if KEYS_FIRST:
            t = _where_set(t, word, 1 << (column & 31))
        else:
            # A thread has columns that differ by multiples of 8, and their neighbours: with the
            # rest of the shift done once for all of them, it asks for constant bits.
            t = _where_set(t, word >> (column & 6), 1 << (column & 25))
    if RUN != 1 and MASK == 2:
        tile = _entries(mask, mask_tiles, b, h, i, j, n, n_keys, M, N)
        rows = _beside(i + tl.arange(0, M), KEYS_FIRST)
        level = row_level(mask, b, h, rows, n, MASK)
        tile = tile.T if KEYS_FIRST else tile
        t += (tile.to(tl.float32) - level) * 1.4426950408889634
    return t


@triton.jit
@no_type_check
def unhidden(
    x, hidden, keys, b, i, j, n_keys, shift, window, RUN: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KEYS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """x, and `hidden` where causal order, the window or padding hides a key from a query."""
    columns = j + tl.arange(0, N)
    if RUN != 1 and MASK != 1:
        rows = _beside(i + tl.arange(0, M), KEYS_FIRST)
        x = tl.where(
            visible(rows, _beside(columns, not KEYS_FIRST), n_keys, shift, window, CAUSAL),
            x,
            hidden,
        )
    if keys is not None:
        x = tl.where(are_real(keys, b, columns, n_keys)[None, :], x, hidden)
    return x


@triton.jit
@no_type_check
def _where_set(t, word, bit):
    """t where the word has the bit, -inf elsewhere."""
    if PTX:
        # Left to itself, the compiler collects the answers of a thread in words of its own.
        t = tl.inline_asm_elementwise(
            "{.reg .pred p; .reg .b32 r; and.b32 r, $2, $3; setp.ne.b32 p, r, 0; "
            "selp.f32 $0, $1, 0fFF800000, p;}",
            "=f,f,r,r",
            [t, word, bit],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        t = tl.where((word & bit) != 0, t, float("-inf"))
    return t


@triton.jit
@no_type_check
def _packed(tile, M: tl.constexpr, N: tl.constexpr):
    """The bits of a tile [M, N / 4] of four bytes each, two words for each row."""
    # Bit 7 of a byte: whether it is not 0. A multiplication then brings four of them together.
    # What exceeds 32 bits is not needed.
    carried = tl.add(tile & 0x7F7F7F7F, 0x7F7F7F7F, sanitize_overflow=False) | tile
    together = tl.mul((carried >> 7) & 0x01010101, 0x10204080, sanitize_overflow=False)
    four = (together >> 28) & 15
    eight = four.reshape(M, N // 32, 8) << (4 * tl.arange(0, 8))[None, None, :]
    words = tl.sum(eight, 2)
    if N == 64:
        low, high = words.split()
    else:
        low = words.reshape(M)
        high = low
    return low, high


@triton.jit
@no_type_check
def _words_of(mask, b, h, rows):
    """Where the bits of these rows begin."""
    place = b.to(tl.int64) * mask.words_batch + h.to(tl.int64) * mask.words_head
    return mask.words + place + rows.to(tl.int64) * mask.words_row


@triton.jit
@no_type_check
def _beside(x, KEYS_FIRST: tl.constexpr):
    """x, one number per query, as a column of a tile, or with KEYS_FIRST as a row."""
    return x[None, :] if KEYS_FIRST else x[:, None]


@triton.jit
@no_type_check
def _entries(mask, mask_tiles, b, h, i, j, n, n_keys, M: tl.constexpr, N: tl.constexpr):
    """Entries [M, N] of the mask; those outside of it read as 0."""
    if mask_tiles is not None:
        # Through shared memory: element by element, a tile of bytes costs more than its scores.
        place = tl.minimum(b, mask.last_batch), tl.minimum(h, mask.last_head)
        tile = mask_tiles.load([place[0], place[1], i, j]).reshape(M, N)
    else:
        rows = (i + tl.arange(0, M))[:, None]
        columns = (j + tl.arange(0, N))[None, :]
        base = mask.entries + b.to(tl.int64) * mask.batch + h.to(tl.int64) * mask.head
        at = base + rows.to(tl.int64) * mask.row + columns.to(tl.int64) * mask.column
        tile = tl.load(at, mask=(rows < n) & (columns < n_keys), other=0)
    return tile


@triton.jit
@no_type_check
def row_level(mask, b, h, i, n, MASK: tl.constexpr):
    """The level of queries i, in the units of the mask; 0 for a boolean mask and an unseen row."""
    level = tl.zeros(i.shape, tl.float32)
    if MASK == 2:
        where = (b * mask.level_batch + h * mask.level_head).to(tl.int64) + i
        level = tl.load(mask.level + where, mask=i < n, other=0.0)
        level = tl.where(level == float("-inf"), 0.0, level)
    return level


FEW = 256
"""Tiles of scores up to which a boolean mask is read as it is."""

CHUNK = 4
"""Tiles that one program of the survey looks at: enough programs to fill the device."""


@triton.jit
@no_type_check
def _survey(
    mask, mask_tiles, keys, states, shift, window, n, n_keys, lines, width,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The state of each tile (0 empty, 1 mixed, 2 whole), its bits, and the level of each row."""
    block = tl.program_id(0) % lines
    chunk = tl.program_id(0) // lines
    i = block * M
    h = tl.program_id(1)
    b = tl.program_id(2)
    rows = i + tl.arange(0, M)
    line = (b * tl.num_programs(1) + h).to(tl.int64)
    states += (line * lines + block) * width
    top = tl.full([M], float("-inf"), tl.float32)
    for tile in tl.range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, width)):
        columns = tile * N + tl.arange(0, N)
        entries = _entries(mask, mask_tiles, b, h, i, tile * N, n, n_keys, M, N)
        if MASK == 1:
            seen = entries > 0  # entries outside of the mask read as 0
        else:
            bias = entries.to(tl.float32)
            inside = (rows < n)[:, None] & (columns < n_keys)[None, :]
            seen = (bias > float("-inf")) & inside
        if CAUSAL or window is not None:
            seen &= visible(rows[:, None], columns[None, :], n_keys, shift, window, CAUSAL)
        if keys is not None:
            seen &= are_real(keys, b, columns, n_keys)[None, :]
        if MASK == 1:
            bits = seen.to(tl.int32).reshape(M, N // 32, 32) << tl.arange(0, 32)[None, None, :]
            words = tl.sum(bits, 2)
            word = (tile * N) // 32 + tl.arange(0, N // 32)
            at = _words_of(mask, b, h, rows)[:, None] + word[None, :]
            tl.store(at, words, mask=(rows < n)[:, None])
            # Whatever is asked of all keys is asked of words, 32 at a time.
            some = tl.max(tl.max((words != 0).to(tl.int32), 1), 0)
            whole = (words == -1) | (rows >= n)[:, None]
            every = tl.min(tl.min(whole.to(tl.int32), 1), 0)
            state = some + some * every
        else:
            top = tl.maximum(top, tl.max(tl.where(seen, bias, float("-inf")), 1))
            state = tl.max(tl.max(seen.to(tl.int32), 1), 0)  # an additive mask is always read
        tl.store(states + tile, state.to(tl.int8))
    if MASK == 2:
        at = mask.level + line * n + rows
        tl.atomic_max(at, top, mask=(rows < n) & (top > float("-inf")))


@triton.jit
@no_type_check
def _list_tiles(
    states, tiles, counts, per_line, per_tile, per_head, first, width, WIDTH: tl.constexpr
):
    """The tiles of one line that count, in their own order: sums are the same in every run."""
    line = tl.program_id(0)
    group = tl.program_id(1)
    index = tl.arange(0, WIDTH)
    at = states + group.to(tl.int64) * per_head + line * per_line + (first + index) * per_tile
    state = tl.load(at, mask=index < width, other=0)
    mixed = (state == 1).to(tl.int32)
    whole = (state == 2).to(tl.int32)
    total = tl.sum(mixed, 0)
    place = tl.where(state == 1, tl.cumsum(mixed, 0), tl.cumsum(whole, 0) + total) - 1
    where = group.to(tl.int64) * tl.num_programs(0) + line
    tl.store(tiles + where * width + place, first + index, mask=state > 0)
    tl.store(counts + 2 * where, total)
    tl.store(counts + 2 * where + 1, total + tl.sum(whole, 0))


def mask_of(
    pattern: Pattern,
    shape: torch.Size,
    n_keys: int,
    keys: Tensor | None,
    M: int,
    N: int,
    over_queries: bool = False,
    span: tuple[int | None, int | None] = (None, None),
) -> Masking:
    """The mask of a pattern for q of this shape, in tiles of M queries and N keys.

    Lines of tiles are those of a block of queries, or with `over_queries` of a block of keys; a
    span restricts the tokens summed over.
    """
    if pattern.mask is None:
        return Masking(None, None, NONE)
    kind = BOOLEAN if pattern.mask.dtype == torch.bool else ADDITIVE
    *leading, _, n, _ = shape
    entries = _four_dimensional(pattern.mask, leading)
    entries = entries.view(torch.uint8) if kind == BOOLEAN else entries
    device = entries.device
    heads = entries.shape[1]
    B = entries.shape[0] if keys is None else torch.Size(leading).numel()
    batch, head, row, column = (
        0 if size == 1 else step for size, step in zip(entries.shape, entries.stride(), strict=True)
    )
    blocks = ceil_div(n, M), ceil_div(n_keys, N)
    lines, per_line = blocks[::-1] if over_queries else blocks
    size = M if over_queries else N
    first, last = (None if s is None else ceil_div(s, size) for s in span)
    first = first or 0
    last = per_line if last is None else min(last, per_line)
    width = last - first
    alike = row == 0 and not (pattern.causal or pattern.window)  # every row is like the first
    if kind == ADDITIVE:
        level = torch.full((B, heads, n), -torch.inf, dtype=torch.float32, device=device)
        words = torch.empty(1, 1, 1, 1, dtype=torch.int32, device=device)
    else:
        level = torch.empty(1, dtype=torch.float32, device=device)
        sizes = B, heads, 1 if alike else n, blocks[1] * N // 32
        words = torch.empty(sizes, dtype=torch.int32, device=device)
    mask = Mask(
        words=words,
        words_batch=0 if B == 1 else words[0].numel(),
        words_head=0 if heads == 1 else words[0, 0].numel(),
        words_row=0 if alike else words.shape[-1],
        entries=entries,
        batch=batch,
        head=head,
        row=row,
        column=column,
        last_batch=entries.shape[0] - 1,
        last_head=heads - 1,
        level=level,
        level_batch=0 if B == 1 else heads * n,
        level_head=0 if heads == 1 else n,
        tiles=torch.empty(B, heads, lines, width, dtype=torch.int32, device=device),
        counts=torch.empty(B, heads, lines, 2, dtype=torch.int32, device=device),
        tiles_batch=0 if B == 1 else heads * lines,
        tiles_head=0 if heads == 1 else lines,
        width=width,
    )
    by_tiles = row != 0 and column != 0  # nothing is broadcast in a tile
    mask_tiles = _by_tiles(_with_aligned_rows(entries), M, N) if by_tiles else None
    states = torch.empty(B, heads, *blocks, dtype=torch.int8, device=device)
    _survey[blocks[0] * ceil_div(blocks[1], CHUNK), heads, B](
        mask, mask_tiles, keys, states, pattern.shift, pattern.window, n, n_keys, *blocks,
        pattern.causal, kind, M, N, CHUNK,
    )  # fmt: skip
    strides = (1, blocks[1]) if over_queries else (blocks[1], 1)
    _list_tiles[lines, B * heads](
        states, mask.tiles, mask.counts, *strides, states[0, 0].numel(), first, width,
        power_of_two(width),
    )  # fmt: skip
    return Masking(mask, None if kind == BOOLEAN else mask_tiles, kind)


def bytes_of(pattern: Pattern, shape: torch.Size, n_keys: int, M: int, N: int) -> Masking | None:
    """A boolean mask of few tiles for q of this shape, to be read as it is; None for other masks.

    Where tiles are few the host is what takes time, and a survey would be two more launches.
    """
    mask, (*leading, _, n, _) = pattern.mask, shape
    if mask is None or mask.dtype != torch.bool or mask.shape[-2:] != (n, n_keys):
        return None
    if n == 1 or n_keys % 4 or ceil_div(n, M) * ceil_div(n_keys, N) > FEW:
        return None
    if 0 in mask.stride()[-2:]:  # a survey asks each row once, and makes no copy
        return None
    entries = _with_aligned_rows(_four_dimensional(mask, leading))
    if entries.storage_offset() % 4:  # aligned in memory that torch did not allocate
        return None
    entries = entries.view(torch.int32)
    last_batch = entries.shape[0] - 1
    last_head = entries.shape[1] - 1
    return Masking(Bytes(last_batch, last_head), _by_tiles(entries, M, N // 4), BYTES)


def _by_tiles(entries: Tensor, M: int, N: int) -> TensorDescriptor:
    """The entries to be read M rows and N columns at a time, with rows that are aligned."""
    return TensorDescriptor(entries, list(entries.shape), list(entries.stride()), [1, 1, M, N])


def _with_aligned_rows(entries: Tensor) -> Tensor:
    """The entries as a descriptor takes them; copied where rows do not start at 16 bytes."""
    x = aligned(entries)
    step = 16 // x.element_size()
    # A dimension of size one may have any stride in torch; a descriptor needs an aligned one.
    strides = [s if size > 1 else step for s, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return x.as_strided(x.shape, (*strides, 1))


def _four_dimensional(mask: Tensor, leading: list[int]) -> Tensor:
    """mask [..., H | 1, n | 1, n' | 1] as [B | 1, H | 1, n | 1, n' | 1]."""
    mask = mask[(None,) * (3 - mask.ndim)] if mask.ndim < 3 else mask
    mask = distinct(mask, dims=range(mask.ndim - 2))
    if mask.shape[:-3].numel() == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*leading, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
