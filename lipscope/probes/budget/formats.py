"""Number formats: what each one does to weights, activations, keys and values.

A format is a row of a table. Quantisers take a tensor and return the tensor of values that the
format would store; the last dimension is the one along which values share a scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lipscope._types import UserError

Quantiser = Callable[[Tensor], Tensor]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats in which the whole model runs."""

E4M3_MAX = 448.0
KNOWN = "bf16, fp16, fp32, int8, int4:32, fp8, w8a8, kv8, kv4"


@dataclass(frozen=True)
class Format:
    """What is stored in low precision.

    weight:     quantiser of a weight [out, in]; None leaves weights alone
    activation: quantiser of the input [..., n, in] of a linear layer
    cache:      quantiser of keys and values [B, G, n, k]
    dtype:      the dtype of a run in which weights and the result of every operation are rounded
    step:       the largest error of an entry, relative to the largest entry that shares its scale;
                infinite if it is not known
    """

    name: str
    weight: Quantiser | None = None
    activation: Quantiser | None = None
    cache: Quantiser | None = None
    dtype: torch.dtype | None = None
    step: float = math.inf


def read_formats(wanted: str | Iterable[str] | Mapping[str, Quantiser]) -> list[Format]:
    """The formats behind names, or behind functions of the user's own for weights."""
    if isinstance(wanted, Mapping):
        found = [Format(name, weight=_checked(name, own)) for name, own in wanted.items()]
    else:
        names = wanted.split(",") if isinstance(wanted, str) else list(wanted)
        found = [read_format(name.strip()) for name in names]
    if not found:
        raise UserError(f"formats must name at least one format, such as {KNOWN}")
    return list({format.name: format for format in found}.values())


def read_format(name: str) -> Format:
    """The format with this name."""
    if name in DTYPES:
        return Format(name, dtype=DTYPES[name], step=torch.finfo(DTYPES[name]).eps / 2)
    if name == "fp8":
        return Format(name, weight=fp8, step=2**-4)
    if integers := re.fullmatch(r"int([2-8])(?::([1-9]\d{0,8}))?", name):
        bits, group = integers.groups()
        quantise = partial(symmetric, bits=int(bits), group=int(group or 0))
        return Format(name, weight=quantise, step=_step(int(bits) - 1))
    if both := re.fullmatch(r"w([2-8])a([2-8])", name):
        weight, activation = (partial(symmetric, bits=int(bits)) for bits in both.groups())
        step = _step(min(map(int, both.groups())) - 1)
        return Format(name, weight=weight, activation=activation, step=step)
    if cache := re.fullmatch(r"kv([2-8])", name):
        return Format(name, cache=partial(affine, bits=int(cache[1])), step=_step(int(cache[1])))
    raise UserError(
        f"there is no format {name!r}; the formats are {KNOWN}, with 2 to 8 bits and groups of any "
        "size, or pass {'name': function} for a format of your own"
    )


def symmetric(x: Tensor, bits: int, group: int = 0) -> Tensor:
    """Integers in [-q, q], q = 2^(bits - 1) - 1, times a scale per row, or per group of a row."""
    if group:
        return _by_group(partial(symmetric, bits=bits), x, group)
    scale = x.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
    scale = torch.where(scale == 0, 1, scale)
    return (x / scale).round() * scale


def affine(x: Tensor, bits: int) -> Tensor:
    """2^bits evenly spaced values from the smallest to the largest entry of each row."""
    low = x.amin(dim=-1, keepdim=True)
    high = x.amax(dim=-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    step = torch.where(step == 0, 1, step)
    return ((x - low) / step).round() * step + low


def fp8(x: Tensor) -> Tensor:
    """float8 e4m3, with one scale for the whole tensor."""
    scale = x.abs().max() / E4M3_MAX
    scale = torch.where(scale == 0, 1, scale)
    return (x / scale).float().to(torch.float8_e4m3fn).to(x.dtype) * scale


def _step(bits: int) -> float:
    """Half the distance of the numbers of an integer format, relative to the largest of them."""
    return 0.5 / (2**bits - 1)


def _by_group(quantise: Quantiser, x: Tensor, group: int) -> Tensor:
    """Quantise groups of neighbours along the last dimension; the last group may be shorter."""
    whole = x.shape[-1] // group * group
    parts = [quantise(x[..., :whole].unflatten(-1, (-1, group))).flatten(-2)] if whole else []
    parts += [quantise(x[..., whole:])] if whole < x.shape[-1] else []
    return torch.cat(parts, dim=-1)


def _checked(name: str, own: Quantiser) -> Quantiser:
    def quantise(x: Tensor) -> Tensor:
        y = own(x)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise UserError(
                f"the format {name!r} must return a tensor of the shape of its argument, "
                f"{tuple(x.shape)}, got {got}"
            )
        return y.detach().to(x.dtype)

    return quantise
