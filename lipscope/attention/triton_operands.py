"""Tensors as the Triton kernels want them: descriptors, aligned rows, and float32 as scaled pairs of fp16.

A float32 number is written high + low with two fp16, 22 bits in all. A product of two such pairs is three
fp16 products (low times low is below the last bit kept): as exact as 3xTF32, and tensor cores do it in half
the time. Tensors are scaled by powers of two before, their largest entry to 2^14: what fp16's exponent then
cannot hold is below 2^-38 of that entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from lipscope.attention.pattern import Pattern

Precision = Literal["pair", "half"]
"""For float32: "pair" is as exact as 3xTF32, "half" as TF32. bf16 and fp16 operands are taken as they are."""

SPAN, TALLEST = 8192, 128
"""Tokens summed over in one launch, in float32, in tiles of at most so many tokens."""

LARGEST = 128
"""The head dimension that still fits on the chip."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> str | None:
    """Why the kernels cannot do this, or None if they can."""
    if {q.dtype, k.dtype, v.dtype} not in ({torch.bfloat16}, {torch.float16}, {torch.float32}):
        kinds = f"{q.dtype}, {k.dtype}, {v.dtype}"
        return f"q, k, v must share one of bfloat16, float16, float32; they are {kinds}"
    if len({q.device, k.device, v.device}) > 1:
        return f"q, k, v must share a device; they are on {q.device}, {k.device}, {v.device}"
    if max(q.shape[-1], v.shape[-1]) > LARGEST:
        return f"head dimensions up to {LARGEST} fit on the chip; these are {q.shape[-1]} and {v.shape[-1]}"
    if max(q.shape[:-3].numel(), q.shape[-3]) > 65535:
        return f"up to 65535 heads and as many sequences fit one launch; these are {tuple(q.shape[:-2])}"
    if pattern.mask is not None:
        return "an explicit mask is neither causal order nor a window nor padding"
    return None


def product_of(dtype: torch.dtype, precision: Precision) -> str:
    """How the kernels multiply operands of this type."""
    return {torch.bfloat16: "plain", torch.float16: "half"}.get(dtype, precision)


def block(size: int) -> int:
    """The head dimension a kernel works with; the columns beyond `size` read as zero."""
    return max(16, next_power_of_2(size))


def blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Unwritten memory whose rows start at multiples of 16 bytes."""
    step = 16 // dtype.itemsize
    *rest, columns = shape
    return torch.empty(*rest, -(-columns // step) * step, dtype=dtype, device=device)[..., :columns]


def aligned(x: Tensor) -> Tensor:
    """x [..., H, n, k] as [B, H, n, k]; a copy unless its rows are contiguous and 16-byte aligned."""
    x = x.reshape(-1, *x.shape[-3:])
    step = 16 // x.element_size()
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
    step = (
        16 // x.element_size()
    )  # a dimension of size one may have any stride in torch; here it must be aligned
    strides = [
        stride if size > 1 else step
        for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    ]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, block(x.shape[-1])])


def needs_scaling(dtype: torch.dtype, product: str) -> bool:
    """Whether operands are rewritten in fp16."""
    return dtype == torch.float32 and product != "plain"


def powers(*tensors: Tensor) -> tuple[Tensor, ...]:
    """For each tensor the power of two that brings its largest entry to [2^13, 2^14); they stay on the device."""
    peaks = torch.stack([torch.linalg.vector_norm(x, torch.inf) for x in tensors])
    exponents = (14 - torch.frexp(peaks).exponent).clamp(-120, 120)
    return torch.ldexp(torch.ones_like(peaks), exponents).unbind()


def as_operands(
    tensors: Sequence[Tensor], factors: Sequence[Tensor] | None, product: str
) -> list[Tensor]:
    """The tensors as [B, H, n, k]; with factors, in fp16, a pair's low halves as batches B .. 2 B."""
    if factors is None:
        return [aligned(x) for x in tensors]
    return [
        _split(x, factor, product == "pair") for x, factor in zip(tensors, factors, strict=True)
    ]


def _split(x: Tensor, factor: Tensor, pair: bool) -> Tensor:
    scaled = x.reshape(-1, *x.shape[-3:]) * factor
    B, *rest = scaled.shape
    out = blank((2 * B if pair else B, *rest), torch.float16, x.device)
    out[:B] = scaled
    if pair:
        out[B:] = scaled - out[:B]
    return out


def spans(
    n: int, product: str, pattern: Pattern, group: int = 1
) -> list[tuple[int | None, int | None]]:
    """The stretches (start, end) of n tokens that are summed over in one launch each; (None, None) for all of them.

    The rounding of a running sum grows like the square root of its length. In float32 that would show beside the
    products' own, so sums are kept short and added up at the end; coarser products have no such digits.
    """
    length = max(SPAN // group // TALLEST, 1) * TALLEST
    if (
        product != "pair"
        or n <= length
        or (pattern.window is not None and pattern.window <= length)
    ):
        return [(None, None)]
    return [(start, start + length) for start in range(0, n, length)]


def padding_of(pattern: Pattern, B: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Which keys are real, [B, n'] as bytes, and where the last one ends, [B]."""
    if pattern.keys is None:
        return None, None
    keys = pattern.keys.reshape(-1, pattern.keys.shape[-1]).expand(B, -1)
    ends = torch.arange(1, keys.shape[1] + 1, device=keys.device, dtype=torch.int32)
    return keys.to(torch.uint8).contiguous(), (ends * keys).amax(1).to(torch.int32)
