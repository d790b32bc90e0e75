"""Tensors as the Triton kernels need them: descriptors, aligned rows, float32 as pairs of fp16.

A float32 number is written as high + low with two fp16 numbers, 22 bits in all. A product of two
such pairs takes three fp16 products (low times low is below the last bit kept): as accurate as
3xTF32, in half the time on tensor cores. Tensors are first scaled by powers of two that bring their
largest entry to 2^14: what fp16's exponent range then loses is below 2^-38 of that entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lipscope.fused._torch_internals import kernel_watchers
from lipscope.fused.pattern import Pattern

SPAN = 8192
TALLEST = 128
"""Tokens summed over in one launch in float32, and the largest tile of tokens."""

LARGEST = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
"""The largest head dimension that fits into shared memory, where float32 is a pair of fp16."""


def supports(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> bool:
    """Whether the kernels can compute this."""
    mask = pattern.mask
    return (
        q.dtype in LARGEST
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and q.numel() > 0
        and v.numel() > 0
        and max(q.shape[-1], v.shape[-1]) <= LARGEST[q.dtype]
        # What fits into the grid of one launch.
        and max(q.shape[:-3].numel(), q.shape[-3]) <= 65535
        # A float64 mask has digits that the kernels would drop.
        and (mask is None or (mask.device == q.device and mask.dtype != torch.float64))
    )


def product_of(dtype: torch.dtype) -> str:
    """How the kernels multiply operands of this dtype."""
    return {torch.bfloat16: "plain", torch.float16: "half"}.get(dtype, "pair")


def block(size: int) -> int:
    """The padded head dimension of a kernel; columns beyond `size` read as zero."""
    return max(16, power_of_two(size))


# triton has both, for kernels as well; on the host they take microseconds each, and a launch
# calls them a dozen times.
def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def ceil_div(n: int, size: int) -> int:
    """How many tiles of this size cover n."""
    return -(-n // size)


def blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a kernel to fill, whose rows start at multiples of 16 bytes."""
    step = 16 // dtype.itemsize
    *rest, columns = shape
    if columns % step == 0:
        return to_fill(torch.empty(shape, dtype=dtype, device=device))
    wide = torch.empty(*rest, ceil_div(columns, step) * step, dtype=dtype, device=device)
    return to_fill(wide)[..., :columns]


def to_fill(x: Tensor) -> Tensor:
    """x, which a kernel is going to fill: modes of torch do not see it do so, and are told."""
    for watch in kernel_watchers:
        watch(x)
    return x


def aligned(x: Tensor) -> Tensor:
    """x [..., H, n, k] as [B, H, n, k]; copied if rows are not contiguous and 16-byte aligned."""
    x = x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])
    step = 16 // x.element_size()
    if x.is_contiguous() and x.shape[-1] % step == 0 and x.data_ptr() % 16 == 0:
        return x
    strides = [
        stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1
    ]
    if (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(s > 0 and s % step == 0 for s in strides)
    ):
        return x
    return blank(tuple(x.shape), x.dtype, x.device).copy_(x)


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, H, n, k], to be read or written `rows` rows at a time."""
    shape = list(x.shape)
    strides = list(x.stride())
    if 1 in shape:
        # A dimension of size one may have any stride in torch; a descriptor needs an aligned one.
        step = 16 // x.element_size()
        strides = [step if n == 1 else s for n, s in zip(shape[:-1], strides, strict=False)] + [1]
    # The constructor would check, in microseconds, what `aligned` and `blank` see to; a backward
    # pass through a tangent has thirty descriptors.
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base = x
    made.shape = shape
    made.strides = strides
    made.block_shape = [1, 1, rows, block(shape[-1])]
    return made


def powers(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The power of two that brings each tensor's largest entry to [2^13, 2^14); no device sync."""
    peaks = torch.stack([torch.linalg.vector_norm(x, torch.inf) for x in tensors])
    exponents = (14 - torch.frexp(peaks).exponent).clamp(-120, 120)
    return torch.ldexp(torch.ones_like(peaks), exponents).unbind()


def as_operands(tensors: Sequence[Tensor], factors: Sequence[Tensor] | None) -> list[Tensor]:
    """The tensors as [B, H, n, k]; with factors pairs of fp16, low halves as batches B to 2 B."""
    if factors is None:
        return [aligned(x) for x in tensors]
    pairs = []
    for x, factor in zip(tensors, factors, strict=True):
        scaled = x.reshape(-1, *x.shape[-3:]) * factor
        B, *rest = scaled.shape
        out = blank((2 * B, *rest), torch.float16, x.device)
        out[:B] = scaled
        out[B:] = scaled - out[:B]
        pairs.append(out)
    return pairs


def spans(
    n: int, product: str, pattern: Pattern, group: int = 1
) -> list[tuple[int | None, int | None]]:
    """The ranges (start, end) of n tokens to sum over in one launch each; (None, None) for all."""
    # The rounding of a running sum grows like the square root of its length. In float32 it would
    # exceed that of the products, so sums are kept short and added up at the end; coarser products
    # do not have those digits in the first place.
    length = max(SPAN // group // TALLEST, 1) * TALLEST
    if (
        product != "pair"
        or n <= length
        or (pattern.window is not None and pattern.window <= length)
    ):
        return [(None, None)]
    return [(start, start + length) for start in range(0, n, length)]


def padding_of(pattern: Pattern, leading: torch.Size) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Which keys are real, [B, n'] as bytes, and where the last one ends, [B]."""
    if pattern.keys is None:
        return None, None
    keys = pattern.keys
    n_keys = pattern.keys.shape[-1]
    keys = keys.reshape(n_keys) if keys.numel() == n_keys else keys  # the same for all members
    keys = keys.expand(*leading, n_keys).reshape(-1, n_keys)
    ends = torch.arange(1, n_keys + 1, device=keys.device, dtype=torch.int32)
    return keys.to(torch.uint8).contiguous(), (ends * keys).amax(1).to(torch.int32)
